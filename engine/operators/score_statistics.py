"""Score statistics: inner products of vectors with the gradient of each example's loss, layer by layer.

``s_qn = ⟨V_q, ∇W ℓ_n⟩`` of vectors V_q of a layer's matrix (out_dim, in_dim). A gradient is made of the rows that the
hooks see, a few examples at a time, and multiplied by all vectors at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from engine.accumulation.example_gradients import (
    NUMBERS_AT_ONCE,
    Met,
    Rows,
    block_gradients,
    example_rows,
    summed_by_id,
    tied_rows,
)
from engine.accumulation.layer_statistics import LayerStatistics
from engine.errors import ModelRefused
from engine.layers.layer import BlockLayer, TreatedLayer, Use
from engine.layers.tied import TiedHeadLayer


@dataclass(eq=False)
class ScoreStatistics(LayerStatistics):
    """The scores of one layer for the examples that go through the model now."""

    vectors: Tensor | None = None
    """V, shape (Q, groups, out_dim, in_dim), of an A that is diagonal (Q, 1, in_dim, out_dim): a row for each id."""
    scores: Tensor | None = None
    """(Q, N), float64."""

    def begin_(self, examples: int) -> None:
        """Prepare for ``examples`` that go through the model together."""
        if self.vectors is None:
            raise ValueError(f"layer `{self.layer.name}` has no vectors")
        self.scores = self.vectors.new_zeros(self.vectors.shape[0], examples, dtype=torch.float64)

    @override
    @property
    def joint(self) -> bool:
        return True

    @override
    def add_input_(self, use: Use) -> None:
        """Do nothing: A is known already."""

    @override
    def add_gradient_(self, use: Use, gradient: Tensor) -> None:
        """Do nothing: G is known already."""

    @override
    def add_example_gradients_(self, gradients: Tensor, start: int, examples: int) -> None:
        self._add_(slice(start, start + gradients.shape[0]), gradients)

    @override
    def add_met_(self, met: Met) -> None:
        layer, vectors = self.layer, self.vectors
        if vectors is None:
            raise ValueError(f"layer `{layer.name}` has no vectors")
        if isinstance(layer, BlockLayer):
            self._add_(slice(None), block_gradients(layer, met))
        elif isinstance(layer, TiedHeadLayer):
            for examples, gradients in self._tied(layer, met):
                self._add_(examples, gradients)
        elif layer.form == "diagonal":
            self._add_table_(met)
        else:
            for rows in example_rows(layer, met, vectors.dtype, lambda _: layer.out_dim * layer.in_dim):
                self._add_(rows.examples, self._gradients(rows))
                # or they would be held while the next ones are written
                del rows

    def _add_(self, examples: slice | Tensor, gradients: Tensor) -> None:
        """Add the products with gradients of n examples, one behind the other, each of all the layer's numbers."""
        if self.vectors is None or self.scores is None:
            raise ValueError(f"layer `{self.layer.name}` has no vectors")
        vectors = self.vectors.flatten(1)
        # of the two ways round the faster one, by up to three times, where the examples are few
        products = gradients.reshape(-1, vectors.shape[1]).to(vectors.dtype) @ vectors.T
        self.scores[:, examples] += products.T

    def _gradients(self, rows: Rows) -> Tensor:
        """(n·groups, out_dim, in_dim) of the examples of ``rows``, the bias as the last column."""
        layer, a, g = self.layer, rows.a, rows.g
        product = g[:, 0, :, None] * a[:, 0, None, :] if g.shape[1] == 1 else torch.bmm(g.mT, a)
        return torch.cat((product, g.sum(1)[:, :, None]), 2) if layer.bias else product

    def _tied(self, layer: TiedHeadLayer, met: Met) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """A lookup of id i with the gradient v is, in the head's orientation, ``e_i [v 0]ᵀ``."""
        if self.vectors is None:
            raise ValueError(f"layer `{layer.name}` has no vectors")
        for table, head in tied_rows(layer, met, self.vectors.dtype, layer.out_dim * layer.in_dim):
            known = head or table
            if known is None:
                continue
            if head is not None:
                made = self._gradients(head)
            else:
                made = known.g.new_zeros(known.g.shape[0], layer.out_dim, layer.in_dim)
            if table is not None:
                ids = table.a.squeeze(-1)
                which = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(ids)
                made[:, :, : layer.fan_in].index_put_((which, ids), table.g, accumulate=True)
            yield known.examples, made

    def _add_table_(self, met: Met) -> None:
        vectors, scores = self.vectors, self.scores
        if vectors is None or scores is None:
            raise ValueError(f"layer `{self.layer.name}` has no vectors")
        found = summed_by_id(self.layer, met, vectors.dtype)
        step = max(1, NUMBERS_AT_ONCE // (vectors.shape[0] * self.layer.out_dim))
        for begin in range(0, found.ids.numel(), step):
            part = slice(begin, begin + step)
            products = torch.einsum("qpd,pd->qp", vectors[:, 0, found.ids[part]], found.sums[part])
            scores.index_add_(1, found.examples[part], products.to(scores.dtype))


def statistics_of(treated: Sequence[TreatedLayer], vectors: dict[str, Tensor]) -> list[ScoreStatistics]:
    """Return the covered layers with their vectors (Q, out_dim, in_dim), which are taken over."""
    found = []
    for layer in treated:
        if layer.parts[0] not in vectors:
            continue
        own = torch.stack([vectors.pop(part) for part in layer.parts], 1)
        if layer.form == "diagonal":
            own = own.mT.contiguous()
        found.append(ScoreStatistics(layer=layer, sharing="expand", vectors=own))
    if vectors:
        raise ModelRefused(
            f"layer `{next(iter(vectors))}` was collected, and is not found now; give the same model",
            pointer="/model",
        )
    return found
