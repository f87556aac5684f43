"""The inverse of a clipped factor, applied in its eigenbasis and never rebuilt.

``Q max(Λ, f) Qᵀ`` rounded to float32 has lost up to a tenth of what its inverse needs at κ = 1e6. Its
eigenbasis has not: computed in float64 and stored in float32 it applies the inverse to 1e-6,

    ``(Q max(Λ, f) Qᵀ + λI)⁻¹ v = Q ((Qᵀ v) / (max(Λ, f) + λ))``.

Where fewer than half of the directions are above the floor they alone are kept, and what is
orthogonal to them is divided by f + λ.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from catalog.brief import cut
from catalog.field_errors import near_names
from engine.errors import BrokenFactors, NonFiniteFactor
from engine.factors.clipping.clipped_operator import ClippedOperator
from engine.factors.kronecker_factors import unpacked
from engine.linalg.damping import clipping_floor

PREFIX = {"A": "activation", "G": "gradient"}
"""Prefixes of the names that each side's tensors are stored by."""
_PANEL_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class StabilisedSide:
    """One side of a layer in its eigenbasis."""

    values: Tensor
    """(n,) or (r,) float64, none below the floor; of a diagonal side in the order of its entries."""
    vectors: Tensor | None
    """(n, n), or (n, r) of the r largest values; None is the identity, of a diagonal side."""
    floor: float

    @classmethod
    def of(
        cls,
        values: Tensor,  # (n,) ascending; of a diagonal side in the order of its entries
        vectors: Tensor | None,  # (n, n), or (n, r) of the r largest
        kappa_max: float,
        dtype: torch.dtype = torch.float32,
    ) -> "StabilisedSide":
        """Clip eigenvalues at ``λ_max / kappa_max`` and keep the eigenvectors that are needed.

        Args:
            values: Eigenvalues, shape (n,), float64, ascending; of a diagonal side in the order of its entries.
            vectors: Eigenvectors, one a column, shape (n, n), or (n, r) of the r largest values; None of a diagonal
                side.
            kappa_max: Condition number to clip at.
            dtype: Precision that the eigenvectors are kept in.

        Returns:
            The clipped side.

        Memory:
            The eigenvectors kept: (n, n) numbers of ``dtype`` at most.

        Raises:
            NonFiniteFactor: If the values hold NaN or Inf.
        """
        if not bool(torch.isfinite(values).all()):
            raise NonFiniteFactor("the eigenvalues hold NaN or Inf")
        floor = clipping_floor(float(values.max()), kappa_max)
        if vectors is None:
            return cls(values=values.to(torch.float64).clamp_min(floor), vectors=None, floor=floor)
        size, width = vectors.shape
        # of few directions the others are zero, but for rounding that a low floor may lie below
        kept = min(int((values >= floor).sum()), width)
        if 2 * kept > size and width == size:
            kept = size
        return cls(
            values=values[size - kept :].clamp_min(floor),
            vectors=vectors[:, width - kept :].to(dtype).contiguous(),
            floor=floor,
        )

    @property
    def size(self) -> int:
        """Rows and columns of the side."""
        return self.values.numel() if self.vectors is None else self.vectors.shape[0]

    def apply(self, right: Tensor) -> Tensor:
        """Return the product of the stabilised side with columns.

        Args:
            right: Shape (n, k), any float dtype and device.

        Returns:
            Shape (n, k), its dtype and device those of ``right``.
        """
        return self._through(right, lambda values: values)

    def solve(self, right: Tensor, damping: float = 0.0) -> Tensor:
        """Return ``(S + damping·I)⁻¹ right``.

        Args:
            right: Shape (n, k), any float dtype and device.
            damping: Nonnegative, in the unit of the eigenvalues.

        Returns:
            Shape (n, k), its dtype and device those of ``right``.

        Memory:
            16 MiB of eigenvectors at a time where ``right`` is, and three times ``right``.
        """
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

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the stored tensors, on the host, by the names they are stored by.

        Args:
            prefix: First part of each name, one of ``PREFIX``.

        Returns:
            Values (r,), the floor (1,) and, but for a diagonal side, vectors (n, r).
        """
        found = {
            f"{prefix}_values": self.values.to("cpu"),
            f"{prefix}_floor": torch.tensor([self.floor], dtype=torch.float64),
        }
        if self.vectors is not None:
            found[f"{prefix}_vectors"] = self.vectors.to("cpu")
        return found

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], prefix: str) -> "StabilisedSide":
        """Restore a side from its stored tensors.

        Args:
            tensors: As ``tensors`` returned them, among others.
            prefix: First part of the names of this side.

        Returns:
            The side.

        Raises:
            BrokenFactors: If something is missing, or of another shape.
        """
        values, vectors = tensors.get(f"{prefix}_values"), tensors.get(f"{prefix}_vectors")
        floor = tensors.get(f"{prefix}_floor")
        if values is None or floor is None or (vectors is not None and vectors.shape[1:] != values.shape):
            raise BrokenFactors(f"the stored eigenbasis lacks or garbles `{prefix}_values`")
        return cls(values=values, vectors=vectors, floor=float(floor))


def _of_matrix(stored: Tensor, scale: float, *, diagonal: bool) -> StabilisedSide:
    """A rebuilt side, of which there is no basis: through that of the matrix as it came out.

    Memory:
        Three times n² in float64.
    """
    if diagonal:
        return StabilisedSide(values=stored.to(torch.float64) * scale, vectors=None, floor=0.0)
    size = (math.isqrt(8 * stored.numel() + 1) - 1) // 2
    matrix = stored if stored.ndim == 2 else unpacked(stored, size)
    values, vectors = torch.linalg.eigh(matrix.to(torch.float64))
    return StabilisedSide(values=values * scale, vectors=vectors, floor=0.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class StabilisedInverse:
    """Both sides of a layer: ``(A_s + λ_A I) ⊗ (G_s + λ_G I)`` and its inverse."""

    A: StabilisedSide
    G: StabilisedSide | ClippedOperator

    def __repr__(self) -> str:
        """Return one line: the rows of both sides."""
        return f"<StabilisedInverse: A of {self.A.size} rows, G of {self.G.size}>"

    def apply(self, gradient: Tensor) -> Tensor:
        """Return ``G_s V A_s``.

        Args:
            gradient: V, shape (out_dim, in_dim).

        Returns:
            Shape (out_dim, in_dim), in the dtype of V.
        """
        return self.A.apply(self.G.apply(gradient).mT).mT

    def solve(self, gradient: Tensor, damping_A: float = 0.0, damping_G: float = 0.0) -> Tensor:
        """Return ``(G_s + λ_G I)⁻¹ V (A_s + λ_A I)⁻¹``, the preconditioned gradient under factored damping.

        Args:
            gradient: V, shape (out_dim, in_dim).
            damping_A: λ_A ≥ 0, in the unit of A.
            damping_G: λ_G ≥ 0, in the unit of G.

        Returns:
            Shape (out_dim, in_dim), in the dtype of V.
        """
        return self.A.solve(self.G.solve(gradient, damping_G).mT, damping_A).mT


def _operator(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ClippedOperator | None:
    """A G that is never made dense; None where it is kept otherwise."""
    said = entry["sides"].get("G", {})
    return ClippedOperator.read(said, tensors) if said.get("kind") == "operator" else None


class StabilisedLayers(Mapping[str, StabilisedInverse]):
    """Stored sides by layer name, read when they are asked for; a matrix among them is decomposed then."""

    def __init__(self, entries: Sequence[Mapping[str, Any]], load: Callable[[int], Mapping[str, Tensor]]) -> None:
        """Take what the index says of each layer, and what reads the tensors of an ordinal."""
        self._layers = {str(entry["name"]): entry for entry in entries}
        self._load = load

    def __getitem__(self, layer: str) -> StabilisedInverse:
        """Both sides of a layer."""
        if layer not in self._layers:
            raise KeyError(f"no layer {layer!r} is stabilised{near_names(layer, self._layers)}")
        entry = self._layers[layer]
        own, holder, form = int(entry["ordinal"]), int(entry["holder_of_A"]), str(entry["form"])
        tensors = self._load(own)
        gradient = _operator(entry, tensors) or self._side(entry, tensors, "G", diagonal=form == "diagonal_block")
        if form in ("block", "diagonal_block"):
            one = torch.ones(1, dtype=torch.float64)
            return StabilisedInverse(A=StabilisedSide(values=one, vectors=None, floor=0.0), G=gradient)
        shared = tensors if holder == own else self._load(holder)
        leader = next(each for each in self._layers.values() if int(each["ordinal"]) == holder)
        return StabilisedInverse(A=self._side(leader, shared, "A", diagonal=form == "diagonal"), G=gradient)

    def _side(
        self, entry: Mapping[str, Any], tensors: Mapping[str, Tensor], side: Literal["A", "G"], *, diagonal: bool
    ) -> StabilisedSide:
        said = entry["sides"].get(side, {})
        # a matrix of the caller's is stored under its own name
        prefix = str(said.get("stored_as", PREFIX[side]))
        if said.get("kind", "none") == "none":
            raise BrokenFactors(
                f"layer `{entry['name']}`: its {side} was not stabilised; ask for `reconstruction.sides: both`, and "
                "see `why` in its row",
                layer=str(entry["name"]),
            )
        if said["kind"] == "matrix" and prefix in tensors:
            return _of_matrix(tensors[prefix], 1.0, diagonal=False)
        if said["kind"] == "matrix" and f"{prefix}_covariance" in tensors:
            return _of_matrix(tensors[f"{prefix}_covariance"], float(said.get("scale", 1.0)), diagonal=diagonal)
        return StabilisedSide.read(tensors, prefix)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        """Return one line: how many layers there are, and the first names."""
        return f"<StabilisedLayers: {cut(', '.join(map(repr, self)))}>"
