"""The state of a layer's statistics: its tensors and plain values by field, as checkpoints hold them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.accumulation.batch_variance import BatchVariance
from engine.accumulation.gradient_rows import GradientRows
from engine.accumulation.layer_statistics import LayerStatistics

_PARTS = (GradientRows, BatchVariance)
"""Parts of a layer's statistics that have a state of their own."""


def put(statistics: LayerStatistics, entry: str, tensor: Tensor, device: torch.device) -> None:
    """Put one tensor of a layer's state back.

    Args:
        statistics: Sums of the layer, allocated.
        entry: Name of the field; ``field.name`` is an entry of a part with a state of its own.
        tensor: The tensor that was saved, of the field's shape; it is copied where the field holds one of its kind.
        device: Device of a tensor that the field does not hold yet.
    """
    owner, _, own = entry.partition(".")
    held = getattr(statistics, owner)
    if isinstance(held, _PARTS):
        held.put(own, tensor)
    elif isinstance(held, Tensor) and held.shape == tensor.shape and held.dtype == tensor.dtype:
        # in place, for whoever holds a view of it
        held.copy_(tensor)
    else:
        setattr(statistics, entry, tensor.to(device))


def counts(statistics: LayerStatistics) -> dict[str, Any]:
    """Return the plain values of a layer's state: counts, weights and flags.

    Args:
        statistics: Sums of one layer.

    Returns:
        Every value that is not a tensor, by field.
    """
    return {name: value for name, value in state_of(statistics).items() if not isinstance(value, Tensor)}


def set_counts(statistics: LayerStatistics, stored: Mapping[str, Any]) -> None:
    """Put the plain values of a layer's state back.

    Args:
        statistics: Sums of the layer, whose fields are overwritten.
        stored: What ``counts`` has returned; fields that the layer does not have are passed over.
    """
    for name in state_of(statistics).keys() & stored.keys():
        owner, _, own = name.partition(".")
        held = getattr(statistics, owner)
        if isinstance(held, _PARTS):
            held.put(own, stored[name])
        else:
            setattr(statistics, name, stored[name])


def state_of(statistics: LayerStatistics) -> dict[str, Any]:
    """Collect every field of a layer's statistics but those that a new attempt sets itself, such as its staging.

    Args:
        statistics: Sums of one layer.

    Returns:
        Tensors, of their own shapes, and plain values by field; entries of parts are named ``field.name``.

    Raises:
        TypeError: If a field is neither a tensor nor a plain value nor a list of numbers: it could not be brought back.
    """
    held: dict[str, Any] = {}
    for entry in dataclasses.fields(statistics):
        if entry.name in ("layer", "leader", "staging", "row_staging", "representation", "sums_dtype", "made_of"):
            continue
        value = getattr(statistics, entry.name)
        if isinstance(value, _PARTS):
            held |= {f"{entry.name}.{name}": own for name, own in value.state().items()}
            continue
        numbers = isinstance(value, list) and all(isinstance(each, (float, type(None))) for each in value)
        if not numbers and not isinstance(value, (Tensor, bool, int, float, str, type(None))):
            raise TypeError(
                f"`{entry.name}` of a layer's statistics is a {type(value).__name__}; checkpoints hold none"
            )
        held[entry.name] = value
    return held
