"""What the service answers, as records; layers carry the catalog's own metrics and records.

Fields that a newer service adds are left out, so that an older client keeps working.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from catalog import ANALYSES
from catalog.layer_record import LayerRecord, Observed
from catalog.record import record

T = TypeVar("T")

ENDED = frozenset({"succeeded", "failed", "cancelled"})


@record
class Progress:
    """How far a job is."""

    stage: str | None = None
    done: int | None = None
    total: int | None = None
    unit: str | None = None
    layers_done: int | None = None
    layers_total: int | None = None
    percent: float | None = None


@record
class Failure:
    """Why a job failed."""

    category: str
    code: str
    message: str
    pointer: str | None = None
    layer: str | None = None


@record
class Placement:
    """Where a job computes, or why it does not yet."""

    status: str
    """`placed`, `reserved`, `waiting`, `no_device` or `no_worker`."""
    message: str
    device: str | None = None


@record
class Job:
    """One job of the service."""

    id: str
    state: str
    kinds: tuple[str, ...]
    document: Mapping[str, Any]
    progress: Progress | None = None
    failure: Failure | None = None
    attempt: int = 0
    priority: int = 0
    deadline_at: str | None = None
    placement: Placement | None = None
    """Of a job that was asked for by itself and has not ended."""
    created_at: str | None = None
    started_at: str | None = None
    finished_at: str | None = None

    @property
    def ended(self) -> bool:
        """Whether its state is final."""
        return self.state in ENDED


@record
class Event:
    """One line of a job's history."""

    seq: int
    """Grows with every event of the job, with gaps."""
    at: str
    type: str
    """Such as `state`, `started`, `plan`, `progress`, `layer`, `artifact`, `summary`, `log`."""
    data: Mapping[str, Any]

    @property
    def ends(self) -> bool:
        """Whether it is the job's last."""
        return self.type == "state" and self.data.get("state") in ENDED


@record
class Estimate:
    """What a job would take, found without running it."""

    id: str
    state: str
    document: Mapping[str, Any]
    fits: bool | None = None
    """Whether the job would be taken up where it was planned; null until the estimate is there."""
    seconds: float | None = None
    peak: Mapping[str, int | None] | None = None
    """Bytes on the `device`, the `host` and the `disk`."""
    budget: Mapping[str, int | None] | None = None
    """What the peak is held against."""
    smallest_budget: Mapping[str, int | None] | None = None
    """What would do."""
    why: str | None = None
    plan: Mapping[str, Any] | None = None
    """Everything: stages, terms of each layer, rungs, what was assumed."""
    progress: Progress | None = None
    created_at: str | None = None
    finished_at: str | None = None

    @property
    def ended(self) -> bool:
        """Whether it is there."""
        return self.state in ENDED


@record
class Layer:
    """One row of a job's results."""

    kind: str
    ordinal: int
    layer: str
    module: str | None
    status: str
    reason: str | None
    parameters: tuple[str, ...]
    parameter_count: int | None
    metrics: Any
    """The analysis's own record, such as ``catalog.capacity.CapacityMetrics``; null for a declared layer."""
    record: LayerRecord | None
    observed: Observed | None
    sha256: str | None = None


@record
class Artifact:
    """A file that a job left."""

    name: str
    sha256: str
    size_bytes: int
    media_type: str


@record
class Device:
    """What the service's workers compute on."""

    uuid: str
    kind: str
    name: str
    node: str
    state: str
    """`free`, `leased`, `draining` or `stale`."""
    capacity_bytes: int
    free_bytes: int
    leased_bytes: int = 0
    foreign_bytes: int = 0
    jobs: int = 0
    reserved: bool = False
    seen_at: str | None = None


@record
class Results:
    """What came of a job."""

    job: Job
    summary: Mapping[str, Any]
    """The analysis's own summary record, by kind."""
    manifest: Mapping[str, Any] | None
    artifacts: tuple[Artifact, ...]


def job_of(value: Mapping[str, Any]) -> Job:
    """A job as the service sends it."""
    found = build(Job, value)
    return dataclasses.replace(
        found,
        progress=build(Progress, value["progress"]) if value.get("progress") else None,
        failure=build(Failure, value["failure"]) if value.get("failure") else None,
        placement=build(Placement, value["placement"]) if value.get("placement") else None,
    )


def estimate_of(value: Mapping[str, Any]) -> Estimate:
    """An estimate as the service sends it."""
    progress = build(Progress, value["progress"]) if value.get("progress") else None
    return dataclasses.replace(build(Estimate, value), progress=progress)


def layer_of(value: Mapping[str, Any]) -> Layer:
    """A row as the service sends it, or as a foreground run writes it."""
    analysis = ANALYSES.get(str(value["kind"]))
    metrics = value.get("metrics")
    if analysis is not None and metrics is not None:
        metrics = build(analysis.metrics, metrics)
    return Layer(
        kind=str(value["kind"]),
        ordinal=int(value["ordinal"]),
        layer=str(value["layer"]),
        module=value.get("module"),
        status=str(value["status"]),
        reason=value.get("reason"),
        parameters=tuple(value.get("parameters") or ()),
        parameter_count=value.get("parameter_count"),
        metrics=metrics,
        record=build(LayerRecord, value["record"]) if value.get("record") else None,
        observed=build(Observed, value["observed"]) if value.get("observed") else None,
        sha256=value.get("sha256"),
    )


def results_of(value: Mapping[str, Any]) -> Results:
    """Results as the service sends them."""
    return Results(
        job=job_of(value["job"]),
        summary={kind: summary_of(kind, summary) for kind, summary in value["summary"].items()},
        manifest=value.get("manifest"),
        artifacts=tuple(build(Artifact, artifact) for artifact in value.get("artifacts") or ()),
    )


def summary_of(kind: str, summary: Mapping[str, Any]) -> Any:  # noqa: ANN401 - each analysis has its own
    """One analysis's summary as its record; as it is where this client does not know the analysis."""
    analysis = ANALYSES.get(kind)
    return build(analysis.summary, summary) if analysis is not None else summary


def build(cls: type[T], value: Mapping[str, Any]) -> T:
    """A record from JSON: known fields only, nested records and tuples as declared."""
    hints = typing.get_type_hints(cls)
    fields = {field.name for field in dataclasses.fields(typing.cast("Any", cls))}
    return cls(**{name: _shaped(hints[name], item) for name, item in value.items() if name in fields})


def _shaped(hint: Any, item: Any) -> Any:  # noqa: ANN401 - annotations and JSON
    if isinstance(item, list):
        kinds = [member for member in (hint, *typing.get_args(hint)) if typing.get_origin(member) is tuple]
        each = typing.get_args(kinds[0])[0] if kinds else Any
        return tuple(_shaped(each, member) for member in item)
    if isinstance(item, dict):
        records = [each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)]
        if len(records) == 1 and isinstance(records[0], type):
            return build(records[0], item)
    return item
