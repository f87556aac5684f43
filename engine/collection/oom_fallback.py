"""Fallbacks: how a collection goes on where memory runs out although its plan had fitted.

The fallbacks of a plan are half as many examples at a time, down to one, and then two passes in place of the one
that ran out, down to one layer (with those that share its A) in each. A pass begins anew with each of them, so its sums
are those of a job that had chosen that fallback to begin with, and nothing is counted twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from engine.memory.plan import Chosen


def next_fallback(chosen: Chosen, number: int, whole: int, shared: Mapping[str, str], *, aside: bool) -> Chosen | None:
    """Choose the next fallback."""
    size = min(chosen.micro_batch or whole, whole)
    if size > 1:
        return replace(chosen, micro_batch=-(-size // 2))
    groups = list(_groups(chosen.parts[number], shared))
    if not aside or len(groups) < 2:
        return None
    half = len(groups) // 2
    halves = tuple(tuple(name for group in part for name in group) for part in (groups[:half], groups[half:]))
    return replace(chosen, parts=(*chosen.parts[:number], *halves, *chosen.parts[number + 1 :]))


def describe(chosen: Chosen) -> str:
    """Describe a choice by its slices and passes."""
    slices = "whole batches" if chosen.micro_batch is None else f"slices of {chosen.micro_batch}"
    return f"{slices}, {len(chosen.parts)} pass{'es' if len(chosen.parts) > 1 else ''}"


def _groups(part: Sequence[str], shared: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    leaders = [name for name in part if shared.get(name) not in part]
    for leader in leaders:
        yield (leader, *(name for name in part if shared.get(name) == leader))
