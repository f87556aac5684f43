"""The backward pass: one direction pulled back through a model's graph."""

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from engine.errors import EngineError, ModelRefused, Unwinding
from engine.memory.exhaustion import lost_device, ran_out_of_memory


def pull_back(end: GradientEdge, direction: Tensor, *, retain_graph: bool = False) -> None:
    """Pull ``direction`` back from ``end``, to whatever hooks wait for its gradients.

    Args:
        end: Where the graph ends.
        direction: A vector of the shape of the outputs.
        retain_graph: Keep the graph for another direction.

    Raises:
        ModelRefused: If the model's backward pass raises; the message quotes it.
    """
    try:
        torch.autograd.backward(end, direction, retain_graph=retain_graph)
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
