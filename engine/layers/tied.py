"""Tied parameters: several modules that hold one weight, one bias, or both.

Modules that use a shared parameter alike are as one module that is called several times: their
contributions are summed, and its curvature is theirs. A bias of a module's own, beside a weight
that is shared, is a layer of its own: A is then the 1×1 matrix of ones' mean, 1.

An embedding and the head of a language model hold one weight (vocabulary, d) in two orientations,
see ``TiedHeadLayer``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from typing_extensions import override

from engine.layers.embedding import EmbeddingLayer
from engine.layers.layer import TreatedLayer, Use
from engine.layers.linear import LinearLayer

NEAREST = "the nearest Kronecker product of the sum of both uses"
"""The part of a tied layer's explanation that is about its factors."""


@dataclass(eq=False)
class TiedHeadLayer(TreatedLayer):
    """A table of vectors that is also the weight of a linear head, stored (vocabulary, d).

    With ``a`` of width d and ``g`` of width V, the head's part of the curvature is ``G_h ⊗ A_h``.
    The table's is ``D ⊗ H``: D, diagonal, the relative counts of the ids, H the second moment of
    the gradients of their vectors. Both stand in the head's orientation; a bias of the head is a
    column of A that the table lacks.
    """

    table: EmbeddingLayer
    head: LinearLayer

    @override
    @property
    def fan_in(self) -> int:
        return self.head.fan_in

    @override
    @property
    def fan_out(self) -> int:
        return self.head.fan_out

    @override
    @property
    def roles(self) -> tuple[TreatedLayer, ...]:
        return self.table, self.head

    @override
    @property
    def parameters(self) -> tuple[str, ...]:
        weight = self.table if self.table.path == self.path else self.head
        return (*weight.parameters[:1], *(self.head.parameters[1:] if self.bias else ()))

    @override
    @property
    def explanation(self) -> str:
        # the modules that hold the weight, and what its factors are
        return (
            f"{_listed((*self.table.holders, *self.head.holders))} hold one weight, as rows and as columns: {NEAREST}"
        )

    @override
    def activation_rows(self, entered: Tensor) -> Tensor:
        return self.head.activation_rows(entered)

    @override
    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return self.head.gradient_rows(gradient)

    @override
    def pair(self, use: Use, gradient: Tensor) -> tuple[Tensor, Tensor]:
        # return both sides of one call of either, in that one's own orientation
        return (use.role or self.head).pair(replace(use, role=None), gradient)


def merge_tied_layers(layers: Sequence[TreatedLayer]) -> tuple[TreatedLayer, ...] | None:
    """Make layers of modules that share parameters, each number in one of them."""
    weights = _holders([layer for layer in layers if layer.weight], "weight")
    biases = _holders([layer for layer in layers if layer.bias], "bias")
    if set(weights) & set(biases):
        return None
    rows: list[TreatedLayer | None] = []
    for holders in weights.values():
        tables = [layer for layer in holders if isinstance(layer, EmbeddingLayer)]
        heads = [layer for layer in holders if type(layer) is LinearLayer]
        carriers: Sequence[TreatedLayer] = heads or holders
        joined = next((bias for bias, own in biases.items() if own == carriers), None)
        if joined is not None:
            del biases[joined]
        if tables and heads and len(tables) + len(heads) == len(holders):
            rows.append(_head(holders[0], tables, heads, bias=joined is not None))
        else:
            rows.append(_merged(holders, holders[0].name, weight=True, bias=joined is not None))
    for owners in biases.values():
        first = owners[0].name
        rows.append(_merged(owners, f"{first}.bias" if first else "bias", weight=False, bias=True))
    return None if None in rows else tuple(row for row in rows if row is not None)


def _holders(layers: Sequence[TreatedLayer], key: str) -> dict[int, list[TreatedLayer]]:
    """Return the layers that hold each parameter, by its identity."""
    holders: dict[int, list[TreatedLayer]] = {}
    for layer in layers:
        holders.setdefault(id(getattr(layer.module, key)), []).append(layer)
    return holders


def _head(
    first: TreatedLayer, tables: Sequence[EmbeddingLayer], heads: Sequence[LinearLayer], *, bias: bool
) -> TreatedLayer | None:
    # both answer to the name of the row
    table = _merged(tables, first.name, weight=True, bias=False)
    head = _merged(heads, first.name, weight=True, bias=bias)
    if not isinstance(table, EmbeddingLayer) or not isinstance(head, LinearLayer):
        return None
    return TiedHeadLayer(
        name=first.name, prefix=first.path, module=first.module, weight=True, bias=bias, table=table, head=head
    )


def _merged(layers: Sequence[TreatedLayer], name: str, *, weight: bool, bias: bool) -> TreatedLayer | None:
    first, *others = layers
    if not all(_alike(first, other) for other in others):
        return None
    also = {other.path: other.module for other in others}
    return replace(first, name=name, prefix=first.path, weight=weight, bias=bias, also=also)


def _alike(left: TreatedLayer, right: TreatedLayer) -> bool:
    """Tell whether two modules do the same with a parameter."""
    if type(left) is not type(right):
        return False
    if isinstance(left, LinearLayer):
        return True
    if isinstance(left, EmbeddingLayer) and isinstance(right, EmbeddingLayer):
        return left.module.padding_idx == right.module.padding_idx and left.scale == right.scale
    # strides, paddings, an epsilon; running statistics are a module's own
    same = left.module.extra_repr() == right.module.extra_repr()
    return same and not any(True for _ in left.module.buffers())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
