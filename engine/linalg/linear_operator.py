"""Linear operators for structured sides: a symmetric positive semidefinite G (n, n) that is never made dense.

What an analysis needs of G it asks of the representation: numbers, a spectrum, products, solves.
Each kind says what it holds and which of these cost what.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from engine.linalg.spectrum_counts import Counted, DiagonalUpdate
from engine.memory.guard import Guard

_HOST = torch.device("cpu")
Kind = Literal["woodbury", "softmax_head", "diagonal_sketch"]


class Structured(ABC):
    """One side of a layer's curvature, ``S`` (n, n)."""

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """Which representation this is."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Rows and columns of ``S``."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of all tensors it holds."""

    @property
    @abstractmethod
    def storage_dtype(self) -> torch.dtype:
        """Precision of the largest tensor it holds."""

    @property
    def complete(self) -> bool:
        """Whether more is known than diagonal and trace; else nothing but those may be asked for."""
        return True

    @property
    def approximate(self) -> bool:
        """Whether ``S`` is not the factor itself but near it."""
        return False

    @abstractmethod
    def to(self, device: torch.device) -> Self:
        """Return the same side with its arithmetic on another device; large tensors stay where they are.

        Args:
            device: Where products and solves are computed.

        Returns:
            A side that shares its tensors with this one.
        """

    @abstractmethod
    def trace(self) -> float:
        """Sum of the eigenvalues."""

    def kept_trace(self) -> float:
        """Return the trace of the stored approximation, which differs from ``trace`` where that is not ``S`` itself."""
        return self.trace()

    @abstractmethod
    def diagonal(self) -> Tensor:
        """(n,) float64 on the host."""

    @abstractmethod
    def frobenius_norm(self) -> float:
        """Root of the sum of the squared eigenvalues."""

    @abstractmethod
    def spectral_norm(self) -> float:
        """Largest eigenvalue."""

    @abstractmethod
    def spectrum(self, layer: str, guard: Guard | None = None) -> tuple[Tensor, tuple[str, ...]] | None:
        """Return all n eigenvalues. Zeros that the representation knows of are exact.

        Args:
            layer: The layer's name, for messages.
            guard: Knows what memory is free; None assumes that everything fits.

        Returns:
            Eigenvalues (n,), ascending, float64 on the host, and the names of the solvers tried; None if computing them
            takes an (n, n) matrix.

        Raises:
            NonFiniteFactor: If the stored tensors are not finite.
        """

    @property
    def has_basis(self) -> bool:
        """Whether ``eigenbasis`` has an answer."""
        return True

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
    def eigenbasis(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return the r nonzero eigenvalues and their eigenvectors.

        Args:
            layer: The layer's name, for messages.

        Returns:
            Values (r,), ascending, and orthonormal vectors (n, r), one a column; float64.

        Raises:
            NotConverged: If computing them takes an (n, n) matrix.
        """

    @abstractmethod
    def apply(self, right: Tensor) -> Tensor:
        """Return the product ``S right``.

        Args:
            right: Columns to multiply, shape (n, k).

        Returns:
            Shape (n, k).
        """

    @abstractmethod
    def solve(self, right: Tensor, damping: float) -> Tensor:
        """Return ``(S + damping·I)⁻¹ right``.

        Args:
            right: Right-hand sides, shape (n, k).
            damping: Positive, in the unit of the eigenvalues.

        Returns:
            Shape (n, k).
        """

    @abstractmethod
    def logdets(self, shifts: Tensor) -> Tensor:
        """Return ``log det(S + s·I)`` at each shift.

        Args:
            shifts: Positive s, shape (k,), in the unit of the eigenvalues.

        Returns:
            Natural logarithms, shape (k,), float64 on the host.
        """

    @abstractmethod
    def effective_dimensions(self, shifts: Tensor) -> Tensor:
        """Return ``tr S(S + s·I)⁻¹`` at each shift.

        Args:
            shifts: Positive s, shape (k,), in the unit of the eigenvalues.

        Returns:
            Shape (k,), float64 on the host, each between 0 and n.
        """

    @abstractmethod
    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """Return S itself, for tests and for a small n.

        Args:
            dtype: Precision of the result.

        Returns:
            Shape (n, n).
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors, on the host, by the names they are stored by; each kind has its own shapes."""

    @abstractmethod
    def metadata(self) -> dict[str, str]:
        """Return the strings that ``read`` needs besides the tensors."""

    @classmethod
    @abstractmethod
    def read(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Self:
        """Restore a side from its stored tensors and strings.

        Args:
            tensors: As ``tensors`` returned them, in the shapes of the kind.
            metadata: As ``metadata`` returned them.

        Returns:
            A side that computes on the host.

        Raises:
            BrokenFactors: If something is missing or of another shape.
        """

    @abstractmethod
    def digest(self) -> str:
        """SHA-256 over all that is stored."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSide(Structured):
    """A side that is kept as rows (T, n), one of each position."""

    rows: Tensor
    """(T, n), in the storage dtype."""
    computes_on: torch.device = field(default=_HOST)

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

    @override
    def to(self, device: torch.device) -> Self:
        # return the same rows, taken to another device a part at a time
        return replace(self, computes_on=device)
