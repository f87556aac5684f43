"""The eigenbasis of one side of a layer, or the part of it that is needed, with functions of its eigenvalues.

    ``w(S) v = Q ((w(s) − w(f)) ∘ Qᵀ v) + w(f) v``

Where fewer than half of the directions are above the floor f of a clipped side they alone are kept, and what is
orthogonal to them is multiplied by w(f).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from engine.errors import BrokenFactors, NonFiniteFactor, UsageError
from engine.linalg.damping import clipping_floor

_PANEL_BYTES = 16 * 2**20


class ClippedSide(ABC):
    """``max(S, f)`` of a side S, as it is applied and inverted."""

    floor: float
    """f ≥ 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """N, rows and columns."""

    @abstractmethod
    def apply(self, right: Tensor) -> Tensor:
        """Return ``max(S, f) right`` of any float tensor (n, k), in its shape, dtype and device."""

    @abstractmethod
    def solve(self, right: Tensor, damping: float = 0.0) -> Tensor:
        """Return ``(max(S, f) + damping·I)⁻¹ right``, as ``apply`` does; damping ≥ 0 in the unit of the eigenvalues.

        Memory:
            Four times ``right`` in float64; of an eigenbasis 16 MiB of eigenvectors at a time where ``right`` is.
        """

    @abstractmethod
    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the stored tensors, on the host, by the names they are stored by.

        Args:
            prefix: First part of an eigenbasis's names, one of ``PREFIX``.
        """

    @abstractmethod
    def entry(self) -> dict[str, Any]:
        """Return the index's entry for it, which reading needs besides the tensors; the scale is in the numbers."""


@dataclass(frozen=True, eq=False)
class Eigenbasis(ClippedSide):
    """``Q diag(s) Qᵀ + f (I − Q Qᵀ)``: one side of a layer."""

    values: Tensor
    """s (r,) float64, ascending or in the order of a diagonal's entries; negative by the rounding of a stored factor
    alone."""
    vectors: Tensor | None
    """Q (n, r), one eigenvector a column, of the r largest values; None is the identity, with r = n."""
    floor: float = 0.0
    """f, the value of all other directions; of a clipped side none of s is below it."""

    @override
    @property
    def size(self) -> int:
        return self.values.numel() if self.vectors is None else self.vectors.shape[0]

    @property
    def complete(self) -> bool:
        """Whether the vectors span the whole space: r = n."""
        return self.values.numel() == self.size

    @property
    def all_values(self) -> Tensor:
        """Every eigenvalue, shape (n,), those outside of the span included."""
        missing = self.size - self.values.numel()
        return torch.cat([self.values.new_full((missing,), self.floor), self.values]) if missing else self.values

    @property
    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest eigenvalue."""
        if not self.values.numel():
            return self.floor, self.floor
        least, most = float(self.values.min()), float(self.values.max())
        return (least, most) if self.complete else (min(least, self.floor), most)

    @property
    def nearest(self) -> "Eigenbasis":
        """The basis of the nearest positive semidefinite factor: itself, or eigenvalues below zero as zero."""
        return self if self.extremes[0] >= 0 else replace(self, values=self.values.clamp_min(0))

    def clip(self, kappa_max: float, dtype: torch.dtype = torch.float32) -> "Eigenbasis":
        """Raise eigenvalues below ``λ_max / kappa_max`` to that floor, and keep the eigenvectors that are needed.

        Args:
            kappa_max: Condition number to clip at.
            dtype: Precision that the eigenvectors are kept in.

        Memory:
            The eigenvectors kept: (n, n) numbers of ``dtype`` at most.

        Raises:
            NonFiniteFactor: If the values hold NaN or Inf.
        """
        if not bool(torch.isfinite(self.values).all()):
            raise NonFiniteFactor("the eigenvalues hold NaN or Inf")
        values = self.all_values
        floor = clipping_floor(float(values.max()), kappa_max)
        if self.vectors is None:
            return Eigenbasis(values.to(torch.float64).clamp_min(floor), None, floor)
        size, width = self.vectors.shape
        # of few directions the others are zero, but for rounding that a low floor may lie below
        kept = min(int((values >= floor).sum()), width)
        if 2 * kept > size and width == size:
            kept = size
        vectors = self.vectors[:, width - kept :].to(dtype).contiguous()
        return Eigenbasis(values[size - kept :].clamp_min(floor), vectors, floor)

    def power(self, exponent: float) -> "Eigenbasis":
        """Return the side raised to a power.

        Raises:
            UsageError: If the power is not positive and an eigenvalue is zero or below.
        """
        basis = self if float(exponent).is_integer() else self.nearest
        if exponent <= 0 and not basis.extremes[0] > 0:
            raise UsageError(f"a side whose smallest eigenvalue is {basis.extremes[0]:.3g} has no power {exponent:g}")
        outside = 0.0 if basis.complete else float(basis.floor**exponent)
        return Eigenbasis(basis.values.pow(exponent), basis.vectors, outside)

    @override
    def apply(self, right: Tensor) -> Tensor:
        return self._through(right, lambda values: values)

    @override
    def solve(self, right: Tensor, damping: float = 0.0) -> Tensor:
        return self._through(right, lambda values: 1 / (values + damping))

    def _through(self, right: Tensor, weight: Callable[[Tensor], Tensor]) -> Tensor:
        weights = weight(self.values).to(right.device)
        if self.vectors is None:
            return (right.to(torch.float64) * weights[:, None]).to(right.dtype)
        dtype = torch.promote_types(self.vectors.dtype, right.dtype)
        wide, weights = right.to(dtype), weights.to(dtype)
        total = torch.zeros_like(wide)
        rest = wide
        width = max(1, _PANEL_BYTES // (self.vectors.shape[0] * wide.element_size()))
        panels = range(0, self.vectors.shape[1], width)
        partial = self.vectors.shape[1] < self.size
        # what lies outside of the kept directions is small beside what lies inside: once is not orthogonal enough
        for _ in range(2 if partial else 1):
            outside = rest.clone() if partial else rest
            for start in panels:
                basis = self.vectors[:, start : start + width].to(right.device, dtype)
                inside = basis.mT @ rest
                total += basis @ (inside * weights[start : start + width, None])
                if partial:
                    outside -= basis @ inside
            rest = outside
        if partial:
            total += rest * float(weight(torch.tensor(self.floor, dtype=torch.float64)))
        return total.to(right.dtype)

    @override
    def tensors(self, prefix: str) -> dict[str, Tensor]:
        found = {
            f"{prefix}_values": self.values.to("cpu"),
            f"{prefix}_floor": torch.tensor([self.floor], dtype=torch.float64),
        }
        if self.vectors is not None:
            found[f"{prefix}_vectors"] = self.vectors.to("cpu")
        return found

    @override
    def entry(self) -> dict[str, Any]:
        return {"kind": "eigenbasis", "floor": self.floor, "scale": 1.0}

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], prefix: str) -> "Eigenbasis":
        """Restore a side from its stored tensors.

        Args:
            tensors: As ``tensors`` returned them, among others.
            prefix: First part of the names of this side.

        Raises:
            BrokenFactors: If something is missing, or of another shape.
        """
        values, vectors = tensors.get(f"{prefix}_values"), tensors.get(f"{prefix}_vectors")
        floor = tensors.get(f"{prefix}_floor")
        if values is None or floor is None or (vectors is not None and vectors.shape[1:] != values.shape):
            raise BrokenFactors(f"the stored eigenbasis lacks or garbles `{prefix}_values`")
        return cls(values, vectors, float(floor))
