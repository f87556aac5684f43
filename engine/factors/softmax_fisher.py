"""The exact Fisher of a softmax head: a diagonal minus a matrix of low rank, never made dense.

For T loss terms with weights ω_t and probabilities p_t over V classes the head's G is

    ``S = Σ_t ω_t (diag p_t − p_t p_tᵀ) + diag e = diag d − WᵀW``,

``W_t = √ω_t p_t``, ``d = e + Σ_t ω_t p_t``; the excess e ≥ 0 is zero but for a head that is tied to
a table. Without it S is a graph's Laplacian: ``S 1 = 0``, its entries off the diagonal are ``≤ 0``,
and everything below is computed from quantities that are sums of non-negative numbers.

*Probabilities of any precision.* A row is kept as it is rounded, and stands for itself over its
sum: rounding to ε moves every entry off the diagonal by a factor within ``1 ± 2ε``, and the diagonal
follows from those (``p (1 − p)`` as ``p`` times the sum of the others, never from ``1 − p``). Two
Laplacians whose entries differ so obey ``(1 − 2ε) S ≤ S̃ ≤ (1 + 2ε) S``: *every* eigenvalue, and the
inverse at any λ, is within 2ε of the exact one, however ill-conditioned S is. A row needs no scale
of its own either, so that of 16-bit rows is a power of two that uses their range.

*Inverse* (Woodbury). With ``D = d + λ`` and the capacitance ``C = I − W D⁻¹ Wᵀ`` (T, T),

    ``(S + λI)⁻¹ = D⁻¹ + D⁻¹ Wᵀ C⁻¹ W D⁻¹``.

C is near singular where λ is small, and its diagonal, computed as written, is lost to cancellation.
It is an M-matrix with a known positive image: with the row sums ``s = W 1``, ``C s = W ((e + λ)/D)``,
since ``Wᵀ s = d − e``. So its diagonal is built from that image and its own off-diagonal entries, by
additions alone. The vector 1, where there is no excess, is an eigenvector with eigenvalue λ and is
taken out before and after.

References:
    Woodbury (1950), Inverting modified matrices
    Alfa, Xue & Ye (2001), Entrywise perturbation theory for diagonally dominant M-matrices
    Spielman & Srivastava (2011), Graph sparsification by effective resistances: order of Laplacians
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from engine.errors import BrokenFactors, NonFiniteFactor, NotConverged
from engine.factors.diagonal_update import DiagonalUpdateSide
from engine.factors.kronecker_factors import digest
from engine.factors.representation_bytes import NUMBERS_AT_ONCE, dense_head_bytes, softmax_head_bytes
from engine.linalg.eigendecomposition import decompose
from engine.linalg.linear_operator import RowSide
from engine.linalg.spectrum_counts import DiagonalUpdate
from engine.memory.guard import Guard

_LOST = 1e4
"""Largest loss by cancellation that a sum of squares may suffer: 1e-12 of what is left."""
DENSE_ROWS = 8192
"""Up to here all eigenvalues are computed from the dense matrix, where memory allows: 2 · 512 MiB in float64."""
BASIS_ROWS = 4096
"""The same with eigenvectors; above, a clipped spectrum is applied as a function of S."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SoftmaxFisher(DiagonalUpdateSide, RowSide):
    """``S = Σ_t ω_t (diag p_t − p_t p_tᵀ) + diag e``, of rows (T, V) ≥ 0, any multiple of each position's p.

    Memory:
        T·V numbers as they are stored; while a method runs T² and a few V in float64, and 48 MiB.
    """

    kind: ClassVar[Literal["softmax_head"]] = "softmax_head"
    weights: Tensor
    """ω (T,) float64."""
    excess: Tensor | None = None
    """e (V,) float64 ≥ 0; None is zero."""

    @override
    @property
    def size_bytes(self) -> int:
        return softmax_head_bytes(self.count, self.size, self.rows.element_size(), tied=self.excess is not None)

    @override
    def trace(self) -> float:
        return float(self._diagonal.sum())

    @override
    def diagonal(self) -> Tensor:
        return self._diagonal.to("cpu")

    @override
    def frobenius_norm(self) -> float:
        return self._frobenius

    @cached_property
    def _frobenius(self) -> float:
        """``√(Σ d² − 2 Σ d ∘ diag(WᵀW) + ‖WWᵀ‖²)``; entry by entry where that loses too much.

        Memory:
            T² float64 numbers.
        """
        gram = self._gram(self._root_weights.new_ones(self.size))
        squares = self._d - self._diagonal  # diag(WᵀW)
        positive = float(self._d.square().sum() + gram.square().sum())
        found = positive - 2 * float((self._d * squares).sum())
        return math.sqrt(found) if found * _LOST > positive else self._frobenius_entrywise()

    @override
    def _start(self) -> Tensor:
        noise = torch.rand(self.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return self._diagonal * (1 + noise.to(self.computes_on))

    @override
    def spectrum(self, layer: str, guard: Guard | None = None) -> tuple[Tensor, tuple[str, ...]] | None:
        if not bool(torch.isfinite(self._diagonal).all()):
            raise NonFiniteFactor(f"layer `{layer}`: the probabilities hold NaN or Inf", layer=layer)
        host = self.computes_on.type == "cpu"
        needed = dense_head_bytes(self.size)
        fits = guard is None or guard.fits(device_bytes=0 if host else needed, host_bytes=needed if host else 0)
        if self.size > DENSE_ROWS or not fits:
            return None
        found = decompose(self.to_dense(torch.float64), layer, rank_bound=self._rank_bound, guard=guard)
        return found.values, ("dense", *found.rungs)

    @override
    @property
    def has_basis(self) -> bool:  # type: ignore[override] # a constant of all others
        return self.size <= BASIS_ROWS

    @override
    def update(self) -> DiagonalUpdate:
        return DiagonalUpdate(
            base=self._d,
            rank=self.count,
            subtracts=True,
            count_below=self.count_below,
            gram=self._gram,
            parts=self._parts,
            zeros=self.size - self._rank_bound,
        )

    @override
    def eigenbasis(self, layer: str) -> tuple[Tensor, Tensor]:
        if self.size > BASIS_ROWS:
            raise NotConverged(
                f"layer `{layer}`: a softmax head of {self.size} classes has {self.size - 1} eigenvectors, and they "
                "are not to be had without a dense matrix; apply functions of it instead",
                layer=layer,
            )
        dense = self.to_dense(torch.float64)
        found = decompose(dense, layer, need="vectors", rank_bound=self._rank_bound)
        first = self.size - self._rank_bound
        if found.vectors is None:
            raise ValueError(f"layer `{layer}`: a dense matrix has vectors")
        return found.values[first:], found.vectors[:, first:]

    @override
    def apply(self, right: Tensor) -> Tensor:  # (V, k) -> (V, k)
        # the part along the vector 1, which only the excess sees, is taken out first
        wide = right.to(self.computes_on, torch.float64)
        centred = wide - wide.mean(0)
        inner = self._inner(centred)
        result = self._class_weights[:, None] * centred
        for columns, part in self._parts():
            result[columns] -= part.T @ inner
        result -= result.mean(0)
        if self._excess is not None:
            result += self._excess[:, None] * wide
        return result.to(right.device, right.dtype)

    @override
    def solve(self, right: Tensor, damping: float) -> Tensor:  # (V, k) -> (V, k)
        if self._excess is not None:
            return super().solve(right, damping)
        wide = right.to(self.computes_on, torch.float64)
        level = wide.mean(0)
        solved = super().solve(wide - level, damping)
        solved += level / damping - solved.mean(0)
        return solved.to(right.device, right.dtype)

    @override
    def to_dense(self, dtype: torch.dtype) -> Tensor:
        dense = torch.empty(self.size, self.size, dtype=torch.float64, device=self.computes_on)
        for columns, part in self._parts():
            for others, across in self._parts():
                dense[columns, others] = -(part.T @ across)
        dense.diagonal().copy_(self._diagonal)
        return dense.to(dtype)

    @override
    def tensors(self) -> dict[str, Tensor]:
        kept = {"probabilities": self.rows.to("cpu"), "position_weights": self.weights.to("cpu")}
        return kept if self.excess is None else kept | {"excess_diagonal": self.excess.to("cpu")}

    @override
    def metadata(self) -> dict[str, str]:
        return {"gradient_representation": self.kind}

    @override
    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Self:
        del metadata
        try:
            rows, weights = tensors["probabilities"], tensors["position_weights"]
        except KeyError as error:
            raise BrokenFactors(f"the stored softmax head lacks {error}", pointer="/factors") from error
        excess = tensors.get("excess_diagonal")
        if rows.ndim != 2 or weights.shape != rows.shape[:1] or (excess is not None and excess.shape != rows.shape[1:]):
            raise BrokenFactors(
                f"stored probabilities of shape {tuple(rows.shape)} do not go with weights of shape "
                f"{tuple(weights.shape)}"
                + ("" if excess is None else f" and an excess of shape {tuple(excess.shape)}"),
                pointer="/factors",
            )
        return cls(rows=rows, weights=weights, excess=excess)

    @override
    def digest(self) -> str:
        parts = [digest(tensor) for tensor in self.tensors().values()]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    @property
    def _rank_bound(self) -> int:
        return self.size - 1 if self.excess is None else self.size

    @cached_property
    def _excess(self) -> Tensor | None:
        return None if self.excess is None else self.excess.to(self.computes_on)

    @cached_property
    def _sums(self) -> Tensor:
        """(T,) sums of the rows as they are rounded."""
        sums = torch.zeros(self.count, dtype=torch.float64, device=self.computes_on)
        for columns in self._spans():
            sums += self.rows[:, columns].to(self.computes_on).sum(1, dtype=torch.float64)
        return sums

    @cached_property
    def _root_weights(self) -> Tensor:
        """The row sums s = √ω of W (T,); zero for a row of zeros, which no softmax gives."""
        return torch.where(self._sums > 0, self.weights.to(self.computes_on).sqrt(), 0.0)

    @cached_property
    def _multiples(self) -> Tensor:
        """(T,): a row of W is this times the stored one."""
        return self._root_weights / torch.where(self._sums > 0, self._sums, 1.0)

    @cached_property
    def _diagonals(self) -> tuple[Tensor, Tensor]:
        """``d − e`` and the diagonal of S, (V,) each."""
        weights = torch.empty(self.size, dtype=torch.float64, device=self.computes_on)
        diagonal = torch.empty_like(weights)
        for columns, part in self._parts():
            weights[columns] = self._root_weights @ part
            # ω p (1 − p) is W (s − W): rounding of W moves the two factors alike
            diagonal[columns] = (self._root_weights[:, None] - part).mul_(part).sum(0)
        return weights, diagonal if self._excess is None else diagonal + self._excess

    @property
    def _class_weights(self) -> Tensor:
        return self._diagonals[0]

    @property
    def _diagonal(self) -> Tensor:
        return self._diagonals[1]

    @cached_property
    def _d(self) -> Tensor:
        return self._class_weights if self._excess is None else self._class_weights + self._excess

    @override
    def _factorised(self, shift: float) -> Tensor:
        # the diagonal of C comes from ``C s`` and its other entries
        inverse = 1 / (self._d + shift)
        capacitance = self._gram(inverse)
        capacitance.diagonal().zero_()
        surplus = torch.full_like(inverse, shift) if self._excess is None else self._excess + shift
        image = self._inner((surplus * inverse)[:, None])[:, 0]
        s = self._root_weights
        diagonal = (image + capacitance @ s) / torch.where(s > 0, s, 1.0)
        # a position that weighs nothing is nowhere in S
        capacitance.neg_().diagonal().copy_(torch.where(s > 0, diagonal, 1.0))
        factor: Tensor = torch.linalg.cholesky(capacitance)
        return factor

    def _frobenius_entrywise(self) -> float:
        """From the entries, each of which is exact to rounding: V² T operations."""
        total = float(self._diagonal.square().sum())
        for columns, part in self._parts():
            for others, across in self._parts(columns.start):
                entries, within = part.T @ across, others.start == columns.start
                if within:
                    entries.diagonal().zero_()
                total += float(entries.square().sum()) * (1 if within else 2)
        return math.sqrt(total)

    def _spans(self, start: int = 0) -> Iterator[slice]:
        width = max(1, NUMBERS_AT_ONCE // max(self.count, 1))
        for first in range(start, self.size, width):
            yield slice(first, min(first + width, self.size))

    def _parts(self, start: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Columns of W (T, ·) in float64, a part at a time."""
        for columns in self._spans(start):
            here = self.rows[:, columns].to(self.computes_on)
            # a copy in any case: callers work in it
            yield columns, here.to(torch.float64) * self._multiples[:, None]
