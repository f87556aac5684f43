"""Planned part: the examples and the memory of one piece, or of one rank, where a job is planned and not yet run.

shards: N         the largest piece of N; the merge of all of them is planned with it
shards: auto      the undivided collection: how many pieces there will be depends on the devices that are there
world_size: W     rank 0, which has the most batches, in its part of the host's memory
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from catalog.requests.assignment import Assignment
from catalog.requests.job import JobDocument
from engine.workspace import DataPart, ModelInputs
from worker.execution.data.stream import DataStream
from worker.execution.pieces.data_extent import cut_pieces, measure_extent
from worker.execution.ranks.rank_part import bounds_of_rank, own_examples


class PlannedRanks(NamedTuple):
    """Ranks that are not started yet, seen from the first."""

    size: int
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class PlannedPart:
    """The part of a job that a plan is of."""

    pieces: int = 1
    """Pieces that are merged."""
    said: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the plan that say what its figures are of."""


def bounds_of_plan(assignment: Assignment) -> Assignment:
    """Return the assignment of a plan with the memory that one of its ranks would have."""
    ranks = assignment.document.get("world_size")
    if not assignment.estimate or not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 2:
        return assignment
    return replace(assignment, bounds=bounds_of_rank(assignment.bounds, PlannedRanks(ranks)))


def plan_part(document: JobDocument, data: DataStream, inputs: ModelInputs) -> PlannedPart:
    """Leave the examples of one rank, or of the largest piece, in the inputs of a job that is planned."""
    whole, collection = data.examples, document.collection
    if document.world_size > 1:
        ranks = PlannedRanks(document.world_size)
        inputs.examples_of_all = whole
        inputs.examples = own_examples(whole, ranks, collection.batch_size)
        return PlannedPart(said={"of_rank": {"world_size": ranks.size, "examples": inputs.examples, "whole": whole}})
    if document.shards is None:
        return PlannedPart()
    if document.shards == "auto" or whole is None:
        return PlannedPart(said={"of_piece": {"count": None, "examples": whole, "whole": whole}})
    pieces = cut_pieces(measure_extent(data, collection, _nothing), document.shards)
    inputs.examples = pieces[0].end
    inputs.part = DataPart(begin=0, end=pieces[0].end or 0, examples=whole, batches=data.batches)
    said = {"count": len(pieces), "examples": pieces[0].end, "whole": whole}
    return PlannedPart(pieces=len(pieces), said={"of_piece": said})


def _nothing() -> None:
    """Stop nowhere: data that say how many they are need no pass."""
