"""Structured sides: a symmetric positive semidefinite G (n, n) that is never made dense.

What an analysis needs of G it asks of the representation: numbers, a spectrum, products, solves.
Each kind says what it holds and which of these cost what.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor

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
        """The same side, whose arithmetic is done on ``device``; what is large stays where it stands."""

    @abstractmethod
    def trace(self) -> float:
        """Sum of the eigenvalues."""

    def kept_trace(self) -> float:
        """The same of what is kept, where that is not ``S`` itself but near it."""
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
        """All n eigenvalues, ascending, float64 on the host, and the rungs taken; None if not to be had without n×n.

        Zeros that the representation knows of are exact.

        Raises:
            NonFiniteFactor: If what is held is not finite; the message names ``layer``.
        """

    @property
    def has_basis(self) -> bool:
        """Whether ``eigenbasis`` has an answer."""
        return True

    def update(self) -> DiagonalUpdate | None:
        """``S`` as a diagonal plus or minus a matrix of low rank; None where it is none."""
        return None

    def counted(self, kappa_max: float | None) -> Counted | None:
        """All n eigenvalues between bounds, where ``spectrum`` has none; None where there are no bounds either.

        Args:
            kappa_max: Asks how many eigenvalues lie below ``λ_max / kappa_max``; None does not ask.
        """
        del kappa_max
        return None

    @abstractmethod
    def eigenbasis(self, layer: str) -> tuple[Tensor, Tensor]:
        """The r nonzero eigenvalues (r,), ascending, and orthonormal eigenvectors (n, r); float64.

        Raises:
            NotConverged: If they are not to be had without n×n.
        """

    @abstractmethod
    def apply(self, right: Tensor) -> Tensor:
        """``S right``, for ``right`` (n, k)."""

    @abstractmethod
    def solve(self, right: Tensor, damping: float) -> Tensor:
        """``(S + damping·I)⁻¹ right``, for ``right`` (n, k)."""

    @abstractmethod
    def logdets(self, shifts: Tensor) -> Tensor:
        """``log det(S + s·I)`` for each positive s of ``shifts`` (k,); float64 on the host."""

    @abstractmethod
    def effective_dimensions(self, shifts: Tensor) -> Tensor:
        """``tr S(S + s·I)⁻¹`` for each positive s of ``shifts`` (k,); float64 on the host."""

    @abstractmethod
    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """S itself (n, n), for tests and for a small n."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by the names that it is stored by; on the host."""

    @abstractmethod
    def metadata(self) -> dict[str, str]:
        """What ``read`` needs besides the tensors."""

    @classmethod
    @abstractmethod
    def read(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Self:
        """The inverse of ``tensors`` and ``metadata``.

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

    @property
    def size(self) -> int:
        """Rows and columns of ``S``."""
        return self.rows.shape[1]

    @property
    def count(self) -> int:
        """T: rows that are kept."""
        return self.rows.shape[0]

    @property
    def storage_dtype(self) -> torch.dtype:
        """Precision of the rows."""
        return self.rows.dtype

    def to(self, device: torch.device) -> Self:
        """The same rows, taken to ``device`` a part at a time."""
        return replace(self, computes_on=device)
