"""Collection time: the seconds of each stage under one choice, from a dry run's work and a device's speed.

Each pass takes the model forward and back, and makes the rows of every layer's A and G anew; each slice of a batch
reads and writes every sum once for A and once a direction for G, and costs the start of every operation anew. So fewer
slices are faster until they do not fit, and a further pass may be faster than many small slices.

The factors below were fitted on one machine of two cores to 24 collections of 0.02 to 15 s (MLPs, CNNs, LSTMs,
transformers; all kinds of gradients) and to the thirty jobs of `benchmarks.job_seconds`, whose collections took 0.45 to
1.6 times as long as foreseen on the idle machine.

Plan search: the fastest of the plans that fit the budget, among slices of a batch, passes and places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from catalog.responses.time_estimate import Paced
from engine.collection.probe import Probe, TimedForward
from engine.factors.representation import DENSE, Representation
from engine.gradient_identity.schedule import CheckWork, check_work
from engine.layers.layer import factor_sides
from engine.memory.budget import MemoryBudget
from engine.memory.device_speed import DeviceSpeed, typical_speed
from engine.memory.plan import Plan, readable_bytes
from engine.row_layout.layer_calls import Call
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


_STARTS_A_SLICE = 150
"""Starts of operations that surround the passes of a slice."""
_STARTS_A_CALL = 70
"""Those of one call of a treated layer, there and back, and of what is made of it."""
_A_DIRECTION = 0.3
"""The part of them that another direction of the gradient takes."""
_FORWARD_PASSES = 3.0
"""Forward passes of very few examples that a pass there and back takes."""
_LEAST_START = 0.2
"""The least part of such a pass that is taken for the start of its operations."""
_MODEL_PASSES = 2.5
"""Such passes that a slice takes beside the work of its calls."""
_STARTS_A_FORWARD = 20
"""Starts of operations for each call in a forward pass, where none was timed."""
_NEW_BYTES = 1.1
"""Times that the rows of a layer's A and G are made anew."""
_TOUCHED_FOR_VARIANCE = 8
"""Times that the sums of a batch and those before it are read or written for their variance, as measured."""
_USUAL_BATCHES = 16
"""Batches assumed where the number of examples is not known: the stages' proportions need one."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The cost of the data, as a dry run has shown."""

    pace: DeviceSpeed
    measured: bool
    """Whether the pace was measured."""
    examples: int
    """Examples of the data."""
    batch: int
    passing: float
    """Floating-point operations of one example there and back, without weight gradients."""
    adding: float
    """The same of its moments, over all directions."""
    sides: tuple[int, ...]
    """Rows of each dense factor."""
    sums_bytes: int
    """Bytes of the sums of all layers."""
    varied_bytes: int
    """Bytes of the sums that are set aside in each batch for their variance."""
    row_bytes: float
    """Bytes of the rows that one example enters into A and G of all layers, for one direction."""
    calls: int
    """Calls of treated layers in one pass."""
    forward: TimedForward | None
    """A forward pass of very few examples on this machine; None where none was timed."""
    directions: int
    """Gradients that are pulled back for each example."""
    checks: CheckWork
    """Work of the layers' self-checks."""

    @cached_property
    def started_seconds(self) -> float:
        """Seconds of the model's operations there and back with next to no example: their start."""
        if self.forward is None or not self.measured:
            return _FORWARD_PASSES * _STARTS_A_FORWARD * self.calls * self.pace.seconds_an_operation
        # few examples of a large model are no small work
        computed = self.forward.examples * self.example_seconds / _FORWARD_PASSES
        return _FORWARD_PASSES * max(self.forward.seconds - computed, _LEAST_START * self.forward.seconds)

    @cached_property
    def slice_seconds(self) -> float:
        """Seconds of a slice of the collection before any example enters it."""
        calls = _STARTS_A_CALL * self.calls * (1 + _A_DIRECTION * max(0, self.directions - 1))
        return (_STARTS_A_SLICE + calls) * self.pace.seconds_an_operation + _MODEL_PASSES * self.started_seconds

    @cached_property
    def example_seconds(self) -> float:
        """Seconds of one example there and back, with its rows, beyond the sums that these enter."""
        rows = _NEW_BYTES * self.row_bytes * (1 + self.directions) / 2
        return self.passing / self.pace.operations_per_second + rows / self.pace.new_bytes_per_second


def work_of(
    workspace: Workspace, probe: Probe, speed: DeviceSpeed | None, *, sums_bytes: int, varied_bytes: int = 0
) -> Work:
    """Return the work of one job, from the sizes of its calls, at a measured speed or a typical one."""
    collection = workspace.options.collection
    outputs = max(1, probe.outputs // probe.examples)
    directions = {"mc": collection.samples, "empirical": 1, "forward_only": 0}.get(collection.fisher, outputs)
    kronecker = [call for call in probe.calls if call.layer.form == "kronecker"]
    # two operations a multiplication, there and back
    passing = 4 * sum(call.output.numel() * call.layer.fan_in for call in kronecker) / probe.examples
    kept = {role: probe.kept(layer) for layer in probe.layers for role in (layer, *layer.roles)}
    adding = 2 * sum(
        (call.output.numel() / max(1, call.layer.fan_out))
        * (call.layer.fan_in**2 + directions * _gradient_products(kept.get(call.layer, DENSE), call.layer.fan_out))
        for call in kronecker
    ) / probe.examples  # fmt: skip
    batch = batch_size(workspace)
    return Work(
        pace=typical_speed(workspace.machine.device) if speed is None else speed,
        measured=speed is not None,
        examples=-(-(workspace.inputs.examples or batch * _USUAL_BATCHES) // collection.update_freq),
        batch=batch,
        passing=passing * max(1, (1 + directions) / 2),
        adding=adding,
        sides=tuple(
            rows
            for layer in probe.layers
            for groups, rows in factor_sides(layer, follows=layer.name in probe.shared)
            for _ in range(groups if rows > 1 else 0)
        ),
        sums_bytes=sums_bytes,
        varied_bytes=varied_bytes,
        row_bytes=sum(_row_numbers(call) for call in probe.calls) * probe.dtype.itemsize / probe.examples,
        calls=len(probe.calls),
        forward=probe.forward,
        directions=directions,
        checks=check_work(workspace, -(-(workspace.inputs.examples or batch * _USUAL_BATCHES) // batch)),
    )


def _row_numbers(call: Call) -> float:
    """Numbers of the rows of one call that enter its layer's A and G."""
    outputs = call.output.numel()
    return outputs * (1 + call.layer.fan_in / max(1, call.layer.fan_out)) if call.layer.form == "kronecker" else outputs


def _gradient_products(kept: Representation, size: int) -> int:
    """Products that one gradient of ``size`` numbers takes as it enters G, or what is kept in its place."""
    if kept.kind == "dense":
        return size * size
    # of ℓ more rows a Gram matrix of 2ℓ and a rotation to ℓ, in float64, where a product takes twice as long
    return 12 * kept.rank * size if kept.kind == "diagonal_sketch" else size


def with_seconds(plan: Plan, work: Work) -> Plan:
    """Add the predicted seconds of collection, correction and the factors' way over the disk."""
    pace, chosen = work.pace, plan.chosen
    batches = -(-work.examples // work.batch)
    slices = -(-work.batch // (chosen.micro_batch or work.batch)) * batches
    touched = 2 * work.sums_bytes * slices * (1 + work.directions) / 2
    moved = 0.6 * touched / 2 / pace.bytes_per_second if chosen.offload else 0.0
    touched += _TOUCHED_FOR_VARIANCE * work.varied_bytes * batches
    again = 4 / 3 if chosen.activation_checkpointing else 1
    once = work.examples * work.example_seconds * again + slices * work.slice_seconds
    adding = work.examples * work.adding / pace.operations_per_second
    checking = work.checks.examples * work.example_seconds + work.checks.passes * work.slice_seconds
    seconds = {
        "decomposition": 0.0,
        **plan.seconds,
        "collection": len(chosen.parts) * once + adding + touched / pace.held_bytes_per_second + moved + checking,
    }
    if chosen.corrections:
        # its bases are of the same factors, and made while it runs
        bases = sum(pace.eigen_seconds(9 * rows**3, rows) for rows in work.sides)
        seconds["correction"] = len(chosen.corrections) * once + adding + bases
    if len(chosen.parts) > 1:
        # written once and read back once
        seconds["decomposition"] += 2 * work.sums_bytes / pace.disk_bytes_per_second
    known: Paced = "usual" if not work.measured else "shared" if pace.busy else "measured"
    return replace(plan, seconds=seconds, pace=known, self_check_seconds=checking)
