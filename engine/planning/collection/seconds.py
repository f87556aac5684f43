"""Collection time: the seconds of each stage under one choice, from a dry run's work and a device's speed.

Each pass takes the model forward and back; each slice of a batch reads and writes every sum once for
A and once a direction for G, and costs the start of every operation anew. So fewer slices are faster
until they do not fit, and a further pass may be faster than many small slices.
"""

from dataclasses import dataclass, replace
from typing import Literal

from catalog.responses.time_estimate import WORTH_SECONDS
from engine.collection.probe import Probe
from engine.factors.representation import DENSE, Representation
from engine.gradient_identity.schedule import CheckWork, check_work
from engine.layers.layer import factor_sides
from engine.memory.budget import give_back_host_memory
from engine.memory.device_speed import MEASURING_BYTES, MEASURING_DEVICE_BYTES, DeviceSpeed, typical_speed
from engine.memory.plan import Plan
from engine.planning.plan_search import batch_size, total_seconds
from engine.workspace import Workspace

_OPERATIONS_A_CALL = 12
"""Operations that the passes start for each call of a treated layer, there and back, and around it."""
_TOUCHED_FOR_VARIANCE = 8
"""Times that the sums of a batch and those before it are read or written for their variance, as measured."""
_ROOM = 4
"""Times what measuring holds: with less left of the budget it is not done."""
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
    calls: int
    """Calls of treated layers in one pass."""
    directions: int
    """Gradients that are pulled back for each example."""
    checks: CheckWork
    """Work of the layers' self-checks."""


def work_of(
    workspace: Workspace,
    probe: Probe,
    sums_bytes: int,
    varied_bytes: int = 0,
) -> Work:
    """Return the work of one job, from the sizes of its calls."""
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
        pace=typical_speed(workspace.machine.device) if workspace.machine.speed is None else workspace.machine.speed,
        measured=workspace.machine.speed is not None,
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
        calls=len(probe.calls),
        directions=directions,
        checks=check_work(workspace, -(-(workspace.inputs.examples or batch * _USUAL_BATCHES) // batch)),
    )


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
    once = (
        work.examples * work.passing * (4 / 3 if chosen.activation_checkpointing else 1) / pace.operations_per_second
        + slices * work.calls * _OPERATIONS_A_CALL * pace.seconds_an_operation
    )
    adding = work.examples * work.adding / pace.operations_per_second
    checking = (
        work.checks.examples * work.passing / pace.operations_per_second
        + work.checks.passes * work.calls * _OPERATIONS_A_CALL * pace.seconds_an_operation
    )
    seconds = {
        "decomposition": 0.0,
        **plan.seconds,
        "collection": len(chosen.parts) * once + adding + touched / pace.held_bytes_per_second + moved + checking,
    }
    if chosen.corrections:
        # its bases are of the same factors, and made while it runs
        bases = sum(9 * rows**3 for rows in work.sides) / pace.eigen_operations_per_second
        seconds["correction"] = len(chosen.corrections) * once + adding + bases
    if len(chosen.parts) > 1:
        # written once and read back once
        seconds["decomposition"] += 2 * work.sums_bytes / pace.disk_bytes_per_second
    pace_is: Literal["measured", "usual"] = "measured" if work.measured else "usual"
    return replace(plan, seconds=seconds, pace=pace_is, self_check_seconds=checking)


def calibrated(workspace: Workspace, plan: Plan) -> bool:
    """Measure the device's speed for a job that is long enough to be worth it.

    It is not measured where the budget leaves little, nor where an earlier attempt has chosen: a choice
    that was made is repeated whatever the speed.
    """
    if (
        workspace.machine.speed is not None
        or workspace.resume.chosen is not None
        or not plan.fits(workspace.machine.budget)
    ):
        return False
    room = _ROOM * MEASURING_BYTES
    on_device = max(room, MEASURING_DEVICE_BYTES) if workspace.machine.device.type == "cuda" else room
    # a shorter job does not wait for the machine to be measured
    if total_seconds(plan) < WORTH_SECONDS or not workspace.machine.guard.fits(device_bytes=on_device, host_bytes=room):
        return False
    workspace.machine.speed = workspace.machine.measure_speed()
    give_back_host_memory()
    return workspace.machine.speed is not None
