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
    """Bytes of ``place``, in whole MiB, from which ``planned`` fits; None where the other place is too small anyway.

    Args:
        planned: Chooses a plan for a budget.
        budget: What the other place has.
        place: Whose budget is asked for.
        below: A budget that does already: None where no smaller one fits.
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
    """Return the budget to name in place of ``enough``: one that ``plan`` fits also if measured again.

    Args:
        enough: The smallest that fits now.
        plan: Whose measured terms may come out otherwise in another process.
        place: Whose budget it is.
    """
    measured = sum(term.size_bytes for term in plan.terms if term.place == place and term.source == "measured")
    return dataclasses.replace(enough, size_bytes=enough.size_bytes + math.ceil(_SPREAD * measured / _STEP) * _STEP)
