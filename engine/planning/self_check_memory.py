"""Check bytes: what a self-check holds, from the shapes that a dry run showed.

The rows of ``k`` examples are the inputs of the treated layers, which autograd holds anyway, and the gradients
of their outputs. The first check comes before the sums are there, later ones stand beside them; the passes
themselves hold the slice that they work on at neither time. So only what exceeds these is planned beside them.
"""

from collections.abc import Sequence

from engine.gradient_identity.schedule import FIRST_EXAMPLES, LATER_EXAMPLES
from engine.layers.layer import TreatedLayer
from engine.model.activation_memory import Saved
from engine.planning.layer_memory import DryRun
from engine.workspace import Workspace


def check_bytes(
    workspace: Workspace,
    treated: Sequence[TreatedLayer],
    seen: DryRun,
    item: int,
    *,
    saved: Saved | None,
    passing: int,
    sums: int,
) -> int:
    """Bytes that a check takes beyond what the passes hold when none is made.

    Args:
        workspace: The job's options.
        treated: All layers.
        seen: What the dry run showed.
        item: Bytes of a number.
        saved: What autograd saves; None where nothing is pulled back.
        passing: What a slice of a batch holds on its way there and back, in bytes.
        sums: What the sums hold, in bytes.
    """
    collection = workspace.options.collection
    if collection.self_check == "off":
        return 0
    first = min(FIRST_EXAMPLES, collection.batch_size)
    excess = _held(treated, seen, saved, item, first) - passing - sums
    if collection.self_check == "growing":
        excess = max(excess, _held(treated, seen, saved, item, min(LATER_EXAMPLES, collection.batch_size)) - passing)
    return max(0, excess)


def _held(treated: Sequence[TreatedLayer], seen: DryRun, saved: Saved | None, item: int, examples: int) -> int:
    """Bytes of the rows of ``examples`` examples, their passes, and the gradient of the largest weight, twice."""
    inputs = sum(call.entered.numel() for call in seen.calls)
    gradients = sum(call.output.numel() for call in seen.calls)
    through = inputs * item * examples // seen.examples if saved is None else saved.of(examples)
    each = (gradients + 4 * seen.outputs) * examples // seen.examples
    weight = max((layer.groups * layer.fan_in * layer.fan_out for layer in treated if layer.weight), default=0)
    return through + (each + 2 * weight) * item
