"""A rank's part of its job: the batches r, r + W, r + 2W, … of all, its share of the host's memory, and no files.

The batches are cut from the data as one process cuts them, and each keeps the numbers that its examples have among
all: so the labels that are sampled, which are keyed by these numbers, are those of one process.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from catalog.requests.assignment import Assignment
from engine.artifacts import Held
from engine.distributed.group import Ranks
from engine.distributed.sharded_tensors import shard_model
from engine.memory.budget import free_host_bytes, resident_bytes
from engine.model.batches import make_batches
from engine.workspace import ModelInputs
from worker.execution.data.stream import Chunk
from worker.execution.refusal import Refusal


def own_batches(batches: Callable[[], Iterator[Chunk]], ranks: Ranks, batch_size: int) -> Callable[[], Iterator[Chunk]]:
    """Return a stream of one rank's batches; each pass reads all of the data."""

    def own() -> Iterator[Chunk]:
        for number, batch in enumerate(make_batches(batches(), batch_size)):
            if number % ranks.size == ranks.rank:
                yield batch.inputs, batch.targets, batch.index

    return own


class RankPlace(Protocol):
    """A rank among others, running or planned."""

    @property
    def rank(self) -> int:
        """Its number, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""


class PlannedRanks(NamedTuple):
    """Ranks that are not started yet, seen from the first."""

    size: int
    rank: int = 0


def own_examples(examples: int | None, ranks: RankPlace, batch_size: int) -> int | None:
    """Return the number of examples of one rank, where all batches but the last are full."""
    if examples is None:
        return None
    full, rest = divmod(examples, batch_size)
    own = len(range(ranks.rank, full, ranks.size)) * batch_size
    return own + (rest if full % ranks.size == ranks.rank else 0)


def bounds_of_rank(bounds: Mapping[str, int], ranks: RankPlace) -> Mapping[str, int]:
    """Return the bounds of one rank: an equal part of the host's free memory, where nothing was leased for it."""
    return {"host_bytes": (free_host_bytes() + resident_bytes()) // ranks.size, **bounds}


def bounds_of_plan(assignment: Assignment) -> Assignment:
    """Return the assignment of a plan with the memory that one of its ranks would have."""
    ranks = assignment.document.get("world_size")
    if not assignment.estimate or not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 2:
        return assignment
    return replace(assignment, bounds=bounds_of_rank(assignment.bounds, PlannedRanks(ranks)))


def assignment_of_rank(assignment: Assignment, ranks: Ranks) -> Assignment:
    """Return the assignment of one rank: with its own part of the memory, and a scratch folder of its own."""
    name = f"rank-{ranks.rank}"
    return replace(
        assignment,
        scratch=assignment.scratch / name,
        earlier=tuple(each / name for each in assignment.earlier),
        bounds=bounds_of_rank(assignment.bounds, ranks),
    )


def place_model(model: nn.Module, device: torch.device, ranks: Ranks, *, sharded: bool) -> nn.Module:
    """Move a model to its device: the whole of it, or this rank's part."""
    if sharded and ranks.size > 1:
        shard_model(model, device, ranks.size)
        return model
    return model.to(device)


def take_part(inputs: ModelInputs, ranks: Ranks, batch_size: int, model_sha256: str) -> None:
    """Leave a rank's own batches of all in its inputs, once it is sure that all ranks have loaded the same model."""
    if ranks.size == 1:
        return
    require_same_model(ranks, model_sha256)
    if inputs.batches is not None:
        inputs.batches = own_batches(inputs.batches, ranks, batch_size)
    inputs.examples_of_all = inputs.examples
    inputs.examples = own_examples(inputs.examples, ranks, batch_size)


def require_same_model(ranks: Ranks, sha256: str) -> None:
    """Require that every rank has loaded the same weights."""
    digests = ranks.gather(sha256, "digests of the model")
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise Refusal(
                f"the ranks have not loaded the same model: its digest is {digests[0]} on rank 0 and {digest} on rank "
                f"{rank}. A factory must make the same weights in every process: seed whatever it draws from",
                pointer="/model",
                code="model_differs",
            )


def require_same_data(ranks: Ranks, sha256: str) -> None:
    """Require that every rank has read the same data in the same order, of which each measured its own batches."""
    digests = ranks.gather(sha256, "digests of the data")
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise Refusal(
                f"are not the same for every rank: their digest is {digests[0]} on rank 0 and {digest} on rank {rank}, "
                "so examples were counted twice or not at all. A source must give the same examples in the same order "
                "in every process: seed what it shuffles by",
                pointer="/data",
                code="data_differ",
            )


class NoFiles(Held):
    """The artifacts of a rank that writes none: rank 0 writes those of the job."""

    @override
    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        pass

    @override
    def save_json(self, name: str, value: object) -> None:
        pass
