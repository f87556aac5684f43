"""Responses of the service as records: those of ``catalog.responses.views``, and rows with the catalog's own metrics.

Fields that a newer service adds are left out, and those that an older one does not have are None.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from catalog import ANALYSES
from catalog.record import record
from catalog.responses.layer_record import LayerRecord, Observed
from catalog.responses.views import ResultsView
from kronoscope.client.errors import ClientError

_NEEDED = frozenset({"id", "state", "seq", "type", "kind", "job", "summary", "artifacts"})
"""Fields without which nothing else of an answer means anything."""

T = TypeVar("T")


@record
class Layer:
    """One row of a job's results, of a service or of a foreground run."""

    kind: str
    ordinal: int
    layer: str
    module: str | None
    status: str
    reason: str | None
    parameters: tuple[str, ...]
    parameter_count: int | None
    metrics: Any
    """The analysis's own record, such as ``catalog.analyses.capacity_metrics.CapacityMetrics``; None for a layer that
    is not covered."""
    record: LayerRecord | None
    observed: Observed | None
    sha256: str | None = None


def build_layer(value: Mapping[str, Any]) -> Layer:
    """Build a row of the results.

    Args:
        value: The row as JSON, of a service or of a foreground run's `results.json`.

    Returns:
        The row, with the metrics as the record of its analysis; as JSON where this client does not know the analysis.
    """
    row = build(Layer, value)
    analysis = ANALYSES.get(row.kind)
    if analysis is None or row.metrics is None:
        return row
    return dataclasses.replace(row, metrics=build(analysis.metrics, row.metrics))


def build_results(value: Mapping[str, Any]) -> ResultsView:
    """Build the results of a job.

    Args:
        value: The service's response as JSON.

    Returns:
        The results, with each summary as `build_summary` makes it.
    """
    results = build(ResultsView, value)
    summary = {kind: build_summary(kind, each) for kind, each in results.summary.items()}
    return dataclasses.replace(results, summary=summary)


def build_summary(kind: str, summary: Mapping[str, Any]) -> Any:  # noqa: ANN401 - each analysis has its own
    """Build the summary of an analysis.

    Args:
        kind: The analysis.
        summary: Its summary as JSON.

    Returns:
        The analysis's own record; ``summary`` itself where this client does not know the analysis.
    """
    analysis = ANALYSES.get(kind)
    return build(analysis.summary, summary) if analysis is not None else summary


def build(cls: type[T], value: Mapping[str, Any]) -> T:
    """Build a record from a JSON object."""
    if not isinstance(value, dict):
        raise _malformed(cls.__name__, "an object", value)
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(typing.cast("Any", cls))
    absent = {field.name: None for field in fields if field.default is field.default_factory is dataclasses.MISSING}
    for name in _NEEDED & hints.keys() & absent.keys():
        if value.get(name) is None:
            raise _malformed(f"{cls.__name__}.{name}", "a value", None)
    for field in fields:
        if not _fits(hints[field.name], value.get(field.name)):
            raise _malformed(f"{cls.__name__}.{field.name}", str(hints[field.name]), value[field.name])
    sent = {field.name: _shaped(hints[field.name], value[field.name]) for field in fields if field.name in value}
    return cls(**absent | sent)


def _malformed(name: str, wanted: str, value: object) -> ClientError:
    message = f"an answer of the service has {value!r:.60} as {name}, which is not {wanted}; check the address"
    return ClientError(0, "Unexpected answer", message)


def _fits(hint: Any, item: Any) -> bool:  # noqa: ANN401 - annotations and JSON
    """Return whether a JSON value has the type of an annotation; None stands for what an older service has not."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return any(_fits(each, item) for each in inner[: 1 if origin is typing.Annotated else None])
    if origin is tuple:
        return item is None or (isinstance(item, list) and all(_fits(inner[0], each) for each in item))
    wanted: Any = hint
    if origin is typing.Literal:  # a newer service may have further ones
        wanted = tuple(type(each) for each in inner)
    elif dataclasses.is_dataclass(hint) or origin is not None:
        wanted = dict
    elif hint is float:
        wanted = (int, float)
    is_known = hint is not Any and isinstance(wanted, (type, tuple)) and item is not None
    return not is_known or (isinstance(item, wanted) and (hint is bool or not isinstance(item, bool)))


def _shaped(hint: Any, item: Any) -> Any:  # noqa: ANN401 - annotations and JSON
    """Return a JSON value as ``hint`` has it: an array as a tuple, an object as a record where a record is meant."""
    if isinstance(item, list):
        kinds = [member for member in (hint, *typing.get_args(hint)) if typing.get_origin(member) is tuple]
        each = typing.get_args(kinds[0])[0] if kinds else Any
        return tuple(_shaped(each, member) for member in item)
    if isinstance(item, dict):
        records = [each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)]
        if len(records) == 1 and isinstance(records[0], type):
            return build(records[0], item)
    return item
