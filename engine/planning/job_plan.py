"""Forecast: the plan of a job, from the shapes that a dry run showed: of the ways that fit, the fastest.

Ways differ in the slices of a batch, the layers of each pass, where the sums stand, and whether the
inside of repeated layers is computed again; the seconds of each are foreseen from its work.

The smallest budget that would do is found by halving, since a larger budget allows every plan that a smaller one
does. What is named to the caller is a little more: the process that comes next holds more or less than this one
before its job begins, and a budget that was named must not be refused then.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from engine.collection.probe import Probe, group_bytes
from engine.memory.budget import MemoryBudget, give_back_host_memory, resident_bytes
from engine.memory.device_speed import MEASURING_BYTES, MEASURING_DEVICE_BYTES, DeviceSpeed
from engine.memory.plan import BUDGETED, Budgeted, Chosen, Enough, Plan
from engine.planning.analysis_cost import with_analyses
from engine.planning.collection.memory import corrected_plan, correction_bytes, plan_of
from engine.planning.collection.seconds import Work, fastest, halved, partition, slice_sizes, work_of
from engine.planning.decomposition_memory import beyond_solvers, with_decompositions
from engine.workspace import Workspace

_STEP = 2**20
_ROOM = 4
"""Times the bytes of measuring a speed: with less left of the budget none is measured."""
_SPREAD = 0.04
"""Share of a process's bytes before its job: two runs, or a run and a plan from shapes, differ by up to 2 %."""


def smallest_budget(
    planned: Callable[[MemoryBudget], Plan],
    budget: MemoryBudget,
    place: Literal["device", "host"],
    *,
    below: Enough | None = None,
) -> Enough | None:
    """Return the smallest budget of one place, in whole MiB, that some plan fits.

    ``budget`` has the bytes of the other place. ``below`` is a budget that does already, None if none is known. The
    result is None where no smaller one than that fits, or the other place is too small anyway.
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

    ``enough`` and 4 % of the plan's measured terms, which may differ in another process, in whole MiB.
    """
    measured = sum(term.size_bytes for term in plan.terms if term.place == place and term.source == "measured")
    return dataclasses.replace(enough, size_bytes=enough.size_bytes + math.ceil(_SPREAD * measured / _STEP) * _STEP)


def forecast(workspace: Workspace, probe: Probe) -> Plan:
    """Return the plan for a job on the layers of the probe.

    Whole batches or slices, one pass or as few as fit of neighbouring layers whose factors are spilled,
    sums in place or on the host, with activation checkpointing and without: whatever the document leaves
    open is weighed, and of what fits the fastest is taken. The choice of an earlier attempt is repeated.
    """
    return _Ways.of(workspace, probe).chosen()


def complete_plan(workspace: Workspace, probe: Probe, chosen: Chosen) -> Plan:
    """Return the plan of one way to do a job, with its seconds by the measured speed where there is one."""
    plans = list(_Ways.of(workspace, probe, workspace.machine.speed).completed(chosen))
    return next((plan for plan in plans if plan.chosen.corrections == chosen.corrections), plans[0])


def with_measured_seconds(workspace: Workspace, probe: Probe, plan: Plan) -> Plan:
    """Return a plan with its seconds by the speed that is measured now, and those that the job has taken so far.

    The choice stays, which typical speeds have made: in the same budget a job goes the same way on a busy machine.
    Nothing is measured where the plan does not fit, or the budget leaves little beside it.
    """
    machine = workspace.machine
    room = _ROOM * MEASURING_BYTES
    on_device = max(room, MEASURING_DEVICE_BYTES) if machine.device.type == "cuda" else room
    if not plan.fits(machine.budget) or not machine.guard.fits(device_bytes=on_device, host_bytes=room):
        return replace(plan, start_seconds=machine.curve.elapsed_seconds())
    machine.speed = machine.measure_speed(len(plan.chosen.parts) > 1)
    if machine.speed is not None and machine.speed.busy and torch.get_num_threads() > 1:
        # each product waits for the thread that has lost its core: for how long, no measurement of a moment says
        machine.speed = None
    if machine.speed is None:
        return replace(plan, start_seconds=machine.curve.elapsed_seconds())
    give_back_host_memory()
    timed = complete_plan(workspace, probe, plan.chosen)
    start = machine.curve.elapsed_seconds()
    return replace(
        plan, start_seconds=start, seconds=timed.seconds, pace=timed.pace, self_check_seconds=timed.self_check_seconds
    )


@dataclass(frozen=True, kw_only=True)
class Narrower:
    """The same job with less of its head's G."""

    layer: str
    """The name of the head."""
    probe: Probe
    """The probe with the head kept so."""
    kept: str
    """Part of its G that is kept, in words."""

    @property
    def why(self) -> str:
        """The reason of the head's representation."""
        return self.probe.representations[self.layer].why


def smallest_budgets(
    workspace: Workspace,
    probe: Probe,
    less: Narrower | None,
) -> dict[Budgeted, Enough | None]:
    """Return the smallest budget of each place that the job fits, the other place's budget unchanged.

    None where no budget of that place alone suffices. ``less`` is the job with less of its head's G, which is counted
    and named if it takes less memory; None if there is no such job.
    """

    def planning(probe: Probe) -> Callable[[MemoryBudget], Plan]:
        ways = _Ways.of(workspace, probe)
        return lambda budget: replace(ways, budget=budget).chosen()

    def least(place: Budgeted) -> Enough | None:
        whole = smallest_budget(planning(probe), workspace.machine.budget, place)
        if less is None or less.probe is probe:
            return whole
        narrow = smallest_budget(planning(less.probe), workspace.machine.budget, place, below=whole)
        return whole if narrow is None else replace(narrow, keeping=less.kept)

    # measured terms are the same whatever the budget
    plan = planning(probe)(workspace.machine.budget)
    found = {place: least(place) for place in BUDGETED}
    return {place: each and named_budget(each, plan, place) for place, each in found.items()}


@dataclass(frozen=True, kw_only=True)
class _Ways:
    """All ways to do one job."""

    workspace: Workspace
    budget: MemoryBudget
    probe: Probe
    held_bytes: int
    work: Work

    @classmethod
    def of(cls, workspace: Workspace, probe: Probe, speed: DeviceSpeed | None = None) -> "_Ways":
        sums, twice = (
            sum(group_bytes(probe, workspace.machine.device, varied).values())
            for varied in (None, workspace.options.collection)
        )
        return cls(
            workspace=workspace,
            budget=workspace.machine.budget,
            probe=probe,
            held_bytes=resident_bytes() if probe.resident_bytes is None else probe.resident_bytes,
            work=work_of(workspace, probe, speed, sums_bytes=sums, varied_bytes=twice - sums),
        )

    @cached_property
    def groups(self) -> dict[tuple[str, ...], int]:
        """Layers of one A stay together; bytes of their sums."""
        collection = self.workspace.options.collection
        return group_bytes(self.probe, self.workspace.machine.device, collection)

    @cached_property
    def bases(self) -> dict[tuple[str, ...], int]:
        """The same groups; bytes of their bases and corrected eigenvalues."""
        layers = {layer.name: layer for layer in self.probe.layers}
        return {
            names: sum(
                correction_bytes(layers[name], self.probe.dtype.itemsize, follows=name in self.probe.shared)
                for name in names
            )
            for names in self.groups
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Every layer's."""
        return tuple(layer.name for layer in self.probe.layers)

    def chosen(self) -> Plan:
        """The one to take."""
        replayed = self.workspace.resume.chosen
        if replayed is not None and {name for part in replayed.parts for name in part} == set(self.names):
            return replace(next(self.completed(replayed)), why="an earlier attempt of this job chose so")
        plan = fastest(list(self._candidates()), self.budget)
        beyond = beyond_solvers(self.probe, plan) if self.workspace.options.decomposition != "none" else ""
        return replace(plan, why=f"{plan.why}; {beyond}") if beyond else plan

    def _candidates(self) -> Iterator[Plan]:
        options = self.workspace.options.memory
        offered = self.probe.recomputed is not None
        if options.activation_checkpointing == "on" and not offered:
            self.workspace.ports.log("warning", "`memory.activation_checkpointing` is not used: the model offers none")
        recompute = {"on": (offered,), "off": (False,), "auto": (False, True) if offered else (False,)}
        # on a CPU the sums are on the host anyway
        open_choice = self.workspace.machine.device.type == "cuda"
        offload = {"on": (True,), "off": (False,), "auto": (False, True) if open_choice else (False,)}
        for again in recompute[options.activation_checkpointing]:
            for aside in offload[options.offload]:
                for size in slice_sizes(self.workspace):
                    fixed = Chosen(offload=aside, activation_checkpointing=again, micro_batch=size)
                    for parts in self._cuts(fixed):
                        yield from self.completed(replace(fixed, parts=parts))

    def _cuts(self, fixed: Chosen) -> Iterator[tuple[tuple[str, ...], ...]]:
        """Layers of each pass: all of them; where factors can be spilled, as many as fit."""
        yield (self.names,)
        if self.workspace.ports.scratch is None:
            return
        on_device = self.workspace.machine.device.type == "cuda" and not fixed.offload
        place: Budgeted = "device" if on_device else "host"
        allowed = self.budget.device_bytes if on_device else self.budget.host_bytes
        empty = self._plan(replace(fixed, parts=((), ())))
        parts = partition(self.groups, allowed - empty.stage_bytes(place, "collection"))
        if parts is not None and len(parts) > 1:
            yield parts
        elif parts is not None and len(self.groups) > 1:
            # in memory they may be in the way of what comes after: spilled, they are not
            yield halved(self.groups)

    def _plan(self, chosen: Chosen) -> Plan:
        return plan_of(self.workspace, self.probe, self.groups, self.held_bytes, chosen)

    def completed(self, chosen: Chosen) -> Iterator[Plan]:
        """With the passes that re-estimate eigenvalues, and the seconds of everything."""
        given = self.workspace, self.probe
        plan = self._plan(chosen)
        for corrected in self._with_corrections(plan) if self.workspace.options.collection.ekfac else (plan,):
            decomposed = with_decompositions(corrected, *given, self.budget, self.work.pace)
            yield with_analyses(decomposed, *given, self.budget, self.work)

    def _with_corrections(self, plan: Plan) -> Iterator[Plan]:
        place: Budgeted = "device" if self.workspace.machine.device.type == "cuda" else "host"
        given = None if self.workspace.resume.chosen is None else self.workspace.resume.chosen.corrections
        if given and {name for part in given for name in part} == set(self.names):
            yield corrected_plan(plan, self.bases, self.probe.layers, place, given)
            return
        yield corrected_plan(plan, self.bases, self.probe.layers, place, (self.names,))
        if self.workspace.ports.scratch is None:
            return
        empty = corrected_plan(plan, self.bases, self.probe.layers, place, ((), ()))
        allowed = self.budget.device_bytes if place == "device" else self.budget.host_bytes
        parts = partition(self.bases, allowed - empty.stage_bytes(place, "correction"))
        if parts is not None and len(parts) > 1:
            yield corrected_plan(plan, self.bases, self.probe.layers, place, parts)
        elif parts is not None and len(self.bases) > 1:
            # spilled, they leave room for faster decompositions
            yield corrected_plan(plan, self.bases, self.probe.layers, place, halved(self.bases))
