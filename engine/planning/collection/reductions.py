"""Reduction memory: what ranks hold while they add up their sums at the end of a pass, for a few layers at a time.

With W ranks, f = (W − 1)/W, panels of p numbers of b bytes, and T rows of o numbers, of all ranks:

    triangles    p·(1 + b·(3 + 3f) + 8/W): a mask, the numbers twice, what leaves and arrives twice, their sum
    gather       o·T·b/W: a rank's own rows, until those of all stand beside them
    gram         o·T·b/W, 8T² of the whole Gram matrix, and four panels of columns

Activations and gradients are gone by then. What stays is counted where it stays: of rows that the ranks of one node
hold together, each counts its part.
"""

from collections.abc import Mapping
from dataclasses import replace

from engine.collection.probe import Probe
from engine.collection.ranks.rows import PANEL_NUMBERS
from engine.distributed.group import Ranks
from engine.distributed.traffic import GRAM_BYTES, choose_reduction
from engine.distributed.transfers import NUMBERS_AT_ONCE, UNDER_WAY
from engine.factors.representation import Representation
from engine.factors.representation_bytes import low_rank_bytes
from engine.layers.layer import TreatedLayer
from engine.memory.plan import Budgeted, Term
from engine.workspace import Workspace

_WIDENED_BYTES = 8 * 2**20
"""Columns that enter a Gram matrix, in float64."""


def hold_together(ranks: Ranks, layer: TreatedLayer, kept: Representation, wanted: str) -> Representation:
    """Return the representation of a layer, with the ranks among which its rows are divided."""
    if not ranks.one_node or kept.kind != "woodbury" or kept.rows > layer.out_dim:
        return kept
    reduction = choose_reduction(wanted, rows=kept.rows, size=layer.out_dim, ranks=ranks.size, item=kept.dtype.itemsize)
    return replace(kept, shards=ranks.size) if reduction == "gram" else kept


def reduction_terms(workspace: Workspace, probe: Probe, place: Budgeted, freed: int) -> list[Term]:
    """Return the term of what reductions hold beyond the sums and rows themselves."""
    ranks = workspace.machine.ranks
    if ranks.size == 1:
        return []
    each = sorted((_layer_bytes(ranks.size, layer, probe) for layer in probe.layers), reverse=True)
    formula = "2 layers' panels, own rows and 8 · T², beyond a slice"
    return [Term("reduction", formula, max(0, sum(each[:UNDER_WAY]) - freed), place, "collection", source="estimated")]


def triangle_bytes(numbers: int, item: int, ranks: int) -> int:
    """Return the bytes of one panel of a triangle while it is added up."""
    share = (ranks - 1) / ranks
    return int(numbers * (1 + item * (3 + 3 * share) + 8 / ranks))


def _layer_bytes(ranks: int, layer: TreatedLayer, probe: Probe) -> int:
    item = probe.dtype.itemsize
    dense = [side for side, is_dense in probe.sides(layer, follows=layer.name in probe.shared) if is_dense]
    panels = [triangle_bytes(min(NUMBERS_AT_ONCE, side * (side + 1) // 2), item, ranks) for side in dense]
    kept = probe.kept(layer)
    if kept.kind == "woodbury":
        panels.append(_row_bytes(ranks, layer, kept))
    return max(panels, default=0)


def _row_bytes(ranks: int, layer: TreatedLayer, kept: Representation) -> int:
    rows, size, item = kept.held_rows(layer.out_dim), layer.out_dim, kept.dtype.itemsize
    own = layer.groups * low_rank_bytes(-(-rows // ranks), size, item)
    if kept.shards == 1:
        return own
    gram = layer.groups * GRAM_BYTES * rows**2
    columns = 4 * item * min(PANEL_NUMBERS, layer.groups * rows * -(-size // ranks)) + _WIDENED_BYTES
    summed = triangle_bytes(min(NUMBERS_AT_ONCE, rows * (rows + 1) // 2), GRAM_BYTES, ranks)
    return own + gram + max(columns, summed)


def with_shards(ranks: Ranks, probe: Probe, wanted: str) -> Mapping[str, Representation]:
    """Return the representations of all layers, with the ranks among which rows are divided."""
    layers = {layer.name: layer for layer in probe.layers}
    return {
        name: hold_together(ranks, layers[name], kept, wanted) if name in layers else kept
        for name, kept in probe.representations.items()
    }
