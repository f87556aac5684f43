"""Collection memory: the bytes of one collection under one choice, from the shapes that a dry run showed.

On a CPU everything is held by the host. The activations are traced (``activation_memory``), what a
library decides is estimated; the rest follows from shapes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import nn

from engine.accumulation.batch_variance import NUMBERS_AT_ONCE
from engine.accumulation.example_gradients import squared_norms_numbers
from engine.collection.normalise import leaves_once
from engine.collection.probe import (
    AT_A_NORMALISATION,
    Probe,
    check_bytes,
    example_gradients,
    kept_terms,
    row_sizes,
    sides_of,
)
from engine.collection.subsamples import EIGHTHS
from engine.factors.departure import departing_bytes
from engine.layers.convolution import ConvolutionLayer
from engine.layers.layer import BlockLayer, TreatedLayer, factor_sides
from engine.memory.host_accumulation import pinned_bytes, staging_numbers
from engine.memory.plan import DEVICE_LIBRARY_BYTES, LIBRARY_BYTES, Chosen, Plan, Source, Stage, Term
from engine.model.activation_memory import Saved
from engine.planning.collection.reductions import reduction_terms
from engine.planning.model_memory import weight_terms
from engine.row_layout.layer_calls import Call
from engine.workspace import Workspace


def plan_of(
    workspace: Workspace,
    probe: Probe,
    groups: Mapping[tuple[str, ...], int],
    held_bytes: int,
    chosen: Chosen,
) -> Plan:
    """Return the plan of the collection under one choice."""
    place: Literal["device", "host"] = "device" if workspace.machine.device.type == "cuda" else "host"
    sides = [side for layer in probe.layers for side in probe.sides(layer, follows=layer.name in probe.shared)]
    largest = max((side for side, dense in sides if dense), default=0)
    examples = chosen.micro_batch or workspace.options.collection.batch_size
    scale = examples / probe.examples
    several = len(chosen.parts) > 1
    part, most = _heaviest(probe, groups, chosen, examples)
    # the last passes hold no input of the first ones' layers; bases are rotated with all of a pass's
    mine = part if several and not workspace.options.collection.ekfac else None
    saved = _saved(probe, chosen, mine)
    # logits, their softmax, its gradient and the gradient's copy in the graph
    outputs = int(4 * scale * probe.outputs * probe.dtype.itemsize)
    gradients, formula, patches = _backward_bytes(workspace, probe, chosen, mine, examples, outputs)
    sizes: list[tuple[str, str, int, Source, Stage]] = [
        ("gradients", formula, gradients, "estimated", "collection"),
        ("outputs", "4 · slice · terms · width", outputs, "estimated", "collection"),
        (
            "patches",
            "strips and windows, a normalisation's copies, or a fused attention's own",
            patches,
            "estimated",
            "collection",
        ),
        (
            "example gradients",
            "2 · slice · bare, or 3 · some examples' and what their operations hold",
            example_gradients(probe.layers, examples) * probe.dtype.itemsize,
            "estimated",
            "collection",
        ),
    ]
    sizes += row_sizes(probe, on_device=place == "device")
    if several:
        # when it is made, the pass is over, and with it the activations
        packed = max(0, largest * largest * probe.dtype.itemsize // 2 - (0 if saved is None else saved.of(examples)))
        sizes.append(("packed factor", "n² / 2, beyond the activations", packed, "exact", "collection"))
    if workspace.options.collection.nested:
        # a follower's copy comes with a copy of the A that it shares
        own = max(
            (
                each.groups * sum(side * side if dense else side for side, dense in sides_of(each, follows=False))
                for each in probe.layers
            ),
            default=0,
        )
        copied = own * probe.dtype.itemsize + largest * largest * probe.dtype.itemsize // 2
        sizes.append(("nested copy", "in² + out² + n² / 2, largest layer", copied, "exact", "collection"))
        sizes.append(
            (
                "nested layer",
                "3 · n², read back",
                3 * largest * largest * probe.dtype.itemsize,
                "exact",
                "decomposition",
            )
        )
    if workspace.options.collection.batch_variance:
        # the sums set aside are among the accumulators
        sizes.append(("batch variance", "3 · 2¹⁸ · 8, parts of a sum", 3 * NUMBERS_AT_ONCE * 8, "exact", "collection"))
    if saved is not None:
        sizes.append(("activations", "a + b · slice, as autograd saves", saved.of(examples), "traced", "collection"))
    else:
        held = sum(call.entered.numel() + call.output.numel() for call in probe.calls)
        passing = int(scale * held * probe.dtype.itemsize)
        sizes.append(("activations", "slice · (inputs + outputs)", passing, "estimated", "collection"))
    slice_bytes = sum(size for _, _, size, _, stage in sizes if stage == "collection")
    beyond = check_bytes(
        workspace,
        probe,
        saved=probe.recomputed if chosen.activation_checkpointing else probe.saved,
        passing=slice_bytes,
        sums=0 if chosen.offload else most,
    )
    sizes.append(("self-check", "rows of 4 or 2 examples, beyond a slice", beyond, "estimated", "collection"))
    sums: Literal["device", "host"] = "host" if chosen.offload else place
    formula = "Σ in² + Σ out², or T · out" + (", sums twice" if workspace.options.collection.batch_variance else "")
    terms = [
        Term("accumulators", formula, most, sums, "collection"),
        *(Term(name, formula, size, place, stage, source=source) for name, formula, size, source, stage in sizes),
    ]
    if workspace.options.collection.nested and workspace.ports.scratch is None:
        triangles = probe.dtype.itemsize * sum(
            each.groups * (side * (side + 1) // 2 if dense else side)
            for each in probe.layers
            for side, dense in sides_of(each, follows=each.name in probe.shared)
        )
        terms.append(Term("nested sizes", f"{len(EIGHTHS)} · Σ triangles", len(EIGHTHS) * triangles, "host"))
    # when ranks add up, the pass is over, and with it all of a slice
    terms += reduction_terms(workspace, probe, sums, slice_bytes)
    terms += [
        *kept_terms(workspace, probe, offload=chosen.offload, several=several),
        *leaving_terms(workspace, place, largest, probe, 0 if chosen.offload or several else most),
    ]
    if chosen.offload:
        numbers = staging_numbers(
            side for layer in probe.layers for side in factor_sides(layer, follows=layer.name in probe.shared)
        )
        terms += _staging_terms(place, numbers * probe.dtype.itemsize)
    if probe.repeated:
        held_back = sum(_arriving(call) for call in probe.calls) * examples // probe.examples
        formula = "slice · Σ outputs, until all of a direction are finite"
        terms.append(Term("gradients that wait", formula, held_back, place, "collection", source="estimated"))
    terms += [
        *_library_terms(place),
        Term("process", "resident now", held_bytes, "host", source="measured"),
        *weight_terms(workspace, place),
    ]
    return Plan(terms=tuple(terms), chosen=chosen)


def _staging_terms(place: Literal["device", "host"], panel_bytes: int) -> list[Term]:
    """Two panels where the job computes, and two on the host, which are pinned for a GPU."""
    pinned = "2 panels, each to a power of two, pinned", 2 * pinned_bytes(panel_bytes)
    return [
        Term("staging", "2 panels", 2 * panel_bytes, place, "collection"),
        Term("staging", *(("2 panels", 2 * panel_bytes) if place == "host" else pinned), "host", "collection"),
    ]


def _library_terms(place: Literal["device", "host"]) -> list[Term]:
    """What libraries take for themselves, on the host and where the job computes."""
    found = [Term("libraries", "a constant, measured", LIBRARY_BYTES, "host", source="estimated")]
    if place == "device":
        formula = "2 workspaces of cuBLAS · 32 MiB, and 17 MiB, measured"
        found.append(Term("libraries", formula, DEVICE_LIBRARY_BYTES, place, source="estimated"))
    return found


def leaving_terms(
    workspace: Workspace, place: Literal["device", "host"], largest: int, probe: Probe, waiting: int
) -> list[Term]:
    """Return the terms of factors, ``waiting`` bytes in all, that stay on the device until they are written."""
    if place == "host" or not waiting or not leaves_once(workspace):
        return []
    gathered, pinned = departing_bytes(largest * largest, probe.dtype.itemsize)
    return [
        Term("factors that wait", "accumulators, until they are written", waiting, place, "decomposition"),
        Term("panels", "of each thread what it gathers", gathered, place, "decomposition"),
        Term("panels", "4 of each thread, pinned", pinned, "host", "decomposition"),
    ]


def _heaviest(
    probe: Probe,
    groups: Mapping[tuple[str, ...], int],
    chosen: Chosen,
    examples: int,
) -> tuple[frozenset[nn.Module] | None, int]:
    """The modules of the pass that holds most, of sums and inputs together, and the bytes of its sums.

    None where no pass has a layer: what is held then is what any may.
    """
    saved = probe.recomputed if chosen.activation_checkpointing else probe.saved
    passes = {name: place for place, part in enumerate(chosen.parts) for name in part}
    sums, inputs = [0] * len(chosen.parts), [0] * len(chosen.parts)
    for names, size in groups.items():
        if names[0] in passes:
            sums[passes[names[0]]] += size
    modules: list[set[nn.Module]] = [set() for _ in chosen.parts]
    for layer in probe.layers:
        if layer.name in passes:
            place = passes[layer.name]
            modules[place].update(role.module for role in layer.roles)
    if saved is not None:
        inputs = [sum(own.of(examples) for each in mine if (own := saved.inputs.get(each))) for mine in modules]
    heaviest = max(range(len(sums)), key=lambda place: sums[place] + inputs[place])
    return frozenset(modules[heaviest]) if passes else None, sums[heaviest]


def _backward_bytes(
    workspace: Workspace,
    probe: Probe,
    chosen: Chosen,
    modules: frozenset[nn.Module] | None,
    examples: int,
    outputs: int,
) -> tuple[int, str, int]:
    """Bytes of the gradients of a layer, with the formula, and of what its moments are made of."""
    saved = _saved(probe, chosen, modules)
    met, normalised = (
        None if chosen.activation_checkpointing else _within(each, modules)
        for each in (probe.met, probe.met_normalised)
    )
    # a linear layer takes nothing but what is held where its gradients arrive
    scratched = [call for call in probe.calls if met is None or isinstance(call.layer, ConvolutionLayer)]
    patches = probe.dtype.itemsize * max(
        (_scratch(call, probe.examples, examples, workspace) for call in scratched), default=0
    )
    if workspace.options.collection.exact_trace:
        patches = max(patches, probe.dtype.itemsize * _joined(probe, examples))
    if probe.attention is not None:
        # at the moment when most is held, as far as is known
        patches = max(patches, probe.attention.of(examples))
    if saved is None or met is None or normalised is None:
        widest = max((call.entered.numel() + call.output.numel() for call in probe.calls), default=0)
        gradients = int(2 * examples / probe.examples * widest * probe.dtype.itemsize)
        return gradients, "2 · slice · (input + output), widest layer", patches
    # outputs are held at the end of the forward pass alone, and what is saved is let go of on the way back
    held = saved.of(examples) + outputs
    gradients = max(0, met.of(examples) - held)
    # a normalisation's time is another one
    patches = max(patches, normalised.of(examples) - held - gradients)
    return gradients, "beyond activations and outputs: saved up to a layer + slice · (input + output)", patches


def _joined(probe: Probe, examples: int) -> int:
    """Numbers of the rows that the exact trace joins, of some examples, where a linear layer is called often."""
    several = Counter(call.layer for call in probe.calls if call.layer.form == "kronecker")
    most = 0
    for layer, calls in several.items():
        if calls > 1 and not isinstance(layer, (ConvolutionLayer, BlockLayer)):
            numbers = sum(call.output.numel() for call in probe.calls if call.layer is layer)
            positions = numbers // (layer.fan_out * probe.examples)
            most = max(most, squared_norms_numbers(layer, examples, positions))
    return most


def _saved(probe: Probe, chosen: Chosen, modules: frozenset[nn.Module] | None) -> Saved | None:
    """Return what autograd saves of a pass, of the inputs those of ``modules``; None where nothing is pulled back."""
    return _within(probe.recomputed if chosen.activation_checkpointing else probe.saved, modules)


def _within(saved: Saved | None, modules: frozenset[nn.Module] | None) -> Saved | None:
    return saved if saved is None or modules is None else saved.within(modules)


def corrected_plan(
    plan: Plan,
    groups: Mapping[tuple[str, ...], int],
    treated: Sequence[TreatedLayer],
    place: Literal["device", "host"],
    parts: tuple[tuple[str, ...], ...],
) -> Plan:
    """Add the passes that re-estimate the eigenvalues (EK-FAC)."""
    largest = max((side for layer in treated for side, dense in sides_of(layer, follows=False) if dense), default=0)
    most = max(sum(size for names, size in groups.items() if set(names) & set(part)) for part in parts)
    # the data passes through as it did before
    again = [
        replace(term, stage="correction")
        for term in plan.terms
        if term.name in ("activations", "gradients", "outputs", "patches", "factors") and term.stage != "throughout"
    ]
    own = [
        Term("bases", "Σ in² + out² + in · out", most, place, "correction"),
        Term("eigenvectors", "4 · n² · 8, largest factor", 4 * largest * largest * 8, place, "correction"),
    ]
    if len(parts) > 1:
        own.append(Term("one correction", "in² + out² + in · out", max(groups.values()), "host", "decomposition"))
    else:
        own.append(Term("corrections", "Σ in² + out² + in · out", most, "host", "decomposition"))
        if place == "device":
            own.append(Term("corrections", "Σ in² + out² + in · out", most, "host", "correction"))
    return replace(plan, terms=(*plan.terms, *again, *own), chosen=replace(plan.chosen, corrections=parts))


def correction_bytes(layer: TreatedLayer, item: int, *, follows: bool) -> int:
    """Return the bytes of the bases and the corrected eigenvalues of one layer."""
    if layer.form == "diagonal_block":
        # its diagonal is the correction, and no basis goes with it
        return layer.out_dim * item
    own_basis = layer.form == "kronecker" and not follows
    each = layer.out_dim**2 + layer.out_dim * layer.in_dim + (layer.in_dim**2 if own_basis else 0)
    return each * layer.groups * item


def _arriving(call: Call) -> int:
    """Bytes of the gradient of one call's output under float16's autocast, which computes products in 16 bits."""
    products = call.layer.form in ("kronecker", "block") and not isinstance(call.layer, BlockLayer)
    return call.output.numel() * (2 if products else 4)


def _scratch(call: Call, seen: int, examples: int, workspace: Workspace) -> int:
    """Numbers that the moments of one call take besides their sums, for ``examples`` instead of ``seen``."""
    layer, entered, output = call.layer, call.entered, call.output
    if isinstance(layer, BlockLayer):
        return AT_A_NORMALISATION * output.numel() * examples // seen
    if layer.form != "kronecker" or 0 in (entered.numel(), output.numel()):
        return 0
    # the gradient's moments may take a copy of it
    gradient = output.numel() * examples // seen
    if not isinstance(layer, ConvolutionLayer):
        # where positions are padding, those that count are copied out
        return max(gradient // layer.fan_out * layer.fan_in, gradient)
    if not layer.batch_first(entered, seen):
        return 0  # it will be declared
    layer = layer.of_call(entered, output)
    scratch = max(layer.geometry((examples, *entered.shape[1:])).scratch(workspace.machine.device), gradient)
    if not workspace.options.collection.exact_trace:
        return scratch
    # the exact trace writes the windows of a few examples
    positions = output.numel() // (layer.groups * layer.fan_out * seen)
    return max(scratch, squared_norms_numbers(layer, examples, positions))
