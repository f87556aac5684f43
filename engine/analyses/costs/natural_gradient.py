"""Natural gradient, its bytes and seconds: a pass that takes the gradient, then one layer's directions at a time.

The pass holds the graph of a slice and two numbers for every parameter; the layers hold their eigenvectors and some
matrices of their own numbers in float64. The stage holds the larger of the two, in each place.
"""

from dataclasses import replace

from catalog.analyses.natural_gradient import NaturalGradientParams
from engine.collection.probe import Probe, read_back_bytes
from engine.factors.representation_bytes import NUMBERS_AT_ONCE
from engine.layers.layer import TreatedLayer
from engine.linalg.eigendecomposition import kept_dtype
from engine.memory.plan import BUDGETED, Term
from engine.planning.analysis_cost import Cost, PlannedJob
from engine.planning.collection.seconds import batch_size
from engine.planning.decomposition_memory import basis_dtype

_STAGE = "natural_gradient"
_STARTS_A_LAYER = 1000
"""Starts of operations for one layer, whatever its size."""
_MATRICES = 4
"""Matrices of a layer's numbers in float64 beside the gradient and the directions, where one is computed."""


def natural_gradient_cost(params: NaturalGradientParams, job: PlannedJob) -> Cost:
    """Return the bytes and the seconds of the natural gradient."""
    trainable = job.parameter_bytes
    terms = [*job.carried(_STAGE), Term("gradient", "P", trainable, "host", _STAGE)]
    if "directions" in job.workspace.options.keep:
        kept = len(params.powers) * trainable
        terms += [
            Term("directions", "k · P", kept, "host", _STAGE),
            Term("kept directions", "k · P", kept, "disk", _STAGE),
        ]
    terms.append(Term("inputs of gradient rows", "Σ T · in", _row_inputs(job, params), "host", _STAGE))
    passing = [] if params.gradient is not None else gradient_pass_terms(job, trainable, _STAGE)
    layers = [each for layer in job.probe.layers for each in _layer_terms(layer, job, params)]
    for where in BUDGETED[::-1]:
        largest: dict[str | None, int] = {}
        for each in layers:
            if each.place == where:
                largest[each.layer] = largest.get(each.layer, 0) + each.size_bytes
        taken = sum(each.size_bytes for each in passing if each.place == where)
        chosen = passing if taken >= max(largest.values(), default=0) else layers
        terms += [each for each in chosen if each.place == where]
    return Cost(terms=tuple(each for each in terms if each.size_bytes), seconds={_STAGE: _seconds(params, job)})


def _seconds(params: NaturalGradientParams, job: PlannedJob) -> float:
    work, workspace, chosen = job.work, job.workspace, job.plan.chosen
    pace = work.pace
    kept = basis_dtype(workspace, job.stored).itemsize
    total = 0.0
    if params.gradient is None:
        total += work.examples * work.example_seconds
        batches = -(-work.examples // work.batch)
        slices = -(-batch_size(workspace) // (chosen.micro_batch or batch_size(workspace))) * batches
        # with hooks at every layer, as the collection has them
        total += slices * work.slice_seconds
    for layer in job.probe.layers:
        squares = _squares(layer, job.probe)
        # two products there, two back, and two that look at what came out; in float64 one takes twice as long
        products = 2 * 6 * len(params.powers) * 2 * layer.in_dim * layer.out_dim * (layer.in_dim + layer.out_dim)
        if params.solves:
            products += sum(4 * side**3 for side in squares) // 3
        each = products / pace.operations_per_second
        if not params.solves and workspace.ports.scratch is not None:
            each += kept * sum(side**2 for side in squares) / pace.disk_bytes_per_second
        total += layer.groups * (each + _STARTS_A_LAYER * pace.seconds_an_operation)
    return total


def _row_inputs(job: PlannedJob, params: NaturalGradientParams) -> int:
    """Return the bytes of the inputs behind gradient rows, in the precision of the passes."""
    wanted = params.gradient is None and params.of == "kfac" and params.damping != "none"
    if not wanted or job.workspace.options.collection.fisher != "empirical":
        return 0
    probe = job.probe
    kept = [(layer, probe.kept(layer)) for layer in probe.layers if layer.form == "kronecker" and layer.groups == 1]
    return probe.dtype.itemsize * sum(
        min(each.rows, layer.out_dim) * layer.in_dim for layer, each in kept if each.kind == "woodbury"
    )


def gradient_pass_terms(job: PlannedJob, trainable: int, stage: str) -> list[Term]:
    """Return the bytes of the pass that takes the data's gradient, of so many bytes of trainable numbers."""
    found = [
        replace(each, stage=stage, source="estimated")
        for each in job.plan.terms
        if each.stage == "collection" and each.name in ("activations", "gradients", "outputs") and each.layer is None
    ]
    # one of them is the gradient itself where that is on the host
    numbers = 2 * trainable if job.place == "device" else trainable
    return [*found, Term("sums of gradients", "2 · P: the sum, and what enters it", numbers, job.place, stage)]


def _layer_terms(layer: TreatedLayer, job: PlannedJob, params: NaturalGradientParams) -> list[Term]:
    workspace, probe, place = job.workspace, job.probe, job.place
    wide, powers = kept_dtype(job.stored).itemsize, len(params.powers)
    vectors = basis_dtype(workspace, job.stored).itemsize
    count, squares, each = layer.in_dim * layer.out_dim, _squares(layer, probe), probe.kept(layer)
    most = max(squares, default=0)
    beside, one = 0 if wide == 8 else 8 * most**2, 8 * count
    if params.solves:
        # looking at what came out, and the damped side with its factorisation
        phase = max((_MATRICES * one + beside, 3 * one + 2 * 8 * most**2))
        formula = "4 · in · out · 8 and n² · 8, or 3 · in · out · 8 and 2 · n² · 8, larger side"
    else:
        # eigenvectors are in float64 already, and nothing of theirs is widened
        phase = max(_MATRICES + powers, 1 + 2 * powers) * one
        formula = f"{_MATRICES + powers} or {1 + 2 * powers} · in · out · 8"
    found = [("numbers of the layer", formula, phase, place)]
    if wide < 8:
        found.append(("gradient as it came", "in · out · 4", 4 * count, place))
    if params.of == "ekfac":
        found.append(("correction", "in · out, and Σ n²", wide * (count + sum(side**2 for side in squares)), place))
    elif not params.solves and (workspace.ports.scratch is not None or place == "device"):
        found.append(("eigenvectors", "Σ n² in float64", vectors * sum(side**2 for side in squares), place))
    size = read_back_bytes(layer, probe, job.stored)
    if job.passes > 1:
        found.append(("read back", "in² + out², as kept", size, "host"))
    if place == "device":
        found.append(("factors on the device", "in² + out², as kept", size, place))
    if each.kind != "dense" and layer.form == "kronecker":
        rows = each.gram_rows(layer.out_dim)
        widened = 2 * 8 * min(rows * layer.out_dim, NUMBERS_AT_ONCE)
        size = max(64 * rows**2, 32 * rows**2 + widened) + 24 * rows * layer.in_dim
        found.append(("rows", "8 · T² · 8, or 4 · T² · 8 and rows widened, and 3 · T · in · 8", size, place))
        if not params.solves:
            found.append(("eigenvectors of rows", "T · n", vectors * rows * layer.out_dim, place))
    return [Term(name, formula, size, where, _STAGE, layer.name) for name, formula, size, where in found if size]


def _squares(layer: TreatedLayer, probe: Probe) -> list[int]:
    """Rows of the sides that are dense matrices."""
    dense_g = layer.form != "diagonal_block" and probe.kept(layer).kind == "dense"
    return [*([layer.out_dim] if dense_g else []), *([layer.in_dim] if layer.form == "kronecker" else [])]
