"""Linear operators: a matrix ``S`` (n, n), such as a symmetric side of a layer, in whichever form it is kept.

What an analysis needs of a side it asks of the form: numbers, a spectrum, products, solves. Each says what it holds and
which of these cost what, and refuses by name what it cannot do::

    LinearOperator    what any square matrix can do, symmetric or not
    Operator          one side of a layer: dense or diagonal (``engine.factors.dense``), or structured
    Structured        a G that answers without n² numbers; ``to_dense`` is for callers that ask for them
    RowSide           such a G that is kept as rows

The operator of a whole model is another class, ``kronoscope.local.Operator``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from engine.errors import NotConverged
from engine.linalg.eigenbasis import ClippedSide, Eigenbasis
from engine.linalg.eigendecomposition import Decomposition, signs
from engine.linalg.eigensolvers import Need
from engine.linalg.layer_matrices import aligned, as_columns
from engine.linalg.spectrum_counts import Counted, DiagonalUpdate
from engine.memory.guard import Guard

_HOST = torch.device("cpu")
_RESIDUAL = 1e-9
Kind = Literal["dense", "woodbury", "softmax_head", "diagonal_sketch"]


class LinearOperator(ABC):
    """A square matrix ``S`` (n, n), symmetric or not; what a form cannot do it refuses by name.

    A ``layer`` is a name for messages; a ``guard`` knows what memory is free, and None assumes that everything fits.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """Rows and columns of ``S``."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of all tensors it holds."""

    @abstractmethod
    def spectrum(self, layer: str, guard: Guard | None = None) -> tuple[Tensor, tuple[str, ...]] | None:
        """Return all n eigenvalues. Zeros that the representation knows of are exact.

        Returns:
            Eigenvalues (n,), ascending, float64 on the host, and the names of the solvers tried; None if computing them
            takes an (n, n) matrix.

        Raises:
            NonFiniteFactor: If the stored tensors are not finite.
        """

    @abstractmethod
    def apply(self, right: Tensor) -> Tensor:
        """Return the product ``S right`` with columns (n, k)."""

    @abstractmethod
    def solve(self, right: Tensor, damping: float) -> Tensor:
        """Return ``(S + damping·I)⁻¹ right`` for columns (n, k); damping > 0, in the unit of the eigenvalues."""

    @abstractmethod
    def logdets(self, shifts: Tensor) -> Tensor:
        """Return ``log det(S + s·I)``, (k,) float64 on the host, at shifts s > 0 in the unit of the eigenvalues."""

    @abstractmethod
    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """Return S itself, shape (n, n), in a precision."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors by the names they are stored by, those of a side on the host."""

    @abstractmethod
    def power(self, exponent: float, layer: str) -> Eigenbasis:
        """Return ``S`` raised to a power, through its eigenvectors.

        Raises:
            NotConverged: If there are none without a dense matrix.
            UsageError: If the power is not positive and S is singular.
        """

    @abstractmethod
    def clip(self, kappa_max: float, layer: str, largest: float | None = None) -> ClippedSide:
        """Return ``max(S, λ_max / kappa_max)``.

        Args:
            kappa_max: Condition number to clip at.
            largest: λ_max, where it is known; eigenvectors know their own.

        Raises:
            NotConverged: If less is kept than it takes.
        """


class Operator(LinearOperator):
    """One side of a layer's curvature, ``S`` (n, n)."""

    kind: ClassVar[Kind]
    """Which representation this is; matrices and diagonals are `dense`."""
    is_diagonal: ClassVar[bool] = False
    """Whether the side is kept as a diagonal."""
    complete: ClassVar[bool] = True
    """Whether more is known than diagonal and trace; else nothing but those may be asked for."""
    approximate: ClassVar[bool] = False
    """Whether ``S`` is not the factor itself but near it."""
    has_basis: ClassVar[bool] = True
    """Whether there are eigenvectors."""

    @property
    @abstractmethod
    def storage_dtype(self) -> torch.dtype:
        """Precision of the largest tensor it holds."""

    @property
    def wide_dtype(self) -> torch.dtype:
        """Precision of ``widened``: float32, or wider."""
        return torch.promote_types(self.storage_dtype, torch.float32)

    @abstractmethod
    def to(self, device: torch.device) -> Self:
        """Return the same side with its arithmetic on another device; large tensors stay where they are."""

    @abstractmethod
    def trace(self) -> float:
        """Sum of the eigenvalues."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """(n,) float64 on the host."""

    @abstractmethod
    def frobenius_norm(self) -> float:
        """Root of the sum of the squared eigenvalues."""

    @abstractmethod
    def spectral_norm(self) -> float:
        """Largest eigenvalue."""

    def update(self) -> DiagonalUpdate | None:
        """``S`` as a diagonal plus or minus a matrix of low rank; None where it is none."""
        return None

    def counted(self, kappa_max: float | None) -> Counted | None:
        """Return bounds of all n eigenvalues for a side without a ``spectrum``.

        Args:
            kappa_max: Condition number for whose floor ``λ_max / kappa_max`` the eigenvalues below it are counted; None
                counts none.

        Returns:
            Estimates between bounds; None where there are no bounds either.
        """
        del kappa_max
        return None

    @abstractmethod
    def metadata(self) -> dict[str, str]:
        """Return the strings that ``read`` needs besides the tensors."""

    @abstractmethod
    def digest(self) -> str:
        """SHA-256 over all that is stored."""

    def widened(self) -> Tensor:
        """Return S in ``wide_dtype``, shape (n, n), or (n,) of a diagonal."""
        return self.to_dense(self.wide_dtype)

    def panel(self, span: slice, unit: float) -> Tensor:
        """Return some rows of S/unit.

        Args:
            span: Which rows, b of them.
            unit: A power of two.

        Returns:
            Shape (b, n), or (b,) of a diagonal, float64.
        """
        columns = torch.zeros(self.size, span.stop - span.start, dtype=torch.float64)
        columns[span] = torch.eye(span.stop - span.start, dtype=torch.float64)
        return self.apply(columns).mT / unit

    def left(self, matrices: Tensor) -> Tensor:
        """Return ``S V``.

        Args:
            matrices: V of k vectors, shape (n, k, m), as ``layer_matrices`` arranges them.

        Returns:
            The same shape, in the precision and on the device of ``matrices``; a new tensor.
        """
        found = aligned(*matrices.shape, like=matrices)
        as_columns(found).copy_(self.apply(as_columns(matrices)))
        return found

    def right(self, matrices: Tensor) -> Tensor:  # (m, k, n) -> (m, k, n)
        """Return ``V S`` of a matrix or a diagonal."""
        del matrices
        raise TypeError("A is never kept as a structured side")

    def inverse(self, shift: float, device: torch.device, dtype: torch.dtype) -> "Operator | None":
        """Return ``(S + shift I)⁻¹`` of a matrix or a diagonal, computed in float64.

        Args:
            shift: Positive; 0 will do for a diagonal that is positive.
            device: Where it is computed.
            dtype: Precision that it is kept in.

        Returns:
            A matrix or a diagonal; None where the sum is not positive definite to rounding, or the side is structured.

        Memory:
            Three times n² in float64 while it is computed.
        """
        del shift, device, dtype
        return None

    @abstractmethod
    def basis(self, layer: str, device: torch.device, guard: Guard | None, dtype: torch.dtype) -> Eigenbasis:
        """Return eigenvalues and eigenvectors, those of a structured side without the zeros.

        Args:
            device: Where a matrix is decomposed.
            dtype: Precision of the vectors.

        Returns:
            The basis, its vectors where S is kept.

        Raises:
            NotConverged: If a structured side has none without a dense matrix.
        """

    @override
    def power(self, exponent: float, layer: str) -> Eigenbasis:
        return self.basis(layer, _HOST, None, torch.float64).power(exponent)

    @override
    def clip(self, kappa_max: float, layer: str, largest: float | None = None) -> ClippedSide:
        del largest
        return self.basis(layer, _HOST, None, torch.float64).clip(kappa_max, torch.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Structured(Operator):
    """A side that is never made dense; its large tensors are taken to where it computes a part at a time."""

    computes_on: torch.device = field(default=_HOST)

    @override
    def to(self, device: torch.device) -> Self:
        return replace(self, computes_on=device)

    def kept_trace(self) -> float:
        """Return the trace of the stored approximation, which differs from ``trace`` where that is not ``S`` itself."""
        return self.trace()

    @abstractmethod
    def eigenbasis(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return the r nonzero eigenvalues and their eigenvectors.

        Returns:
            Values (r,), ascending, and orthonormal vectors (n, r), one a column; float64.

        Raises:
            NotConverged: If computing them takes an (n, n) matrix.
        """

    @abstractmethod
    def effective_dimensions(self, shifts: Tensor) -> Tensor:
        """Return ``tr S(S + s·I)⁻¹``, each between 0 and n, at the shifts that ``logdets`` takes, and in that shape."""

    @classmethod
    @abstractmethod
    def read(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Self:
        """Restore a side, which computes on the host, from what ``tensors`` and ``metadata`` returned.

        Raises:
            BrokenFactors: If something is missing or of another shape.
        """

    def decompose(self, layer: str, *, need: Need = "values", guard: Guard | None = None) -> Decomposition | None:
        """Decompose the side: values (n,) and, where asked for, vectors (n, r) of those that are not zero.

        Returns:
            None if the side has no spectrum without an (n, n) matrix.

        Raises:
            NotConverged: If the eigenvectors do not reproduce the side to a relative residual of 1e-9.
        """
        found = self.spectrum(layer, guard)
        if found is None:
            return None
        values, tried = found
        vectors = residual = None
        if need == "vectors" and self.has_basis:
            nonzero, vectors = self.eigenbasis(layer)
            residual = self._residual_of(nonzero, vectors)
            if not residual <= _RESIDUAL:
                raise NotConverged(
                    f"layer `{layer}`: the eigenvectors of a side kept as `{self.kind}` give it back to {residual:.2g} "
                    "only; take `woodbury.policy: dense`",
                    layer=layer,
                )
        return Decomposition(values=values, vectors=vectors, rungs=tried, residual=residual, precision="float64")

    @override
    def basis(self, layer: str, device: torch.device, guard: Guard | None, dtype: torch.dtype) -> Eigenbasis:
        found = self.decompose(layer, need="vectors", guard=guard)
        if found is None or found.vectors is None:
            values, vectors = self.eigenbasis(layer)  # says why there is none
        else:
            values, vectors = found.values, found.vectors
        values = values[values.numel() - vectors.shape[1] :]
        return Eigenbasis(values.to("cpu", torch.float64), vectors.to("cpu", dtype))

    def _residual_of(self, values: Tensor, vectors: Tensor) -> float:
        """‖S − QΛQᵀ‖_F / ‖S‖_F, estimated from products with eight vectors of signs."""
        probes = signs(self.size).to(vectors.device)
        inside = values.to(vectors.device)[:, None] * (vectors.T @ probes)
        missed = float((self.apply(probes).to(vectors.device) - vectors @ inside).norm()) / math.sqrt(probes.shape[1])
        norm = self.frobenius_norm()
        return missed / norm if norm > 0 else missed


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSide(Structured):
    """A side that is kept as rows (T, n), one of each position."""

    rows: Tensor
    """(T, n), in the storage dtype."""

    @override
    @property
    def size(self) -> int:
        return self.rows.shape[1]

    @property
    def count(self) -> int:
        """T: rows that are kept."""
        return self.rows.shape[0]

    @override
    @property
    def storage_dtype(self) -> torch.dtype:
        return self.rows.dtype
