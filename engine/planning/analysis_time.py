"""Analysis time: the seconds of the stages after the decompositions, from each layer's sizes and a device's speed."""

from dataclasses import replace

import torch

from catalog.analyses.capacity import CapacityParams
from catalog.analyses.reconstruction import ReconstructionParams
from engine.collection.probe import Probe
from engine.factors.clipping_check import EXACT_ROWS
from engine.factors.softmax_fisher import DENSE_ROWS
from engine.layers.layer import TreatedLayer
from engine.linalg.shift_interpolation import NODES, PANELS
from engine.memory.device_speed import typical_speed
from engine.memory.plan import Plan
from engine.planning.analysis_memory import rebuilt_sides
from engine.planning.collection.seconds import Work
from engine.planning.decomposition_memory import kept_as
from engine.planning.later.comparison import comparison_seconds
from engine.planning.later.natural_gradient import natural_gradient_seconds
from engine.planning.later.spectrum import spectrum_seconds
from engine.workspace import Workspace

_OF_A_LAYER = 0.03
"""Metrics of one layer, whose spectra are met in few nodes: seconds, whatever the layer."""
_LANCZOS_BYTES = 32 * 5 * 12
"""For each number of a factor: 32 steps with five products each, of which every number is read and widened."""
_OF_A_PRODUCT = 14
"""Times the operations of a forward pass: a gradient, its own gradient, and one more."""


def with_later_seconds(
    plan: Plan,
    workspace: Workspace,
    probe: Probe,
    work: Work,
) -> Plan:
    """Add the predicted seconds of the analyses' own stages."""
    seconds = dict(plan.seconds)
    if "capacity" in workspace.options.kinds:
        seconds["capacity"] = _OF_A_LAYER * (1 + sum(layer.groups for layer in probe.layers))
        seconds["capacity"] += sum(_without_spectrum(layer, probe, work) for layer in probe.layers)
        params = workspace.options.of("capacity") or CapacityParams()
        if params.cross_check is not None:
            seconds["cross_check"] = _cross_check(work, params, sum(layer.groups for layer in probe.layers))
    if "reconstruction" in workspace.options.kinds:
        seconds["reconstruction"] = _reconstruction(plan, workspace, probe, work)
    if "natural_gradient" in workspace.options.kinds:
        seconds["natural_gradient"] = natural_gradient_seconds(plan, workspace, probe, work)
    if "compare_curvature" in workspace.options.kinds:
        seconds["compare_curvature"] = comparison_seconds(workspace, probe, work)
    if "spectrum" in workspace.options.kinds:
        seconds["spectrum"] = spectrum_seconds(workspace, probe, work)
    return replace(plan, seconds=seconds)


def _without_spectrum(layer: TreatedLayer, probe: Probe, work: Work) -> float:
    """Of a G that answers shift by shift: two Gram matrices of its rows, and a factorisation, at each of them."""
    each, size = probe.kept(layer), layer.out_dim
    if each.kind == "diagonal_sketch":
        rows = each.gram_rows(size)
    else:
        rows = each.rows if each.kind == "softmax_head" and size > DENSE_ROWS else 0
    if not rows:
        return 0.0
    # one triangle of each Gram matrix; in float64 a product takes twice as long
    operations = 4 * size * rows**2 + 5 * rows**3
    return layer.groups * PANELS * NODES * operations / work.pace.operations_per_second


def _cross_check(work: Work, params: CapacityParams, blocks: int) -> float:
    # as far as one probe at a time: how many fit is seen when the collection is done
    forward = work.passing / 2 / max(1, (1 + work.directions) / 2)
    each = params.cross_check_probes * 3 * forward
    each += params.cross_check_iterations * (blocks + 1) * _OF_A_PRODUCT * forward
    return work.examples * each / work.pace.operations_per_second


def _reconstruction(
    plan: Plan,
    workspace: Workspace,
    probe: Probe,
    work: Work,
) -> float:
    params = workspace.options.of("reconstruction") or ReconstructionParams()
    kept = kept_as(workspace, probe.dtype)
    host = typical_speed(torch.device("cpu")) if workspace.machine.device.type == "cuda" else work.pace
    total = 0.0
    for layer in probe.layers:
        place = plan.chosen.placement.get(layer.parts[0])
        pace = host if place in (None, "host") else work.pace
        for side in rebuilt_sides(layer, probe, params.sides, follows=layer.name in probe.shared):
            if side.kind != "dense":
                continue
            n = side.size
            # the basis comes back, the result is written
            each = n * n * 1.5 * kept.itemsize / work.pace.disk_bytes_per_second
            if params.route == "rebuild":
                # two thirds of n columns at most, on one triangle; in float64 a product takes twice as long
                each += 2 / 3 * n**3 * (2 if place == "host" else 1) / pace.operations_per_second
                if workspace.machine.device.type == "cuda" and place != "host":
                    each += (3 if place == "device" else 8) * n * n * kept.itemsize / pace.bytes_per_second
                if n <= EXACT_ROWS:
                    each += 3 * n**3 / host.eigen_operations_per_second + 4 * n**3 / host.operations_per_second
                else:
                    each += _LANCZOS_BYTES * n * n / host.held_bytes_per_second
            total += layer.groups * each
    return total
