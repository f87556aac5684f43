"""Self-check memory: the bytes of a self-check, from the shapes that a dry run showed.

The rows of a few examples are copies of the inputs of the treated layers and of the gradients of their outputs. They
stand beside the slice that a pass works on, and afterwards beside one example alone. The first check comes before the
sums are there, later ones stand beside them, and so do the moments that the first batch's sums are held against. Only
what exceeds all this is planned.
"""

import torch

from engine.collection.probe import Probe
from engine.gradient_identity.row_moments import NUMBERS_AT_ONCE
from engine.gradient_identity.schedule import FIRST_EXAMPLES
from engine.layers.elementwise import BareLayer
from engine.model.activation_memory import Saved
from engine.planning.layer_memory import example_gradients
from engine.workspace import Workspace


def check_bytes(
    workspace: Workspace,
    probe: Probe,
    *,
    saved: Saved | None,
    passing: int,
    sums: int,
) -> int:
    """Return the bytes that a check takes beyond what the passes hold when none is made."""
    collection = workspace.options.collection
    if collection.self_check == "off":
        return 0
    kept, own = _rows(probe, min(FIRST_EXAMPLES, collection.batch_size)), _rows(probe, 1)
    # rows that are kept of a batch stand beside what it holds on its way, and beside one example alone afterwards
    first = max(kept - sums, _held(probe, saved) + kept - passing - sums)
    later = own + max(_moments(probe, collection.batch_size), _held(probe, saved) - passing)
    return max(0, first, later)


def _rows(probe: Probe, examples: int) -> int:
    """Return the bytes of the rows of some examples, with their gradients of bare parameters."""
    numbers = sum(call.entered.numel() + call.output.numel() for call in probe.calls) + 2 * probe.outputs
    bare = sum(layer.out_dim for layer in probe.layers if isinstance(layer, BareLayer))
    return examples * (numbers // probe.examples + bare) * probe.dtype.itemsize


def _moments(probe: Probe, examples: int) -> int:
    """Return the bytes of example gradients in float64, of their squares, and of the vector they are multiplied by.

    Other rows are taken in as the pass gives back what it holds of them.
    """
    most = max((examples * layer.out_dim for layer in probe.layers if isinstance(layer, BareLayer)), default=0)
    return 3 * torch.float64.itemsize * min(NUMBERS_AT_ONCE, most)


def _held(probe: Probe, saved: Saved | None) -> int:
    """Return the bytes that one example alone holds: its pass, its rows, and a gradient of the largest weight twice."""
    inputs = sum(call.entered.numel() for call in probe.calls)
    through = inputs * probe.dtype.itemsize // probe.examples if saved is None else saved.of(1)
    weight = max((layer.groups * layer.fan_in * layer.fan_out for layer in probe.layers if layer.weight), default=0)
    work = example_gradients(probe.layers, 1) + 2 * weight
    return through + _rows(probe, 1) + work * probe.dtype.itemsize
