"""Inputs of the model's ``forward``: bare tensors, by name where it has names."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from worker.execution.loaded_model import LoadedModel
from worker.execution.refusal import Refusal, names


def model_inputs(inputs: Tensor, loaded: LoadedModel) -> Any:  # noqa: ANN401 - a tensor or a dict of them
    """Return inputs or token ids, shape (N, …), as the model's forward takes them.

    The tensor itself; or a dict with it under its name and what belongs to it.
    """
    if loaded.vocabulary is not None and loaded.vocabulary.arguments:
        named = {"input_ids": inputs}
        if inputs.ndim == 2 and loaded.vocabulary.explicit_positions:
            named["position_ids"] = row_positions(inputs)
        return named
    return {loaded.input_name: inputs} if loaded.input_name else inputs


def require_arguments(there: Sequence[str], loaded: LoadedModel) -> None:
    """Refuse tensors that the model would not read, or would read as its own labels."""
    labels = [name for name in there if name in ("label", "labels", "target")]
    if labels:
        raise Refusal(
            f"{names(labels)} would be given to the model, and the task would have no targets; name them `targets`",
            pointer="/data/path",
            code="unused_field",
        )
    if there == ["inputs"]:
        return
    parameters = inspect.signature(loaded.model.forward).parameters.values()
    known = [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    other = [name for name in there if name not in known]
    if other:
        raise Refusal(
            f"{names(other)} are tensors that the model's forward has no argument for, so they would not be read; it "
            f"takes {names(known, 20)}: rename them, or leave them out",
            pointer="/data/path",
            code="unused_field",
        )


def row_positions(ids: Tensor) -> Tensor:  # (N, T) -> (N, T)
    """Return position ids 0 … T-1, int64, of every example of its own, so that their gradients stay per example."""
    return torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
