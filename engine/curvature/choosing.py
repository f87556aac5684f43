"""Choosing: slices of a batch, where the sums stand, and passes, among plans that fit the budget."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from engine.memory.pace import measured_pace
from engine.memory.plan import Chosen, Plan
from engine.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one example costs, as a dry run has shown."""

    operations: float
    """Of the forward pass, and of the backward pass without weight gradients."""
    outputs: int
    """Numbers in the model's outputs."""


def fewest_passes(
    workspace: Workspace,
    groups: Mapping[tuple[str, ...], int],
    planned: Callable[[Chosen], Plan],
    fixed: Chosen,
) -> Plan:
    """With what is ``fixed``: one pass if any slices allow it, else as few as they do, else what needs least."""
    names = tuple(name for group in groups for name in group)
    sizes = _slice_sizes(workspace)
    where = "on the host" if fixed.offload else "in place"
    plans = []
    for size in sizes:
        plan = planned(replace(fixed, parts=(names,), micro_batch=size))
        if plan.fits(workspace.memory):
            slices = "whole batches" if size == sizes[0] else f"slices of {size} examples, the largest that fit"
            return replace(plan, why=f"one pass, with all sums {where} and {slices}")
        plans.append(plan)
    if workspace.scratch is None:
        return replace(plans[-1], why="nothing fits, and there is no place for what further passes leave")
    cuts = [
        planned(replace(fixed, parts=parts, micro_batch=size))
        for size in sizes
        if (parts := _parts(workspace, groups, planned(replace(fixed, parts=((), ()), micro_batch=size))))
    ]
    if not cuts:
        return replace(plans[-1], why="nothing fits, whatever the slices and passes")
    # of equally many passes the first, which has the fewest slices
    fewest = min(cuts, key=lambda plan: (not plan.fits(workspace.memory), len(plan.chosen.parts)))
    return replace(fewest, why=f"{len(fewest.chosen.parts)} passes: all sums {where} do not fit together")


def _parts(
    workspace: Workspace, groups: Mapping[tuple[str, ...], int], empty: Plan
) -> tuple[tuple[str, ...], ...] | None:
    """The passes that fit beside what ``empty``, a plan without sums, holds already."""
    on_device = workspace.device.type == "cuda" and not empty.chosen.offload
    allowed = workspace.memory.device_bytes if on_device else workspace.memory.host_bytes
    return partition(groups, allowed - empty.stage_bytes("device" if on_device else "host", "collection"))


def quicker(workspace: Workspace, resident: Plan, offloaded: Plan, work: Work) -> Plan:
    """The one that fits; of two, the one that takes less time for each batch, as the device's pace foretells."""
    fits = [plan for plan in (resident, offloaded) if plan.fits(workspace.memory)]
    if len(fits) < 2:
        return fits[0] if fits else resident
    pace = measured_pace(workspace.device)
    moved = _moved_bytes(workspace, offloaded, work) / pace.bytes_per_second
    again = _batch(workspace) * work.operations / pace.operations_per_second

    def seconds(plan: Plan) -> float:
        return len(plan.chosen.parts) * again + (moved if plan.chosen.offload else 0)

    best = min(resident, offloaded, key=seconds)
    other = offloaded if best is resident else resident
    return replace(
        best,
        why=f"{best.why}; {seconds(best):.2g} s a batch are foreseen, and {seconds(other):.2g} s for {other.why}",
    )


def _moved_bytes(workspace: Workspace, plan: Plan, work: Work) -> float:
    """Bytes that offloaded sums receive for one batch: A once a slice, G once a slice and direction."""
    kinds = {"mc": workspace.collection.samples, "empirical": 1, "forward_only": 0}
    directions = kinds.get(workspace.collection.fisher, work.outputs)
    slices = -(-_batch(workspace) // (plan.chosen.micro_batch or _batch(workspace)))
    sums = next(term.size_bytes for term in plan.terms if term.name == "accumulators")
    # all but the diagonal strips is one triangle; A and G are taken for equally large
    return 0.6 * sums * len(plan.chosen.parts) * slices * (1 + directions) / 2


def _batch(workspace: Workspace) -> int:
    return min(workspace.collection.batch_size, workspace.examples or workspace.collection.batch_size)


def _slice_sizes(workspace: Workspace) -> list[int]:
    """Examples at once, from the whole batch to one; each stands for a number of equal slices."""
    batch = _batch(workspace)
    asked = workspace.memory_options.micro_batch
    if asked is not None:
        return [min(asked, batch)]
    return sorted({-(-batch // slices) for slices in range(1, batch + 1)}, reverse=True)


def partition(groups: Mapping[tuple[str, ...], int], allowed_bytes: int) -> tuple[tuple[str, ...], ...] | None:
    """Cut ``groups`` (layers that must stay together, with their bytes) into runs of at most ``allowed_bytes``.

    Filling each run before the next is opened gives the fewest runs that keep the order. None
    where a single group is too large.
    """
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
