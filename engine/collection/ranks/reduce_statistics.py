"""Reduced statistics: the sums of a pass on every rank become those of all ranks' examples.

A and G are sums over examples, and so are their counts, the exact traces, the corrected eigenvalues and the table's
part of a tied head: they are added. Gradient rows are put one below the other (``rows``). Variances over batches
combine by

    S = Σ_r (S_r + W_r ‖M_r − M‖²)        M = Σ_r W_r M_r / Σ_r W_r

from each rank's mean M_r and count W_r. Counts travel as whole numbers, and floats are added in the order of the ranks.

Owners: the rank to which the dense sums of a layer go, where no other rank needs its factors.

Each of the other ranks sends the owner one triangle of n(n + 1)/2 numbers; where every rank needs the sum, each sends
about twice as many (``engine.distributed.traffic``), and each holds it.

Every rank needs it in a notebook, where `measure` returns the factors; for EK-FAC, whose passes rotate into their
eigenbases; and for an analysis that reads the factors of all layers. A variance over batches compares them to each
rank's own.

References:
    Chan, Golub & LeVeque (1983), Algorithms for computing the sample variance
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from catalog.requests.collection import Collection
from engine.accumulation.batch_variance import BatchVariance, squared_norms
from engine.accumulation.ekfac_statistics import CorrectionStatistics
from engine.accumulation.gradient_rows import GradientRows
from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.tied_statistics import TiedHeadStatistics
from engine.collection.ranks.rows import RowFacts, is_merged, reduce_rows, shared_rows
from engine.collection.ranks.turns import Turns
from engine.distributed.group import Ranks
from engine.distributed.longest_first import divide_longest_first
from engine.distributed.traffic import choose_reduction
from engine.distributed.transfers import Label, Reduction, run_together, sum_tensor_, sum_triangle_
from engine.factors.kronecker_factors import Factors
from engine.linalg.eigendecomposition import is_diagonal
from engine.workspace import Workspace


class OwnedLayers(dict[str, int]):
    """Owner of each layer of a job whose dense sums went to owners, by name; empty where every rank has all."""


def owners_of(workspace: Workspace, statistics: Sequence[LayerStatistics], *, alone: bool) -> Mapping[str, int]:
    """Choose the owners of the layers of one pass, by longest processing time first over the n³ of their sides."""
    known, ranks = workspace.results.of(OwnedLayers), workspace.machine.ranks
    known.clear()
    rows = [0 if found.gradient_rows is None else found.gradient_rows.count for found in statistics]
    gathered = ranks.gather((workspace.ports.keeps_files, rows), "ranks that keep files")
    if not alone or all(keeps for keeps, _ in gathered) or not _left_to_owners(workspace):
        return {}
    counts = [sum(each) for each in zip(*(rows for _, rows in gathered), strict=True)]
    units: dict[str, float] = {}
    for found, count in zip(statistics, counts, strict=True):
        unit = (found.leader or found).layer.name
        units[unit] = units.get(unit, 0.0) + _cost(found, count)
    workers = dict(zip(units, divide_longest_first(list(units.values()), ranks.size), strict=True))
    known.update({found.layer.name: workers[(found.leader or found).layer.name] for found in statistics})
    return known


def owners_by_ordinal(workspace: Workspace, layers: Sequence[str]) -> dict[int, int] | None:
    """Return the rank of each covered layer's owner by its ordinal; None where every rank has all factors."""
    owners = workspace.results.of(OwnedLayers)
    return {place: owners[name] for place, name in enumerate(layers)} if owners else None


def is_elsewhere(workspace: Workspace, layer: str) -> bool:
    """Return whether the factors of a layer are on another rank alone."""
    owned, rank = workspace.results.of(OwnedLayers), workspace.machine.ranks.rank
    return owned.get(layer, rank) != rank


def refuse_elsewhere(layer: str) -> Factors:
    """Stand for the factors of a layer that another rank has."""
    raise ValueError(f"layer `{layer}`: its factors are on the rank that owns it, and nowhere else")


def is_summed_at_owner(found: LayerStatistics) -> bool:
    """Return whether the dense sums of a layer may go to its owner alone."""
    varied = (found.variance_A, found.variance_G)
    return not isinstance(found, TiedHeadStatistics) and all(each.before is None for each in varied)


def _left_to_owners(workspace: Workspace) -> bool:
    options = workspace.options
    return options.layerwise and not options.asks("reads_all_factors") and not options.collection.ekfac


def _cost(found: LayerStatistics, rows: int) -> float:
    """n³ over what is decomposed of a layer; of a G that is kept as T rows, T³."""
    layer = found.layer
    dense_a = layer.in_dim if layer.form == "kronecker" and found.leader is None else 0
    dense_g = 0 if layer.form == "diagonal_block" else layer.out_dim
    if found.gradient_rows is not None:
        dense_g = min(rows, layer.out_dim)
    return layer.groups * (float(dense_a) ** 3 + float(dense_g) ** 3)


@dataclass(frozen=True)
class LayerCounts:
    """A layer's sums on one rank without their large tensors."""

    plain: Mapping[str, Any]
    squares: Tensor | None
    rows: RowFacts | None

    @classmethod
    def of(cls, found: LayerStatistics) -> "LayerCounts":
        """Describe the sums of a layer on this rank."""
        return cls(
            plain=found.plain(),
            squares=None if found.squares is None else found.squares.cpu(),
            rows=None if found.gradient_rows is None else RowFacts.of(found.gradient_rows),
        )


def reduce_statistics(
    ranks: Ranks, statistics: Sequence[LayerStatistics], collection: Collection, owners: Mapping[str, int]
) -> None:
    """Add the sums of every rank, in place: each rank holds those of all examples afterwards.

    Of two layers at a time it holds a few panels, and the rows of all ranks.
    """
    counted = ranks.gather([LayerCounts.of(found) for found in statistics], "counts of the pass")
    means = [{side: _set_mean_aside(found, side) for side in _varied(found)} for found in statistics]
    by_layer = list(zip(*counted, strict=True))
    shared = _shared_rows(ranks, statistics, by_layer, collection)
    run_together(
        _reduced(ranks, found, counts, collection, shared.get(found.layer.name), owners.get(found.layer.name))
        for found, counts in zip(statistics, by_layer, strict=True)
    )
    for found, counts in zip(statistics, by_layer, strict=True):
        _add_counts(ranks, found, counts)
    if any(means):
        _combine_variances(ranks, statistics, means)


def _shared_rows(
    ranks: Ranks,
    statistics: Sequence[LayerStatistics],
    counts: Sequence[Sequence[LayerCounts]],
    collection: Collection,
) -> dict[str, Tensor]:
    """Memory of the node for the rows of each layer that is reduced to shards; none where ranks have none in common."""
    wanted = {}
    for found, every in zip(statistics, counts, strict=True):
        rows, facts = found.gradient_rows, _facts(every)
        if rows is not None and any(each.count for each in facts) and _keeps_shards(ranks, rows, facts, collection):
            wanted[found.layer.name] = (rows, facts)
    tensors = shared_rows(ranks, list(wanted.values()))
    return {} if tensors is None else dict(zip(wanted, tensors, strict=True))


def _facts(counts: Sequence[LayerCounts]) -> list[RowFacts]:
    return [each.rows for each in counts if each.rows is not None]


def _keeps_shards(ranks: Ranks, rows: GradientRows, facts: Sequence[RowFacts], collection: Collection) -> bool:
    """Whether the rows of all ranks are reduced to shards and a Gram matrix; the same on every rank."""
    wanted = choose_reduction(
        collection.reduction,
        rows=sum(each.count for each in facts),
        size=rows.size,
        ranks=ranks.size,
        item=rows.rows.element_size(),
    )
    # probabilities are weighed by a damping before their Gram matrix is made
    return wanted == "gram" and type(rows) is GradientRows and not is_merged(facts, rows.size)


def _reduced(
    ranks: Ranks,
    found: LayerStatistics,
    counts: Sequence[LayerCounts],
    collection: Collection,
    shared: Tensor | None,
    owner: int | None,
) -> Reduction[None]:
    """Add the large tensors of one layer, for all ranks or for one."""
    layer = found.layer.name
    only = owner if is_summed_at_owner(found) else None
    for staging in (found.staging, found.row_staging):
        if staging is not None:
            staging.settle()
    if found.A is not None:
        yield from _add(ranks, found.A, Label(layer, "A"), only)
    if found.G is not None and collection.fisher != "forward_only":
        yield from _add(ranks, found.G, Label(layer, "G"), only)
    if isinstance(found, TiedHeadStatistics) and found.counts is not None and found.vectors is not None:
        yield from sum_tensor_(ranks, found.counts, Label(layer, "G"))
        yield from sum_triangle_(ranks, found.vectors, Label(layer, "A"))
    ranks.traffic.reductions[layer] = "dense"
    rows = found.gradient_rows
    if rows is not None:
        facts = _facts(counts)
        gram = _keeps_shards(ranks, rows, facts, collection)
        made = yield from reduce_rows(ranks, rows, facts, layer, gram=gram, shared=shared)
        ranks.traffic.reductions[layer] = made


def _add(ranks: Ranks, total: Tensor, label: Label, owner: int | None) -> Reduction[None]:
    if is_diagonal(total):
        yield from sum_tensor_(ranks, total, label)
    else:
        yield from sum_triangle_(ranks, total, label, owner)
        size = total.shape[-1]
        held = total.element_size() * (total.numel() // size) * (size + 1) // 2
        ranks.traffic.held[label.layer, label.operation] = held if owner in (None, ranks.rank) else 0


def _add_counts(ranks: Ranks, found: LayerStatistics, counts: Sequence[LayerCounts]) -> None:
    ranks.traffic.positions[found.layer.name] = found.positions
    found.join_([each.plain for each in counts])
    if found.squares is not None:
        total = torch.zeros_like(found.squares, device="cpu")
        for each in counts:
            if each.squares is not None:
                total += each.squares
        found.squares.copy_(total)


def _varied(found: LayerStatistics) -> dict[str, BatchVariance]:
    sides = {"A": found.variance_A, "G": found.variance_G}
    return {side: varied for side, varied in sides.items() if varied.before is not None}


def _set_mean_aside(found: LayerStatistics, side: str) -> float:
    """Keep this rank's own sums where those of earlier batches stood; return their count."""
    sums, varied = getattr(found, side), _varied(found)[side]
    if varied.before is not None:
        varied.before.copy_(sums)
    return float(getattr(found, f"weight_{side}"))


def _combine_variances(
    ranks: Ranks,
    statistics: Sequence[LayerStatistics],
    weights: Sequence[Mapping[str, float]],
) -> None:
    own: list[dict[str, Tensor]] = []
    for found, weight in zip(statistics, weights, strict=True):
        scattered = {}
        for side, varied in _varied(found).items():
            total, whole = getattr(found, side), float(getattr(found, f"weight_{side}"))
            if varied.squares is None or varied.before is None:
                continue
            apart = varied.squares
            if weight[side] > 0:
                away = squared_norms(varied.before, 1 / weight[side], total, 1 / whole)
                apart = apart + weight[side] * away
            scattered[side] = apart.cpu()
        own.append(scattered)
    for found, every in zip(statistics, zip(*ranks.gather(own, "variances"), strict=True), strict=True):
        for side, varied in _varied(found).items():
            if varied.squares is not None:
                varied.squares.copy_(
                    sum((each[side] for each in every), torch.zeros_like(varied.squares, device="cpu"))
                )


def add_corrections(
    ranks: Ranks, statistics: Sequence[CorrectionStatistics], collection: Collection, batches: int
) -> None:
    """Add the corrected eigenvalues of every rank, in place; a flaw that one of them has found is all of theirs."""
    turns = Turns.of(ranks, collection.update_freq)
    own = turns.last_update(batches)
    last = max((each for each in ranks.gather(own, "ends of the correction") if each is not None), default=0)
    for found in statistics:
        if collection.ema_decay is not None and own is not None:
            found.decay_(collection.ema_decay ** (last - own))
    counts = ranks.gather([(found.weight_G, found.flaw) for found in statistics], "counts of the correction")
    run_together(
        sum_tensor_(ranks, found.eigenvalues, Label(found.layer.name, "correction"))
        for found in statistics
        if found.eigenvalues is not None
    )
    for found, each in zip(statistics, zip(*counts, strict=True), strict=True):
        found.weight_G = sum(weight for weight, _ in each)
        found.flaw = next((flaw for _, flaw in each if flaw is not None), None)
