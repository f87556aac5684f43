"""Forecast: the memory plan of one collection, from the shapes that a dry run showed.

On a CPU everything is held by the host. The activations are an estimate (twice the inputs and
outputs of the treated layers, which autograd and the model's other operations keep); the rest
follows from shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from engine.curvature.hooks import Call
from engine.curvature.layers.layer import TreatedLayer
from engine.memory.budget import resident_bytes
from engine.memory.plan import Plan, Term
from engine.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a forward pass of very few examples has shown."""

    calls: list[Call]
    """Every call of a treated layer, with its tensors."""
    examples: int
    outputs: int
    """Numbers in the model's outputs."""


def forecast(
    workspace: Workspace, dtype: torch.dtype, treated: Sequence[TreatedLayer], seen: DryRun, shared: dict[str, str]
) -> Plan:
    """The plan for collecting ``treated``, of which a dry run has shown the sizes."""
    place: Literal["device", "host"] = "device" if workspace.device.type == "cuda" else "host"
    item = torch.empty((), dtype=dtype).element_size()
    sides = [side for layer in treated for side in _sides(layer, follows=layer.name in shared)]
    accumulators = sum(side * side if dense else side for side, dense in sides)
    largest = max((side for side, dense in sides if dense), default=0)
    batch = min(workspace.collection.batch_size, workspace.examples or workspace.collection.batch_size)
    scale = batch / seen.examples
    held = sum(call.entered.numel() + call.output.numel() for call in seen.calls)
    patches = max((_patches(call) for call in seen.calls), default=0)
    sizes: tuple[tuple[str, str, int, Literal["exact", "estimated"]], ...] = (
        ("accumulators", "Σ in² + Σ out²", accumulators * item, "exact"),
        ("activations", "2 · batch · (inputs + outputs)", int(2 * scale * held * item), "estimated"),
        # logits, their softmax, its gradient and the gradient's copy in the graph
        ("outputs", "4 · batch · terms · width", int(4 * scale * seen.outputs * item), "estimated"),
        ("patches", "batch · positions · in", int(scale * patches * item), "estimated"),
        ("eigenvalues", "3 · n² · 8, largest factor", 3 * largest * largest * 8, "estimated"),
    )
    terms = [
        Term(
            name=name,
            formula=formula,
            size_bytes=size,
            place=place,
            source="exact" if source == "exact" else "estimated",
        )
        for name, formula, size, source in sizes
    ]
    terms.append(
        Term(name="process", formula="resident now", size_bytes=resident_bytes(), place="host", source="measured")
    )
    if place == "device" and workspace.model is not None:
        tensors = (*workspace.model.parameters(), *workspace.model.buffers())
        weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        terms.append(Term(name="weights", formula="Σ bytes", size_bytes=weights, place=place, source="exact"))
    return Plan(terms=tuple(terms))


def _patches(call: Call) -> int:
    """Numbers in the rows of ``a`` that one call makes."""
    if call.layer.form != "kronecker":
        return 0
    return call.output.numel() // max(call.layer.fan_out, 1) * call.layer.fan_in


def _sides(layer: TreatedLayer, *, follows: bool) -> list[tuple[int, bool]]:
    """Rows of each factor the layer holds itself, and whether it is dense."""
    sides = [(layer.out_dim, True)]
    if not follows and layer.form != "block":
        sides.append((layer.in_dim, layer.form == "kronecker"))
    return sides
