"""Subsamples: factors of the first N/8, N/4 and N/2 examples, taken in the same pass.

Sums over the first examples are what the running sums are when those examples have passed, so a
copy, normalised as the factors are, costs no pass. A size is reached at the end of the batch in
which the count of examples read crosses its mark; the count is kept with it. Of two marks in one
batch the later is kept, and none at the end of the data, which is the whole. N is what the data
says it holds, or else what counting it once beforehand gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from catalog.requests.collection import Collection
from engine.accumulation.layer_statistics import LayerStatistics
from engine.artifacts import Artifacts, Held
from engine.collection.collection_state import CollectionState, Snapshot
from engine.collection.normalise import Stored, finish_layer, layer_sums
from engine.factors.factor_set import LayerFacts, NestedSize
from engine.factors.spilled_factors import spill
from engine.model.batches import make_batches
from engine.workspace import Workspace

EIGHTHS = (1, 2, 4)
"""The sizes below the whole, in eighths of the data."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that a collection keeps, and where."""

    total: int
    """N, examples in the data."""
    shelf: Artifacts
    begin: int = 0
    """Examples of the data before those of this collection."""

    def crossed(self, before: int, after: int) -> int | None:
        """Find the sample size that one batch reaches."""
        before, after = before + self.begin, after + self.begin
        if after >= self.total:
            return None
        return max((each for each in EIGHTHS if 8 * before < each * self.total <= 8 * after), default=None)


def sizes_of(workspace: Workspace, collection: Collection) -> Sizes | None:
    """Set up the sample sizes that a job asks for, with a place for their factors; None where none are asked for.

    The data is counted once where it does not say how much it holds.
    """
    if not collection.nested:
        return None
    part = workspace.inputs.part
    total = workspace.inputs.examples if part is None else part.examples
    if total is None:
        stream = workspace.inputs.batches() if workspace.inputs.batches is not None else iter(())
        total = sum(batch.size for batch in make_batches(stream, collection.batch_size))
    if 8 * collection.batch_size > total:
        workspace.ports.log(
            "warning",
            f"`collection.nested`: sizes below the {total} examples are reached at the end of a batch, and batches of "
            f"{collection.batch_size} are larger than an eighth, so some coincide or are the whole; lower "
            f"`collection.batch_size` to {max(total // 8, 1)} or less",
        )
    shelf = Held() if workspace.ports.scratch is None else workspace.ports.scratch
    return Sizes(total, shelf, 0 if part is None else part.begin)


def keep_size(
    sizes: Sizes,
    snapshot: Snapshot,
    statistics: Sequence[LayerStatistics],
    state: CollectionState,
    collection: Collection,
    dtype: torch.dtype,
) -> None:
    """Store the factors of the sums so far as those of a smaller sample size; the sums go on.

    Memory:
        A copy of one layer's sums, its factors, those A that layers to come share, and one packed triangle.
    """
    first = len(state.statistics)
    last = {(found.leader or found).layer.name: place for place, found in enumerate(statistics)}
    shared: dict[str, list[Stored]] = {}
    for place, found in enumerate(statistics):
        holder = (found.leader or found).layer.name
        if found.flaw is None:
            leader = found.leader
            if leader is not None and holder not in shared:
                leader = _copied(leader, None)
            own_copy = _copied(found, leader)
            weight_A, weight_G = (found.leader or found).weight_A, found.weight_G
            for part, factors in enumerate(finish_layer(own_copy, collection, dtype, shared)):
                stem = f"nested/{snapshot.eighths}/{first + place}.{part}"
                own = None if found.leader is None else snapshot.spilled.get(holder)
                snapshot.spilled[factors.layer] = spill(sizes.shelf, factors, stem, own)
                snapshot.rows[factors.layer] = found.rank_bounds
                snapshot.sums[factors.layer] = layer_sums(own_copy, part, weight_A=weight_A, weight_G=weight_G)
        if last[holder] == place:
            shared.pop(holder, None)


def by_ordinal(sizes: Sizes | None, state: CollectionState, layers: tuple[LayerFacts, ...]) -> tuple[NestedSize, ...]:
    """Return the smaller sample sizes, ascending, as a factor set holds them: their factors are loaded by ordinal.

    The layers are those covered, in the order of the factor set; no sizes were asked for where ``sizes`` is None.
    """
    if sizes is None:
        return ()
    shelf = sizes.shelf
    found = []
    for _, snapshot in sorted(state.nested.items()):
        bounds = [(facts, snapshot.rows[facts.name]) for facts in layers]
        spilled = [snapshot.spilled[facts.name] for facts in layers]
        found.append(
            NestedSize(
                eighths=snapshot.eighths,
                examples=snapshot.examples,
                rank_bounds=tuple(
                    ((rows_a or None) if facts.form == "kronecker" else None, rows_g or None)
                    for facts, (rows_a, rows_g) in bounds
                ),
                load=lambda ordinal, spilled=spilled: spilled[ordinal].load(shelf),  # type: ignore[misc]
                sums=tuple(snapshot.sums.get(facts.name) for facts in layers),
            )
        )
    return tuple(found)


def _copied(found: LayerStatistics, leader: LayerStatistics | None) -> LayerStatistics:
    """The statistics with sums of their own, so that normalising them changes nothing."""
    rows = found.gradient_rows
    return found.copied(leader=leader, gradient_rows=None if rows is None else rows.copied(staging=None))
