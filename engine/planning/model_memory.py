"""Model memory: the bytes of a model's weights while it is measured, its own and those converted beside them.

A model that is not kept in the precision it is measured in is converted, and what it was stands beside
that until the measurement ends: it is given back as it was. Of a sharded model a rank has its part, and the units that
are gathered at once, in the precision that they are measured in.
"""

from typing import Literal

import torch
from torch import nn

from engine.distributed.sharded_tensors import is_sharded, local_bytes
from engine.memory.plan import Term
from engine.model.sharding.gathered_parameters import gathered_bytes
from engine.workspace import Workspace


class ModelWeight:
    """The answer of ``weigh_model`` for one job, once it is known."""

    def __init__(self) -> None:
        self.found: tuple[int, int, bool, int] | None = None


def weigh_model(workspace: Workspace) -> tuple[int, int, bool, int]:
    """Return the bytes of the model's weights; the first answer is kept.

    While the model is measured its tensors are the converted ones, which later calls must not count. The bytes are
    those of the model's own tensors on this rank and of those converted, then whether they are on the meta device, and
    the most bytes that are gathered of a sharded model at once.
    """
    # a search weighs a thousand plans of one model
    weight = workspace.results.of(ModelWeight)
    if weight.found is None and workspace.inputs.model is not None:
        dtype = torch.float64 if workspace.options.collection.dtype == "float64" else torch.float32
        every = (*workspace.inputs.model.parameters(), *workspace.inputs.model.buffers())
        tensors = [tensor for tensor in every if not nn.parameter.is_lazy(tensor)]
        own = sum(local_bytes(tensor) for tensor in tensors)
        others = [
            tensor.numel()
            for tensor in tensors
            if tensor.is_floating_point() and tensor.dtype != dtype and not is_sharded(tensor)
        ]
        gathered = gathered_bytes(workspace.inputs.model, dtype.itemsize)
        weight.found = own, sum(others) * dtype.itemsize, any(tensor.is_meta for tensor in tensors), gathered
    return weight.found or (0, 0, False, 0)


def weight_terms(workspace: Workspace, place: Literal["device", "host"]) -> list[Term]:
    """Return the terms of the weights that the resident bytes of the process do not contain."""
    if workspace.inputs.model is None:
        return []
    size, converted, absent, gathered = weigh_model(workspace)
    found = []
    if place == "device" or absent:
        found.append(Term("weights", "Σ bytes", size, place))
    if converted and (place == "device" or absent):
        formula = "Σ numbers · item, of another precision than they are measured in"
        found.append(Term("converted weights", formula, converted, place))
    if gathered:
        formula = "two largest units, and a parameter twice on its way"
        found.append(Term("gathered weights", formula, gathered, place, source="estimated"))
    if place == "device" and absent:
        # they come from the files by way of the host
        found.append(Term("weights", "Σ bytes", size, "host", "model"))
    return found
