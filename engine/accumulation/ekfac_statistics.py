"""EK-FAC statistics: the second moment of each layer's gradients along the eigenvectors of its factors.

``λ_ij = Σ_n (Q_Gᵀ ∇W ℓ_n Q_A)²_ij / terms``, over the same directions as G. In the basis of K-FAC's
eigenvectors it is the diagonal that is nearest to the curvature itself, where K-FAC takes the
products of the eigenvalues. Rotations keep lengths, so ``Σ λ_ij`` is the exact trace of the block.
A gradient is the product of rotated rows, made for a few examples at a time.

References:
    George et al. (2018), Fast approximate natural gradient descent in a Kronecker-factored eigenbasis
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from engine.accumulation.example_gradients import NUMBERS_AT_ONCE, Met, example_rows, summed_by_id, tied_rows
from engine.accumulation.layer_statistics import LayerStatistics
from engine.layers.layer import Use
from engine.layers.tied import TiedHeadLayer


@dataclass(eq=False)
class CorrectionStatistics(LayerStatistics):
    """The corrected eigenvalues λ of one layer; its bases do not change."""

    DECAYED: ClassVar[Sequence[str]] = ("eigenvalues", "weight_G")

    basis_A: Tensor | None = None
    """(groups, in_dim, in_dim); None is the identity, of a diagonal A."""
    basis_G: Tensor | None = None
    """(groups, out_dim, out_dim)."""
    eigenvalues: Tensor | None = None
    """(groups, out_dim, in_dim): Σ of squares, decayed as G is."""

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        layer = self.layer
        self.eigenvalues = torch.zeros(layer.groups, layer.out_dim, layer.in_dim, dtype=dtype, device=device)

    @override
    @property
    def joint(self) -> bool:
        # whether inputs and gradients are wanted together: always
        return True

    def add_input_(self, use: Use) -> None:
        """Do nothing: A is known already."""

    def add_gradient_(self, use: Use, gradient: Tensor) -> None:
        """Do nothing: G is known already."""

    @override
    def add_met_(self, met: Met) -> None:
        # add the squares of one direction's gradients, rotated into the eigenbases
        total, basis_G = self.eigenvalues, self.basis_G
        if total is None or basis_G is None:
            raise ValueError(f"layer `{self.layer.name}` has no basis")
        layer = self.layer
        if isinstance(layer, TiedHeadLayer):
            self._add_tied_(layer, met, total[0], basis_G[0])
        elif self.basis_A is None:
            vectors = summed_by_id(layer, met, total.dtype)
            total[0].index_add_(1, vectors.ids, (vectors.sums @ basis_G[0]).square_().T)
        else:
            gradient = layer.out_dim * layer.in_dim
            for rows in example_rows(layer, met, total.dtype, lambda _: gradient):
                _add_squares_(total, self._rotated_inputs(rows.a), _rotated(rows.g, basis_G))
                # or they would be held while the next ones are written
                del rows

    def _rotated_inputs(self, a: Tensor) -> Tensor:
        """``[a 1] Q_A`` of rows (n·groups, T, d_in), as (n·groups, T, in_dim), without writing the ones."""
        basis, width = self.basis_A, a.shape[-1]
        if basis is None:
            raise ValueError("a diagonal A has no basis")
        rotated = _rotated(a, basis[:, :width])
        if self.layer.bias:
            ones = basis[:, width]
            rotated.view(-1, *ones.shape[:1], *rotated.shape[1:]).add_(ones[:, None])
        return rotated

    def _add_tied_(self, layer: TiedHeadLayer, met: Met, total: Tensor, basis_G: Tensor) -> None:
        """A lookup of id i with the gradient v is, in the head's orientation, ``e_i [v 0]ᵀ``."""
        basis_A = self.basis_A
        if basis_A is None:
            raise ValueError(f"layer `{layer.name}` has no basis")
        for table, head in tied_rows(layer, met, total.dtype, layer.out_dim * layer.in_dim):
            sides = []
            if head is not None:
                sides.append((self._rotated_inputs(head.a), head.g @ basis_G))
            if table is not None:
                sides.append((table.g @ basis_A[0, : layer.fan_in], basis_G[table.a.squeeze(-1)]))
            a, g = (torch.cat(side, 1) for side in zip(*sides, strict=True))
            _add_squares_(total[None], a, g)


def _rotated(rows: Tensor, basis: Tensor) -> Tensor:
    """Rows (n·groups, T, d) times each group's (d, D), as (n·groups, T, D)."""
    groups = basis.shape[0]
    if groups == 1:
        return rows @ basis[0]
    each, positions, width = rows.shape[0] // groups, *rows.shape[1:]
    apart = rows.view(each, groups, positions, width).transpose(0, 1).reshape(groups, each * positions, width)
    rotated = torch.bmm(apart, basis).view(groups, each, positions, basis.shape[2])
    return rotated.transpose(0, 1).reshape(each * groups, positions, basis.shape[2])


def _add_squares_(total: Tensor, a: Tensor, g: Tensor) -> None:
    """Add ``Σ_n (Σ_t g_t a_tᵀ)²`` of rotated rows (n·groups, T, ·) to ``total`` (groups, out, in)."""
    groups = total.shape[0]
    if g.shape[1] == 1:
        # one position: the square of the product is the product of the squares
        g, a = (side.view(-1, groups, side.shape[-1]).square().transpose(0, 1) for side in (g, a))
        total.baddbmm_(g.transpose(1, 2), a)
        return
    height = max(1, NUMBERS_AT_ONCE // (a.shape[0] * a.shape[2]))
    for start in range(0, g.shape[2], height):
        gradients = torch.bmm(g[:, :, start : start + height].transpose(1, 2), a).square_()
        total[:, start : start + height] += gradients.view(-1, groups, *gradients.shape[1:]).sum(0)
