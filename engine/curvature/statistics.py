"""Statistics of one layer while it is collected: the running sums behind A and G.

``A = Σ a aᵀ / positions`` and ``G = Σ g gᵀ / terms`` (`expand`); under `reduce`, ``a`` is averaged
and ``g`` summed over the positions of each example first, and A divides by examples. With an
exponential moving average every sum *and* its count decay alike, so early batches are weighted
without bias.

References:
    Martens & Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature
    Eschenhagen et al. (2023), Kronecker-factored approximate curvature for modern neural network architectures
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.curvature.gram import add_gram_, add_grams_
from engine.curvature.joint import Met, block_gradients
from engine.curvature.layers.layer import BlockLayer, TreatedLayer, Use


@dataclass(eq=False)
class LayerStatistics:
    """Sums of one layer; a follower leaves A to the layer that shares its input."""

    layer: TreatedLayer
    sharing: str
    leader: "LayerStatistics | None" = None
    A: Tensor | None = None
    G: Tensor | None = None
    weight_A: float = 0.0
    """Positions (or examples, under `reduce`), decayed with the sums."""
    weight_G: float = 0.0
    """Loss terms, decayed with the sums."""
    rows_A: int = 0
    """Rows that entered A: no factor has a larger rank than rows."""
    rows_G: int = 0
    """Rows that entered G."""
    positions: int = 0
    """Positions that entered A."""
    terms: int = 0
    """Loss terms of the batches in which a gradient arrived or could have."""
    calls: int = 0
    """Most calls of the module in one forward pass."""
    gradients: int = 0
    """Backward hooks that fired."""
    flaw: str | None = None
    """Why the layer must be declared, once something has shown that it must."""

    @property
    def rank_bounds(self) -> tuple[int, int]:
        """Rows that entered A and G, where their ranks cannot exceed those; 0 bounds nothing."""
        return self.rows_A, self.rows_G

    @property
    def explanation(self) -> str:
        """Why the layer is represented as it is."""
        return self.layer.explanation

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the zeroed sums.

        Memory:
            in_dim² (or in_dim) and out_dim² numbers of each group, unless A is a leader's.
        """
        layer = self.layer
        groups = (layer.groups,) if layer.groups > 1 else ()
        if self.leader is None and layer.form != "block":
            shape = (layer.fan_in,) if layer.form == "diagonal" else (*groups, layer.in_dim, layer.in_dim)
            self.A = torch.zeros(shape, dtype=dtype, device=device)
        self.G = torch.zeros(*groups, layer.out_dim, layer.out_dim, dtype=dtype, device=device)

    def decay_(self, past: float) -> None:
        """Weigh everything so far by ``past``."""
        for total in (self.A, self.G):
            if total is not None:
                total.mul_(past)
        self.weight_A *= past
        self.weight_G *= past

    def add_input_(self, use: Use) -> None:
        """Add ``Σ a aᵀ`` of one call."""
        layer, entered, kept = self.layer, use.input, use.kept
        if isinstance(layer, BlockLayer):
            self.positions += entered.numel() // layer.fan_in if kept is None else int(kept.sum())
            return
        rows = layer.activation_rows(entered)
        if rows.is_floating_point() and self.G is not None:
            # a model may compute parts of itself more narrowly (autocast) than the sums are kept
            rows = rows.to(self.G.dtype)
        if layer.form == "diagonal":
            ids = rows if kept is None else rows[kept]
            self.positions += ids.numel()
            self.weight_A += ids.numel()
            if self.A is not None:
                self.A += torch.bincount(ids, minlength=layer.fan_in).to(self.A.dtype)
            return
        if self.sharing == "reduce":
            rows, positions = self._pooled(rows, use.examples, kept)
            self.positions += positions
        else:
            rows = rows if kept is None else rows[kept]
            self.positions += rows.shape[0]
        self.weight_A += rows.shape[0]
        self.rows_A += rows.shape[0]
        if self.A is not None:
            self._add_outer_(self.A, rows)

    def _pooled(self, rows: Tensor, examples: int, kept: Tensor | None) -> tuple[Tensor, int]:
        """Mean of ``a`` over each example's positions (N, d), and how many positions there were.

        An example without any position is left out.
        """
        grouped = rows.view(examples, -1, rows.shape[-1])
        if kept is None:
            return grouped.mean(1), rows.shape[0]
        weights = kept.view(examples, -1, 1).to(rows.dtype)
        counts = weights.sum(1)
        means = (grouped * weights).sum(1) / counts.clamp_min(1)
        return means[counts[:, 0] > 0], int(kept.sum())

    def _add_outer_(self, total: Tensor, rows: Tensor) -> None:
        """Add ``Σ [a 1]ᵀ[a 1]`` without writing the column of ones beside every row."""
        layer = self.layer
        width = layer.fan_in if layer.weight else 0
        if layer.weight:
            _add_(total[..., :width, :width], rows)
        if layer.bias:
            if layer.weight:
                total[..., :width, width] += rows.sum(0).view(*total.shape[:-2], width)
            total[..., width, width] += rows.shape[0]

    @property
    def joint(self) -> bool:
        """Whether inputs and gradients are wanted together."""
        return isinstance(self.layer, BlockLayer)

    def add_gradient_(self, use: Use, gradient: Tensor) -> None:
        """Add ``Σ g gᵀ`` of one call and one direction; a block layer's comes with ``add_met_``."""
        layer, kept = self.layer, use.kept
        self.gradients += 1
        if self.G is None or isinstance(layer, BlockLayer):
            return
        rows = layer.gradient_rows(gradient)
        if self.sharing == "reduce" and layer.form == "kronecker":
            rows = rows if kept is None else rows * kept[:, None]
            rows = rows.view(use.examples, -1, rows.shape[-1]).sum(1)
        elif kept is not None:
            # dropped before the product: half of a padded batch is often padding
            rows = rows[kept]
        self._add_rows_(self.G, rows)

    def add_met_(self, met: Met) -> None:
        """Add what needs inputs and gradients of all calls of one direction together."""
        if isinstance(self.layer, BlockLayer) and self.G is not None:
            self._add_rows_(self.G, block_gradients(self.layer, met))

    def _add_rows_(self, total: Tensor, rows: Tensor) -> None:
        self.rows_G += rows.shape[0]
        _add_(total, rows.to(total.dtype))


def _add_(total: Tensor, rows: Tensor) -> None:
    if total.ndim == 2:
        add_gram_(total, rows)
    else:
        add_grams_(total, rows)
