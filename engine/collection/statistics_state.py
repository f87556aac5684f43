"""The state of a layer's statistics: its tensors and plain values by field, as checkpoints hold them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from catalog.analyses.analysis import LookedAt
from engine.accumulation.batch_variance import BatchVariance
from engine.accumulation.gradient_rows import GradientRows
from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.sketched_rows import SketchRows
from engine.accumulation.tied_statistics import TiedHeadStatistics
from engine.collection.collection_state import CollectionState, Cursor, Snapshot
from engine.distributed.traffic import Moved, Traffic
from engine.factors.factor_set import LayerSums, TiedSums, VarianceSums
from engine.factors.spilled_factors import SpilledFactors
from engine.gradient_identity.comparison import LayerCheck
from engine.gradient_identity.self_check import SelfCheck
from engine.model.example_digests import EnteredExamples
from engine.saved_fields import load_number, save_number, saved_names

_PARTS = (GradientRows, BatchVariance)
"""Parts of a layer's statistics that have a state of their own."""
RECORDS = (
    CollectionState,
    Cursor,
    Snapshot,
    SpilledFactors,
    LayerSums,
    TiedSums,
    VarianceSums,
    EnteredExamples,
    SelfCheck,
    LookedAt,
    LayerCheck,
    Traffic,
    Moved,
    LayerStatistics,
    TiedHeadStatistics,
    GradientRows,
    SketchRows,
    BatchVariance,
)
"""Every record that a checkpoint holds fields of."""


def fields_of_state() -> dict[str, list[str]]:
    """List every field that a checkpoint holds: one with other fields is of another version."""
    return {record.__name__: list(saved_names(record)) for record in RECORDS}


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
        # in place, for those who hold a view of it
        held.copy_(tensor)
    else:
        setattr(statistics, entry, tensor.to(device))


def counts(statistics: LayerStatistics) -> dict[str, Any]:
    """Return the plain values of a layer's state: counts, weights and flags."""
    plain = {name: value for name, value in state_of(statistics).items() if not isinstance(value, Tensor)}
    return {name: _saved(value) for name, value in plain.items()}


def set_counts(statistics: LayerStatistics, stored: Mapping[str, Any]) -> None:
    """Put the plain values of a layer's state back."""
    for name in state_of(statistics).keys() & stored.keys():
        owner, _, own = name.partition(".")
        held, value = getattr(statistics, owner), _loaded(stored[name])
        if isinstance(held, _PARTS):
            held.put(own, value)
        else:
            setattr(statistics, name, value)


def state_of(statistics: LayerStatistics) -> dict[str, Any]:
    """Collect every saved field of a layer's statistics."""
    held: dict[str, Any] = {}
    for field in saved_names(type(statistics)):
        value = getattr(statistics, field)
        if isinstance(value, _PARTS):
            held |= {f"{field}.{name}": own for name, own in value.state().items()}
            continue
        numbers = isinstance(value, list) and all(isinstance(each, (float, type(None))) for each in value)
        if not numbers and not isinstance(value, (Tensor, bool, int, float, str, type(None))):
            raise TypeError(
                f"`{field}` of a layer's statistics is a {type(value).__name__}, which checkpoints do not hold; take a "
                "tensor or plain values, or name it in `NOT_SAVED` with the reason"
            )
        held[field] = value
    return held


def _saved(value: Any) -> Any:  # noqa: ANN401 - a plain value or a list of them
    return [save_number(each) for each in value] if isinstance(value, list) else save_number(value)


def _loaded(stored: Any) -> Any:  # noqa: ANN401 - a plain value or a list of them
    return [load_number(each) for each in stored] if isinstance(stored, list) else load_number(stored)
