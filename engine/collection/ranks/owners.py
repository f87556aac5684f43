"""Owners: the rank to which the dense sums of a layer go, where no other rank needs its factors.

Each of the other ranks sends the owner one triangle of n(n + 1)/2 numbers; where every rank needs the sum, each sends
about twice as many (``engine.distributed.formulas``), and each holds it.

Every rank needs it in a notebook, where `measure` returns the factors; for EK-FAC, whose passes rotate into their
eigenbases; and for an analysis that reads the factors of all layers. A variance over batches compares them to each
rank's own.
"""

from collections.abc import Mapping, Sequence

from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.tied_statistics import TiedHeadStatistics
from engine.distributed.longest_first import divide_longest_first
from engine.factors.kronecker_factors import Factors
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
    """Return the owners of covered layers.

    Args:
        workspace: The job.
        layers: Name of the layer of each ordinal.

    Returns:
        Ranks by ordinal; None where every rank has all factors.
    """
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
