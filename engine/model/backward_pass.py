"""The backward pass: one direction pulled back through a model's graph."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from engine.errors import EngineError, ModelRefused, Unwinding
from engine.memory.out_of_memory import lost_device, ran_out_of_memory


def pull_back(
    end: GradientEdge,
    direction: Tensor,
    *,
    retain_graph: bool = False,
    within: contextlib.AbstractContextManager[object] | None = None,
) -> None:
    """Pull ``direction`` back from ``end``, to whatever hooks wait for its gradients.

    Args:
        end: Where the graph ends.
        direction: A vector of the shape of the outputs.
        retain_graph: Keep the graph for another direction.
        within: What the forward pass ran in, for parts of it that activation checkpointing runs again.

    Raises:
        ModelRefused: If the model's backward pass raises; the message quotes it.
    """
    try:
        with within or contextlib.nullcontext():
            run_backward(end, direction, retain_graph=retain_graph)
    except (EngineError, Unwinding):
        raise
    except Exception as error:
        if ran_out_of_memory(error) or lost_device(error):
            raise
        raise ModelRefused(
            f"the model raised in its backward pass: {type(error).__name__}: {str(error)[:500]}; "
            "a model that can be trained can be measured: mend it, or take `fisher: forward_only`",
            pointer="/model",
        ) from error


def run_backward(end: GradientEdge, direction: Tensor, *, retain_graph: bool = False) -> None:
    """Run autograd's engine, as ``torch.autograd.backward`` does.

    Given a direction, that function compares shapes by way of sympy, which it loads: half a second of every process and
    30 MB.

    Args:
        end: Where the graph ends.
        direction: A vector of the shape of the outputs.
        retain_graph: Keep the graph for another direction.

    Raises:
        RuntimeError: If the direction has another shape than the outputs.
    """
    shape = torch.Size(end.node._input_metadata[end.output_nr].shape)  # noqa: SLF001 - its only name
    if shape != direction.shape:
        raise RuntimeError(f"the direction must have the outputs' shape {tuple(shape)} (got {tuple(direction.shape)})")
    _engine_run_backward((end,), (direction,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)


@contextlib.contextmanager
def drain_backward_queue(device: torch.device) -> Iterator[None]:
    """Leave nothing of a backward pass that fails inside in autograd's queue, which would hold its graph.

    What is queued goes by the age of its operation, the youngest first. An operation that is older than all of the pass
    is therefore reached last, once everything that was left has been thrown away.

    Args:
        device: Device whose queue is drained: the one that the pass runs on.

    Returns:
        A context manager to enter before the forward pass, since the older operation is made on entry.
    """
    with torch.enable_grad():
        oldest = torch.zeros((), device=device, requires_grad=True) * 1
    try:
        yield
    except Exception:
        torch.autograd.backward(oldest)
        raise
