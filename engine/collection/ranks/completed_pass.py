"""A completed pass: one rank's sums and checks become those of all ranks, at the end of a pass over the data."""

from collections.abc import Sequence

from engine.accumulation.layer_statistics import LayerStatistics
from engine.collection.collection_state import CollectionState, Cursor
from engine.collection.pass_job import PassJob
from engine.collection.ranks.agreement import join_cursors
from engine.collection.ranks.owners import owners_of
from engine.collection.ranks.reduce_statistics import reduce_statistics
from engine.collection.ranks.turns import Turns
from engine.distributed.group import Ranks


def complete_pass(
    ranks: Ranks,
    job: PassJob,
    state: CollectionState,
    statistics: Sequence[LayerStatistics],
    cursor: Cursor,
    *,
    alone: bool,
) -> Cursor:
    """Add what every rank has measured in one pass."""
    collection = job.collection
    whole, since = join_cursors(ranks, cursor, Turns.of(ranks, collection.update_freq), collection)
    if collection.ema_decay is not None and since:
        for found in statistics:
            found.decay_(collection.ema_decay**since)
    reduce_statistics(ranks, statistics, collection, owners_of(ranks, job.workspace, statistics, alone=alone))
    if ranks.one_node and ranks.traffic.total("rows").received:
        job.workspace.ports.log(
            "warning",
            "gradient rows stand once on each rank instead of once on the node, for lack of room in /dev/shm and in "
            "the folder for temporary files",
        )
    states = ranks.gather(None if state.self_check is None else state.self_check.state(), "checks of the pass")
    if state.self_check is not None and state.checked is not None:
        state.self_check.join(state.checked.state(), states)
    for heard in ranks.gather(sorted(state.nondeterministic), "operations without a deterministic form"):
        state.nondeterministic.update(heard)
    return whole
