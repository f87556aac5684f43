"""Agreement: decisions that every rank takes alike, since a transfer that one rank leaves out is waited for in vain.

first batch          that of the first rank with an example shows every rank the same layers, masks and sharing
plan                 that of the rank with the smallest budget
way a pass ended     gathered: if one rank leaves its pass, all do, for all reasons together
checkpoint           gone on with where every rank has one of the same pass and can read all of it, else by none
refusal, failure     a note in the store, which every rank reads once a batch and wherever it waits
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from catalog.requests.collection import Collection
from engine.accumulation.layer_statistics import LayerStatistics
from engine.collection.collection_state import Cursor
from engine.collection.ranks.turns import Turns, require_turns
from engine.distributed.group import Ranks
from engine.errors import EmptyData, RanksRefused
from engine.memory.budget import MemoryBudget
from engine.merging.example_runs import joined, overlap
from engine.model.batches import Batch
from engine.row_layout.attention_masks import Key

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Left:
    """The reasons for which a pass was left, to be made anew."""

    unshared: frozenset[str] = frozenset()
    """Layers that do not share an A after all."""
    unmasked: frozenset[Key] = frozenset()
    """Calls that the mask is not laid on after all."""
    deferred: frozenset[str] = frozenset()
    """Layers some of whose calls get no gradient."""
    overwritten: frozenset[str] = frozenset()
    """Layers whose input the model writes to afterwards."""
    out_of_memory: frozenset[str] = frozenset()
    """Messages of allocators."""
    interrupted: frozenset[int] = frozenset()
    """Ranks that left since another one did."""

    def __bool__(self) -> bool:
        """Whether the pass was left at all."""
        return any(getattr(self, entry.name) for entry in fields(self))

    def joined(self, others: Sequence["Left"]) -> "Left":
        """Return the reasons of several ranks together."""
        return Left(
            **{entry.name: frozenset().union(*(getattr(each, entry.name) for each in others)) for entry in fields(self)}
        )


def end_together(ranks: Ranks, left: Left, statistics: Sequence[LayerStatistics]) -> Left:
    """Wait until every rank has come to the end of its pass, or has left it."""
    if left:
        ranks.leave()
    unproven = frozenset(found.layer.name for found in statistics if found.unproven)
    reached = frozenset(found.layer.name for found in statistics if found.gradients and found.flaw is None)
    ends = ranks.gather((left, unproven, reached), "end of the pass")
    # inputs of one rank have entered A without any gradient, and another rank shows that there is one
    late = frozenset().union(*(each for _, each, _ in ends)) & frozenset().union(*(each for _, _, each in ends))
    return left.joined([Left(deferred=late), *(each for each, _, _ in ends)])


def share_first_batch(ranks: Ranks, first: Batch | None) -> Batch:
    """Return the batch that every rank probes the model with."""
    holders = [rank for rank, holds in enumerate(ranks.gather(first is not None, "first batches")) if holds]
    if not holders:
        raise EmptyData(f"the data of all {ranks.size} ranks hold no example; give at least one", pointer="/data")
    shared = ranks.broadcast(first, holders[0], "first batch")
    if not isinstance(shared, Batch):
        raise TypeError(f"rank {holders[0]} has sent no batch")
    return shared


def planner_of(ranks: Ranks, budget: MemoryBudget) -> int:
    """Return the rank whose plan all follow: the one with the smallest budget."""
    budgets = ranks.gather((budget.device_bytes, budget.host_bytes), "budgets")
    sizes = [tuple(float("inf") if size is None else size for size in each) for each in budgets]
    return sizes.index(min(sizes))


def require_alike(ranks: Ranks, value: T, what: str) -> T:
    """Require that every rank has come to the same value."""
    found = ranks.gather(value, what)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise RanksRefused(
                f"every rank must find the same {what}, and rank {rank} differs from rank 0 ({str(other)[:300]} "
                f"against {str(found[0])[:300]}); give every rank the same model, options and version"
            )
    return value


def total_examples(ranks: Ranks, own: int | None) -> int | None:
    """Return the examples of all ranks."""
    counts = ranks.gather(own, "numbers of examples")
    return None if any(each is None for each in counts) else sum(counts)


def join_cursors(ranks: Ranks, cursor: Cursor, turns: Turns, collection: Collection) -> tuple[Cursor, int]:
    """Return what all ranks have read in one pass."""
    own = turns.last_update(cursor.batches)
    found: list[tuple[Cursor, int | None]] = ranks.gather((cursor, own), "ends of the pass")
    require_turns([each.batches for each, _ in found], collection.update_freq, collection.ema_decay)
    last = max((update for _, update in found if update is not None), default=0)
    whole = Cursor(number=cursor.number)
    for each, _ in found:
        for name in ("batches", "read", "examples", "updates", "terms"):
            setattr(whole, name, getattr(whole, name) + getattr(each, name))
        whole.entered = whole.entered.joined(each.entered)
    _require_apart([joined(each.runs) for each, _ in found])
    whole.runs = joined(run for each, _ in found for run in each.runs)
    if any(each.scattered for each, _ in found):
        whole.runs, whole.scattered = [], True
    whole.loss_scale = min(each.loss_scale for each, _ in found)
    whole.steady = cursor.steady
    return whole, 0 if own is None else last - own


def _require_apart(runs: Sequence[list[list[int]]]) -> None:
    """Require that no example is held by two ranks; samplers fill ranks up with examples of others."""
    twice = overlap([run for each in runs for run in each])
    if twice is not None and all(overlap(each) is None for each in runs):
        raise RanksRefused(
            f"every example must be held by one rank, and example {twice} is held by two, so it would count twice; "
            "give each rank its own part of the data, without the examples that a sampler adds to make parts equal",
            pointer="/data",
        )


def agree_on_checkpoint(ranks: Ranks, state: Any) -> bool:  # noqa: ANN401 - what a checkpoint is known by
    """Tell whether all ranks go on from a checkpoint."""
    found = ranks.gather(state, "checkpoints")
    return all(each is not None and each == found[0] for each in found)


def agree_on_sums(ranks: Ranks, foreign: str, full: str) -> tuple[str, str]:
    """Tell whether all ranks have read the sums of their checkpoints."""
    found = ranks.gather((foreign, full), "sums of the checkpoints")
    reasons = [(number, why, said) for number, (why, said) in enumerate(found) if why or said]
    for number, why, said in reasons:
        own = number == ranks.rank
        if why:
            return (why if own else f"that of rank {number} is of no use: {why}"), ""
        if said:
            full = said if own else f"rank {number}: {said}"
    return "", full
