"""Plan search: the fastest of the plans that fit the budget, among slices of a batch, passes and places."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.memory.budget import MemoryBudget
from engine.memory.plan import Plan, readable_bytes
from engine.workspace import Workspace

_EVERY_NUMBER = 32
"""Up to so many slices of a batch every number is weighed, beyond it each doubling."""


def fastest(plans: Sequence[Plan], budget: MemoryBudget) -> Plan:
    """Choose the plan with the fewest predicted seconds among those that fit; if none fits, the one that lacks least.

    Of equally fast ones the first is taken. A larger budget only adds plans, so it never gives a slower one.
    """
    fitting = [plan for plan in plans if plan.fits(budget)]
    if not fitting:
        why = f"nothing fits, whatever the choice{_part_of_host(budget)}"
        return replace(min(plans, key=lambda plan: _lacking(plan, budget)), why=why)
    best = min(fitting, key=total_seconds)
    roomier = min(plans, key=total_seconds)
    why = f"{described(best)}: the fastest of {len(fitting)} ways that fit"
    if total_seconds(roomier) < total_seconds(best):
        why += f"; {described(roomier)} would be faster and does not fit"
    return replace(best, why=why + _part_of_host(budget))


def total_seconds(plan: Plan) -> float:
    """Return the predicted seconds of all stages."""
    return sum(plan.seconds.values())


def described(plan: Plan) -> str:
    """Describe what a plan chose."""
    chosen = plan.chosen
    passes = "one pass" if len(chosen.parts) == 1 else f"{len(chosen.parts)} passes"
    slices = "whole batches" if chosen.micro_batch is None else f"slices of {chosen.micro_batch} examples"
    where = ", sums on the host" if chosen.offload else ""
    again = ", activation checkpointing" if chosen.activation_checkpointing else ""
    return f"{passes}, {slices}{where}{again}"


def _part_of_host(budget: MemoryBudget) -> str:
    """Said of a budget that would be larger if the job were alone."""
    if budget.host_shared_by == 1:
        return ""
    part = readable_bytes(budget.host_bytes)
    return f"; the budget is {part} of host memory, as {budget.host_shared_by} jobs at a time share it"


def _lacking(plan: Plan, budget: MemoryBudget) -> tuple[int, int]:
    device, host = plan.peak_bytes("device"), plan.peak_bytes("host")
    return max(0, device - budget.device_bytes) + max(0, host - budget.host_bytes), device + host


def batch_size(workspace: Workspace) -> int:
    """Return the examples of a whole batch."""
    return min(
        workspace.options.collection.batch_size, workspace.inputs.examples or workspace.options.collection.batch_size
    )


def slice_sizes(workspace: Workspace) -> list[int]:
    """Return the numbers of examples at once that are weighed; each stands for a number of equal slices."""
    batch = batch_size(workspace)
    asked = workspace.options.memory.micro_batch
    if asked is not None:
        return [min(asked, batch)]
    numbers = [*range(1, _EVERY_NUMBER), *(_EVERY_NUMBER << power for power in range(batch.bit_length())), batch]
    return sorted({-(-batch // slices) for slices in numbers if slices <= batch}, reverse=True)


def halved(groups: Mapping[tuple[str, ...], int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Cut the groups once, so that the larger side has the fewest bytes."""
    runs, sizes = list(groups), list(groups.values())
    cut = min(range(1, len(runs)), key=lambda place: max(sum(sizes[:place]), sum(sizes[place:])))
    left, right = (tuple(name for names in side for name in names) for side in (runs[:cut], runs[cut:]))
    return left, right


def partition(groups: Mapping[tuple[str, ...], int], allowed_bytes: int) -> tuple[tuple[str, ...], ...] | None:
    """Cut the groups into the fewest runs that keep the order: each run is filled before the next is opened."""
    parts: list[tuple[str, ...]] = []
    left = -1
    for names, size in groups.items():
        if size > allowed_bytes:
            return None
        if size > left or not parts:
            parts.append(())
            left = allowed_bytes
        parts[-1] += names
        left -= size
    return tuple(parts)
