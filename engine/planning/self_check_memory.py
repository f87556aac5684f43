"""Self-check memory: the bytes of a self-check, from the shapes that a dry run showed.

The rows of ``k`` examples are the inputs of the treated layers, which autograd holds anyway, and the gradients
of their outputs. The first check comes before the sums are there, later ones stand beside them; the passes
themselves hold the slice that they work on at neither time. So only what exceeds these is planned beside them.
"""

from engine.collection.probe import Probe
from engine.gradient_identity.schedule import FIRST_EXAMPLES, LATER_EXAMPLES
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
    """Return the bytes that a check takes beyond what the passes hold when none is made.

    Args:
        workspace: The job's options.
        probe: The layers, and the sizes of their calls.
        saved: What autograd saves; None where nothing is pulled back.
        passing: What a slice of a batch holds on its way there and back, in bytes.
        sums: What the sums hold, in bytes.
    """
    collection = workspace.options.collection
    if collection.self_check == "off":
        return 0
    first = min(FIRST_EXAMPLES, collection.batch_size)
    # the first one runs its batch twice, a later one runs it once, and one example alone
    excess = _held(probe, saved, first, 2 * first) - passing - sums
    if collection.self_check == "growing":
        later = min(LATER_EXAMPLES, collection.batch_size)
        excess = max(excess, _held(probe, saved, later, later + 1) - passing)
    return max(0, excess)


def _held(probe: Probe, saved: Saved | None, examples: int, recorded: int) -> int:
    """Return the bytes of what a check holds at once.

    Args:
        probe: The layers, and the sizes of their calls.
        saved: What autograd saves; None where nothing is pulled back.
        examples: Examples that go through the model together.
        recorded: Examples of which gradients of bare parameters are kept, over all of the check's runs.

    Returns:
        Bytes of the rows of the examples, their passes, the gradients of bare parameters by example, and the gradient
        of the largest weight, twice.
    """
    inputs = sum(call.entered.numel() for call in probe.calls)
    gradients = sum(call.output.numel() for call in probe.calls)
    through = inputs * probe.dtype.itemsize * examples // probe.examples if saved is None else saved.of(examples)
    each = (gradients + 4 * probe.outputs) * examples // probe.examples
    weight = max((layer.groups * layer.fan_in * layer.fan_out for layer in probe.layers if layer.weight), default=0)
    return through + (each + 2 * weight + example_gradients(probe.layers, examples, recorded)) * probe.dtype.itemsize
