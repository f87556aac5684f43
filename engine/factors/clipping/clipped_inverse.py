"""Clipped inverses: both sides of a layer as a reconstruction has stored them, applied and inverted.

``Q max(Λ, f) Qᵀ`` rounded to float32 has lost up to a tenth of what its inverse needs at κ = 1e6. Its eigenbasis has
not: computed in float64 and stored in float32 it applies the inverse to 1e-6.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from catalog.brief import cut
from catalog.field_errors import near_names
from engine.errors import BrokenFactors
from engine.factors.clipping.clipped_operator import ClippedOperator
from engine.factors.kronecker_factors import unpacked
from engine.factors.representation import read_structured
from engine.linalg.eigenbasis import ClippedSide, Eigenbasis

PREFIX = {"A": "activation", "G": "gradient"}
"""Prefixes of the names that each side's tensors are stored by."""


def _of_matrix(stored: Tensor, scale: float, *, diagonal: bool) -> Eigenbasis:
    """A rebuilt side, of which there is no basis: through that of the matrix as it came out.

    Memory:
        Three times n² in float64.
    """
    if diagonal:
        return Eigenbasis(stored.to(torch.float64) * scale, None)
    size = (math.isqrt(8 * stored.numel() + 1) - 1) // 2
    matrix = stored if stored.ndim == 2 else unpacked(stored, size)
    values, vectors = torch.linalg.eigh(matrix.to(torch.float64))
    return Eigenbasis(values * scale, vectors)


@dataclass(frozen=True, kw_only=True, repr=False)
class StabilisedInverse:
    """Both sides of a layer: ``(A_s + λ_A I) ⊗ (G_s + λ_G I)`` and its inverse."""

    A: Eigenbasis
    G: ClippedSide

    def __repr__(self) -> str:
        """Return one line: the rows of both sides."""
        return f"<StabilisedInverse: A of {self.A.size} rows, G of {self.G.size}>"

    def apply(self, gradient: Tensor) -> Tensor:
        """Return ``G_s V A_s``, in shape (out_dim, in_dim) and dtype of the gradient V."""
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
    if said.get("kind") != "operator":
        return None
    side = read_structured(str(said["representation"]), tensors, said["metadata"])
    return ClippedOperator(side=side, floor=float(said["floor"]), largest=float(said["largest"]))


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
            return StabilisedInverse(A=Eigenbasis(one, None), G=gradient)
        shared = tensors if holder == own else self._load(holder)
        leader = next(each for each in self._layers.values() if int(each["ordinal"]) == holder)
        return StabilisedInverse(A=self._side(leader, shared, "A", diagonal=form == "diagonal"), G=gradient)

    def _side(
        self, entry: Mapping[str, Any], tensors: Mapping[str, Tensor], side: Literal["A", "G"], *, diagonal: bool
    ) -> Eigenbasis:
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
        return Eigenbasis.read(tensors, prefix)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        """Return one line: how many layers there are, and the first names."""
        return f"<StabilisedLayers: {cut(', '.join(map(repr, self)))}>"
