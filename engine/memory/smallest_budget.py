"""The smallest budget that would do: found by asking for the plan of ever closer budgets.

A larger budget allows every plan that a smaller one does, so the border is found by halving. What is named
to the caller is a little more: the process that comes next holds more or less than this one before its job
begins, and a budget that was named must not be refused then.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from engine.memory.budget import MemoryBudget
from engine.memory.plan import Enough, Plan

_STEP = 2**20
_SPREAD = 0.04
"""Of what a process holds before its job: two runs of one job, or a run and a plan from shapes, differ by up to 2 %."""


def smallest_budget(
    planned: Callable[[MemoryBudget], Plan],
    budget: MemoryBudget,
    place: Literal["device", "host"],
    *,
    below: Enough | None = None,
) -> Enough | None:
    """Return the smallest budget of one place, in whole MiB, that some plan fits.

    Args:
        planned: Chooses a plan for a budget.
        budget: Bytes of the other place.
        place: The place whose budget is wanted.
        below: A budget that does already, to look for a smaller one; None if none is known.

    Returns:
        The budget; None where no smaller one than ``below`` fits, or the other place is too small anyway.
    """

    def within(size_bytes: int) -> MemoryBudget:
        return dataclasses.replace(budget, **{f"{place}_bytes": size_bytes})

    def fits(steps: int) -> bool:
        allowed = within(steps * _STEP)
        return planned(allowed).fits(allowed)

    least = 0
    if below is None:
        most = max(planned(within(0)).peak_bytes(place), planned(budget).peak_bytes(place)) // _STEP + 1
    else:
        most = below.size_bytes // _STEP - 1
    if most <= 0 or not fits(most):
        return None
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if fits(middle) else (middle, most)
    return Enough(size_bytes=most * _STEP)


def named_budget(enough: Enough, plan: Plan, place: Literal["device", "host"]) -> Enough:
    """Return the budget to name in place of the smallest: one that the plan fits also if measured again.

    Args:
        enough: The smallest that fits now.
        plan: A plan that fits it, whose measured terms may differ in another process.
        place: The place that the budget is for.

    Returns:
        ``enough`` and 4 % of the measured terms, in whole MiB.
    """
    measured = sum(term.size_bytes for term in plan.terms if term.place == place and term.source == "measured")
    return dataclasses.replace(enough, size_bytes=enough.size_bytes + math.ceil(_SPREAD * measured / _STEP) * _STEP)
