"""The natural gradient's bytes and seconds: a pass that takes the gradient, then one layer's directions at a time.

The pass holds the graph of a slice and two numbers for every parameter; the layers hold their eigenvectors and some
matrices of their own numbers in float64. The stage holds the larger of the two, in each place.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from catalog.analyses.natural_gradient import NaturalGradientParams
from engine.collection.probe import Probe
from engine.factors.representation_bytes import NUMBERS_AT_ONCE
from engine.layers.layer import TreatedLayer
from engine.linalg.eigendecomposition import kept_dtype
from engine.memory.plan import Plan, Source, Term
from engine.planning.collection.seconds import Work
from engine.planning.decomposition_memory import basis_dtype, kept_as, read_back_bytes
from engine.planning.plan_search import batch_size
from engine.workspace import Workspace

Where = Literal["device", "host"]
_STAGE: Literal["natural_gradient"] = "natural_gradient"
_OF_A_LAYER = 0.005
"""Seconds of one layer, whatever its size."""
_OF_A_GRADIENT = 3
"""Times the operations of a forward pass: forward, and back to inputs and to weights."""
_MATRICES = 4
"""Matrices of a layer's numbers in float64 beside the gradient and the directions, where one is computed."""


def params_of(workspace: Workspace) -> NaturalGradientParams:
    """Return the job's options of this analysis."""
    found: NaturalGradientParams = workspace.options.of(_STAGE) or NaturalGradientParams()
    return found


def with_natural_gradient(plan: Plan, workspace: Workspace, probe: Probe, carried: Sequence[Term]) -> Plan:
    """Add the bytes of the natural gradient."""
    params, cuda = params_of(workspace), workspace.machine.device.type == "cuda"
    place: Where = "device" if cuda else "host"
    item, several = probe.dtype.itemsize, len(plan.chosen.parts) > 1
    trainable = _trainable_bytes(workspace, item)
    terms = [*carried, _term("gradient", "P", trainable, "host")]
    if "directions" in workspace.options.keep:
        kept = len(params.powers) * trainable
        terms += [_term("directions", "k · P", kept, "host"), _term("kept directions", "k · P", kept, "disk")]
    terms.append(_term("inputs of gradient rows", "Σ T · in", _row_inputs(workspace, probe, params), "host"))
    passing = _pass_terms(plan, workspace, trainable, place)
    layers = [term for layer in probe.layers for term in _layer_terms(layer, workspace, probe, params, several=several)]
    for where in ("host", "device"):
        largest: dict[str | None, int] = {}
        for term in layers:
            if term.place == where:
                largest[term.layer] = largest.get(term.layer, 0) + term.size_bytes
        taken = sum(term.size_bytes for term in passing if term.place == where)
        chosen = passing if taken >= max(largest.values(), default=0) else layers
        terms += [term for term in chosen if term.place == where]
    return replace(plan, terms=(*plan.terms, *(term for term in terms if term.size_bytes)))


def natural_gradient_seconds(plan: Plan, workspace: Workspace, probe: Probe, work: Work) -> float:
    """Return the seconds of the natural gradient."""
    params, pace = params_of(workspace), work.pace
    kept = basis_dtype(workspace, kept_as(workspace, probe.dtype)).itemsize
    total = 0.0
    if params.gradient is None:
        forward = work.passing / 2 / max(1, (1 + work.directions) / 2)
        total += _OF_A_GRADIENT * work.examples * forward / pace.operations_per_second
        batches = -(-work.examples // work.batch)
        slices = -(-batch_size(workspace) // (plan.chosen.micro_batch or batch_size(workspace))) * batches
        total += 3 * slices * work.calls * pace.seconds_an_operation
    for layer in probe.layers:
        squares = _squares(layer, probe)
        # two products there, two back, and two that look at what came out; in float64 one takes twice as long
        products = 2 * 6 * len(params.powers) * 2 * layer.in_dim * layer.out_dim * (layer.in_dim + layer.out_dim)
        if params.solves:
            products += sum(4 * side**3 for side in squares) // 3
        each = products / pace.operations_per_second
        if not params.solves and workspace.ports.scratch is not None:
            each += kept * sum(side**2 for side in squares) / pace.disk_bytes_per_second
        total += layer.groups * (each + _OF_A_LAYER)
    return total


def _trainable_bytes(workspace: Workspace, item: int) -> int:
    """Return the bytes of every trainable number once, covered or not."""
    model = workspace.inputs.model
    return 0 if model is None else item * sum(parameter.numel() for parameter in model.parameters())


def _row_inputs(workspace: Workspace, probe: Probe, params: NaturalGradientParams) -> int:
    """Return the bytes of the inputs behind gradient rows, in the precision of the passes."""
    wanted = params.gradient is None and params.of == "kfac" and params.damping != "none"
    if not wanted or workspace.options.collection.fisher != "empirical":
        return 0
    kept = [(layer, probe.kept(layer)) for layer in probe.layers if layer.form == "kronecker" and layer.groups == 1]
    return probe.dtype.itemsize * sum(
        min(each.rows, layer.out_dim) * layer.in_dim for layer, each in kept if each.kind == "woodbury"
    )


def _pass_terms(plan: Plan, workspace: Workspace, trainable: int, place: Where) -> list[Term]:
    if params_of(workspace).gradient is not None:
        return []
    found = [
        replace(term, stage=_STAGE, source="estimated")
        for term in plan.terms
        if term.stage == "collection" and term.name in ("activations", "gradients", "outputs") and term.layer is None
    ]
    # one of them is the gradient itself where that is on the host
    numbers = 2 * trainable if place == "device" else trainable
    return [*found, _term("sums of gradients", "2 · P: the sum, and what enters it", numbers, place)]


def _layer_terms(
    layer: TreatedLayer, workspace: Workspace, probe: Probe, params: NaturalGradientParams, *, several: bool
) -> list[Term]:
    device, kept = workspace.machine.device, kept_as(workspace, probe.dtype)
    place: Where = "device" if device.type == "cuda" else "host"
    wide, powers = kept_dtype(kept).itemsize, len(params.powers)
    vectors = basis_dtype(workspace, kept).itemsize
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
    size = read_back_bytes(layer, probe, kept)
    if several:
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
    return [_term(name, formula, size, where, layer.name) for name, formula, size, where in found if size]


def _squares(layer: TreatedLayer, probe: Probe) -> list[int]:
    """Rows of the sides that are dense matrices."""
    dense_g = layer.form != "diagonal_block" and probe.kept(layer).kind == "dense"
    return [*([layer.out_dim] if dense_g else []), *([layer.in_dim] if layer.form == "kronecker" else [])]


def _term(
    name: str,
    formula: str,
    size: int,
    place: Literal["device", "host", "disk"],
    layer: str | None = None,
    source: Source = "exact",
) -> Term:
    return Term(name=name, formula=formula, size_bytes=size, place=place, source=source, stage=_STAGE, layer=layer)
