"""Bare tensors as the model's ``forward`` wants them: by name where it has names."""

from typing import Any

import torch
from torch import Tensor

from worker.execution.loaded_model import LoadedModel


def model_inputs(inputs: Tensor, loaded: LoadedModel) -> Any:  # noqa: ANN401 - a tensor or a dict of them
    """``inputs`` as the one argument, or under its name with what belongs to it."""
    if loaded.vocabulary is not None and loaded.vocabulary.arguments:
        named = {"input_ids": inputs}
        if inputs.ndim == 2 and loaded.vocabulary.explicit_positions:
            named["position_ids"] = row_positions(inputs)
        return named
    return {loaded.input_name: inputs} if loaded.input_name else inputs


def row_positions(ids: Tensor) -> Tensor:  # (N, T) -> (N, T)
    """0 … T-1 for every example of its own, so that gradients of the positions stay per example."""
    return torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
