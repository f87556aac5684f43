"""Diagonal and sketch: what is kept of a G that is too wide to be held in any exact form.

The diagonal is exact, and so is the trace. A sketch of ℓ rows B, where the job allows approximation,
stands for the sum of the outer products of all rows that ever came, ``0 ≤ UᵀU − BᵀB ≤ δ I``, with δ
known. Then

    ``S̃ = diag c + BᵀB``, ``c = diag(S − BᵀB)``       of gradient rows, ``S = UᵀU``;
    ``S̃ = diag c − BᵀB``, ``c = Σ_t ω_t p_t``         of probabilities, ``S = diag c − UᵀU``.

Both are positive semidefinite and within δ of S in the spectral norm: for R = UᵀU − BᵀB the first misses
``R − diag R``, the second ``R``. Everything but diagonal and trace is of S̃.

References:
    Ghashami, Liberty, Phillips & Woodruff (2016), Frequent directions: simple and deterministic matrix sketching
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from engine.errors import BrokenFactors, NotConverged
from engine.factors.diagonal_update import DiagonalUpdateSide
from engine.factors.kronecker_factors import digest
from engine.factors.representation_bytes import NUMBERS_AT_ONCE
from engine.linalg.spectrum_counts import Counted, DiagonalUpdate


@dataclass(frozen=True, kw_only=True, eq=False)
class DiagonalSketch(DiagonalUpdateSide):
    """The exact diagonal of S, and S̃ where there is a sketch.

    Memory:
        ℓ·n numbers as they are stored; while a method runs ℓ² and a few n in float64, and 16 MiB.
    """

    kind: ClassVar[Literal["diagonal_sketch"]] = "diagonal_sketch"
    has_basis: ClassVar[bool] = False
    exact_diagonal: Tensor
    """(n,) float64."""
    base: Tensor | None = None
    """c (n,) float64; None where only the diagonal is kept."""
    rows: Tensor | None = None
    """B (ℓ, n) in float32 or float64."""
    subtracts: bool = False
    """BᵀB is subtracted from ``diag c``."""
    bound: float | None = None
    """δ: how far S̃ may be from S in the spectral norm."""

    @override
    @property
    def size(self) -> int:
        return self.exact_diagonal.shape[0]

    @override
    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    @override
    @property
    def storage_dtype(self) -> torch.dtype:
        return self.exact_diagonal.dtype if self.rows is None else self.rows.dtype

    @override
    @property
    def complete(self) -> bool:  # type: ignore[override] # a constant of all others
        return self.rows is not None

    @override
    @property
    def approximate(self) -> bool:  # type: ignore[override] # the same
        return self.rows is not None and self.bound != 0

    @override
    def trace(self) -> float:
        return float(self.exact_diagonal.sum())

    @override
    def kept_trace(self) -> float:
        return self._sketched_trace

    @override
    def diagonal(self) -> Tensor:
        return self.exact_diagonal.to("cpu")

    @override
    def frobenius_norm(self) -> float:
        return self._frobenius

    @cached_property
    def _frobenius(self) -> float:
        c = self._base
        squares = torch.empty_like(c)
        for columns, part in self._parts():
            squares[columns] = part.square().sum(0)
        gram = self._gram(torch.ones_like(c))
        return math.sqrt(max(float(c.square().sum() + gram.square().sum()) + 2 * self._sign * float(c @ squares), 0.0))

    @override
    def _start(self) -> Tensor:
        noise = torch.rand(self.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return self._base * 0 + 1 + noise.to(self.computes_on)

    @override
    def spectrum(self, layer: str, guard: object = None) -> None:
        del layer, guard

    @override
    def counted(self, kappa_max: float | None) -> Counted | None:
        found = None if self.rows is None else super().counted(kappa_max)
        bound = self.bound or 0.0
        # of probabilities S ≤ S̃: the sketch takes away too little
        return None if found is None else found.widened(bound, 0.0 if self.subtracts else bound)

    @override
    def update(self) -> DiagonalUpdate:
        return DiagonalUpdate(
            base=self._base,
            rank=self._rows.shape[0],
            subtracts=self.subtracts,
            count_below=self.count_below,
            gram=self._signed_gram,
            parts=self._parts,
        )

    @override
    def eigenbasis(self, layer: str) -> tuple[Tensor, Tensor]:
        raise NotConverged(f"layer `{layer}`: {_MISSING}", layer=layer)

    @override
    def apply(self, right: Tensor) -> Tensor:  # (n, k) -> (n, k)
        wide = right.to(self.computes_on, torch.float64)
        inner = self._inner(wide)
        result = self._base[:, None] * wide
        for columns, part in self._parts():
            result[columns] += self._sign * (part.T @ inner)
        return result.to(right.device, right.dtype)

    def plus_diagonal(self, factor: float, added: Tensor) -> Self:
        """Return ``factor · S + diag(added)``.

        Args:
            factor: Nonnegative.
            added: Nonnegative numbers, shape (n,), float64 on the host.

        Returns:
            A side whose bound is ``factor`` times this one's.

        Raises:
            NotConverged: Without a sketch.
        """
        return replace(
            self,
            exact_diagonal=self.diagonal() * factor + added,
            base=self._base.to("cpu") * factor + added,
            rows=self._rows * math.sqrt(factor),
            bound=None if self.bound is None else self.bound * factor,
        )

    @override
    def to_dense(self, dtype: torch.dtype) -> Tensor:
        dense = torch.diag(self._base)
        for columns, part in self._parts():
            for others, across in self._parts():
                dense[columns, others] += self._sign * (part.T @ across)
        return dense.to(dtype)

    @override
    def tensors(self) -> dict[str, Tensor]:
        kept = {"exact_diagonal": self.exact_diagonal, "base_diagonal": self.base, "sketch": self.rows}
        return {name: tensor.to("cpu") for name, tensor in kept.items() if tensor is not None}

    @override
    def metadata(self) -> dict[str, str]:
        return {
            "gradient_representation": self.kind,
            "sketch_is_subtracted": str(self.subtracts).lower(),
            "sketch_bound": repr(self.bound),
        }

    @override
    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Self:
        try:
            diagonal, stored = tensors["exact_diagonal"], metadata["sketch_bound"]
            subtracts, bound = metadata["sketch_is_subtracted"] == "true", None if stored == "None" else float(stored)
        except (KeyError, ValueError) as error:
            raise BrokenFactors(f"the stored diagonal of G lacks or garbles {error}", pointer="/factors") from error
        base, rows = tensors.get("base_diagonal"), tensors.get("sketch")
        whole = base is not None and base.shape == diagonal.shape and rows is not None and rows.ndim == 2
        if (base is not None or rows is not None) and not (whole and rows is not None and rows.shape[1:] == base.shape):  # type: ignore[union-attr]
            raise BrokenFactors("the stored sketch of G does not go with its diagonal", pointer="/factors")
        return cls(exact_diagonal=diagonal, base=base, rows=rows, subtracts=subtracts, bound=bound)

    @override
    def digest(self) -> str:
        parts = [digest(tensor) for tensor in self.tensors().values()]
        return hashlib.sha256(" ".join([*parts, repr(self.bound)]).encode()).hexdigest()

    @property
    def _sign(self) -> int:
        return -1 if self.subtracts else 1

    @cached_property
    def _base(self) -> Tensor:
        if self.base is None:
            raise NotConverged(_MISSING)
        return self.base.to(self.computes_on)

    @cached_property
    def _sketched_trace(self) -> float:
        """Trace of S̃, which is not that of S where a sketch is subtracted."""
        return float(self._base.sum()) + self._sign * sum(float(part.square().sum()) for _, part in self._parts())

    @override
    def _factorised(self, shift: float) -> Tensor:
        capacitance = self._gram(1 / (self._base + shift)).mul_(self._sign)
        capacitance.diagonal().add_(1)
        factor: Tensor = torch.linalg.cholesky(capacitance)
        return factor

    @property
    def _rows(self) -> Tensor:
        if self.rows is None:
            raise NotConverged(_MISSING)
        return self.rows

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Columns of B (ℓ, ·) in float64, a part at a time."""
        width = max(1, NUMBERS_AT_ONCE // max(self._rows.shape[0], 1))
        for start in range(0, self.size, width):
            columns = slice(start, min(start + width, self.size))
            yield columns, self._rows[:, columns].to(self.computes_on).to(torch.float64)


_MISSING = (
    "only the exact diagonal and trace of G are kept: it does not fit, neither dense nor by its rows; allow "
    "`woodbury.approximate`, or raise the budget"
)
