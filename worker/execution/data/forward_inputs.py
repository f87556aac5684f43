"""Bare tensors as the model's ``forward`` wants them: by name where it has names."""

from typing import Any

import torch
from torch import Tensor

from worker.execution.loaded_model import LoadedModel


def model_inputs(inputs: Tensor, loaded: LoadedModel) -> Any:  # noqa: ANN401 - a tensor or a dict of them
    """Return the inputs as the model's forward takes them.

    Args:
        inputs: Inputs or token ids, shape (N, …).
        loaded: The model that they are for.

    Returns:
        The tensor itself; or a dict with it under its name and what belongs to it.
    """
    if loaded.vocabulary is not None and loaded.vocabulary.arguments:
        named = {"input_ids": inputs}
        if inputs.ndim == 2 and loaded.vocabulary.explicit_positions:
            named["position_ids"] = row_positions(inputs)
        return named
    return {loaded.input_name: inputs} if loaded.input_name else inputs


def row_positions(ids: Tensor) -> Tensor:  # (N, T) -> (N, T)
    """Return position ids of every example of its own, so that gradients of positions stay per example.

    Args:
        ids: Token ids, shape (N, T), int64.

    Returns:
        0 … T-1 in each row, shape (N, T), int64.
    """
    return torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
