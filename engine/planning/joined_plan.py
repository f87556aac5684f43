"""Joined plan of a divided job: the collection of one piece, the merge of all, and the analyses afterwards.

The merge holds one layer's sums in float64, and that layer of one piece.

The factors of the pieces are on the disk, all of them; in memory there is one layer at a time, added up before it is
decomposed. A number of a piece is read, verified, unpacked and added, which takes as long as passing over it so many
times as was measured, whatever its precision::

    seconds = Σ over pieces of  bytes / disk speed  +  20 · 8 · numbers / host speed
"""

from dataclasses import replace

import torch

from engine.collection.probe import Probe
from engine.layers.layer import TreatedLayer
from engine.memory.device_speed import DeviceSpeed, typical_speed
from engine.memory.plan import Plan, Term
from engine.planning.job_plan import complete_plan
from engine.workspace import JobOptions, Machine, Workspace

_FLOAT64 = 8
_PASSES = 20
"""Times that a number of a piece, in float64, is read or written until it is in the sum, as measured."""
_WIDENED_BYTES = 2**21
"""Bytes that are widened to float64 at once."""


def with_join(plan: Plan, workspace: Workspace, probe: Probe, pieces: int, options: JobOptions) -> Plan:
    """Add to a piece's plan the bytes and seconds of merge, decompositions and analyses after all pieces.

    Bytes of the last two are left out where they do not fit beside: another machine may join the pieces, and each of
    its stages takes a cheaper way where memory is short.
    """
    own = workspace.options
    workspace.options = options
    try:
        whole = complete_plan(workspace, probe, plan.chosen)
    finally:
        workspace.options = own
    host = host_speed(workspace.machine)
    joined = with_merge(replace(whole, why=plan.why), probe, pieces, host)
    if joined.fits(workspace.machine.budget):
        return joined
    return with_merge(replace(plan, seconds=whole.seconds, pace=whole.pace), probe, pieces, host)


def with_merge(plan: Plan, probe: Probe, pieces: int, host: DeviceSpeed | None = None) -> Plan:
    """Add the bytes and the seconds of merging the pieces of a divided job to its decompositions.

    ``plan`` is that of the undivided job. The factors of all pieces are on the disk together. ``host`` is the speed of
    the host, which merges; None leaves the seconds as they are.
    """
    item = probe.dtype.itemsize
    formula = "8 (in² + out²) + one piece's in² + out² and its larger triangle"
    sizes = {layer.name: _layer_bytes(layer, probe, item) for layer in probe.layers}
    held = [Term("merge", formula, size, "host", "decomposition", name) for name, size in sizes.items()]
    disk = pieces * probe.packed_bytes(item)
    kept = Term("factors of the pieces", f"{pieces} · Σ triangles, as collected", disk, "disk", "decomposition")
    seconds = dict(plan.seconds)
    if host is not None:
        numbers = disk // item
        merging = disk / host.disk_bytes_per_second + _PASSES * _FLOAT64 * numbers / host.held_bytes_per_second
        seconds["decomposition"] = (seconds.get("decomposition") or 0.0) + merging
    return replace(plan, terms=(*plan.terms, *held, kept), seconds=seconds)


def host_speed(machine: Machine) -> DeviceSpeed:
    """Return the speed of the host, which merges whatever the device: as measured if it computes too, else as usual."""
    host = torch.device("cpu")
    return typical_speed(host) if machine.speed is None or machine.device.type == "cuda" else machine.speed


def _layer_bytes(layer: TreatedLayer, probe: Probe, item: int) -> int:
    # a layer that follows another's A adds it up again
    sides = probe.sides(layer, follows=False)
    numbers = [side**2 if dense else side for side, dense in sides]
    triangle = max((side * (side + 1) // 2 if dense else side for side, dense in sides), default=0)
    rows = probe.held_bytes(layer)
    widened = 0 if item == _FLOAT64 else min(_WIDENED_BYTES, _FLOAT64 * max(numbers, default=0))
    # rows stand behind those that were there before, of which they are a copy
    return (_FLOAT64 + item) * sum(numbers) + item * triangle + widened + 2 * rows
