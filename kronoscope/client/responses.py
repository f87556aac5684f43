"""Responses of the service as records: those of ``catalog.responses.views``, and rows with the catalog's own metrics.

Fields that a newer service adds are left out, and those that an older one does not have are None.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from catalog import ANALYSES
from catalog.brief import Brief
from catalog.record import record
from catalog.record_reader import VersionReader, required_fields
from catalog.responses.layer_record import LayerRecord, Observed
from catalog.responses.views import ResultsView
from kronoscope.client.errors import ClientError

T = TypeVar("T")


@record
class Layer(Brief, shown=("kind", "layer", "module", "status", "reason", "parameter_count", "metrics")):
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
    """Build a row of the results from JSON, of a service or of a foreground run's `results.json`.

    Its metrics are the record of its analysis; JSON where this client does not know the analysis.
    """
    row = build(Layer, value)
    analysis = ANALYSES.get(row.kind)
    if analysis is None or row.metrics is None:
        return row
    return dataclasses.replace(row, metrics=build(analysis.metrics, row.metrics))


def build_results(value: Mapping[str, Any]) -> ResultsView:
    """Build the results of a job from the service's JSON, with each summary as `build_summary` makes it."""
    results = build(ResultsView, value)
    summary = {kind: build_summary(kind, each) for kind, each in results.summary.items()}
    return dataclasses.replace(results, summary=summary)


def build_summary(kind: str, summary: Mapping[str, Any]) -> Any:  # noqa: ANN401 - each analysis has its own
    """Build an analysis's record of its summary; ``summary`` itself where this client does not know the analysis."""
    analysis = ANALYSES.get(kind)
    return build(analysis.summary, summary) if analysis is not None else summary


class _Responses(VersionReader):
    """The reader of answers, of a service that may be another program altogether."""

    def record(self, cls: type, value: Any, field: str) -> Any:  # noqa: ANN401, ARG002
        """Read a record, named by its class wherever it stands."""
        # without these nothing else of an answer means anything
        for name in ("id", "state", "seq", "type", "kind", "job", "summary", "artifacts"):
            if name in required_fields(cls) and value.get(name) is None:
                raise _malformed(f"{cls.__name__}.{name}", "a value", None)
        return super().record(cls, value, cls.__name__)

    def refuse(self, field: str, annotation: Any, value: Any) -> NoReturn:  # noqa: ANN401
        """Refuse a value of another type."""
        raise _malformed(field, str(annotation), value)


_RESPONSES = _Responses(strict=False)


def build(cls: type[T], value: Mapping[str, Any]) -> T:
    """Build a record from a JSON object."""
    if not isinstance(value, dict):
        raise _malformed(cls.__name__, "an object", value)
    return _RESPONSES.read(cls, value, cls.__name__)  # type: ignore[no-any-return] # by its annotation


def _malformed(name: str, wanted: str, value: object) -> ClientError:
    message = f"an answer of the service has {value!r:.60} as {name}, which is not {wanted}; check the address"
    return ClientError(0, "Unexpected answer", message)
