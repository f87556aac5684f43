"""What the routes answer: the ledger's records as callers see them."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal
from urllib.parse import quote

from catalog.record import record
from jobs.lifecycle import State
from jobs.records import Artifact, Job, LayerRow
from jobs.scheduling.placement import Placement


@record
class ProgressView:
    """How far a job is."""

    stage: str | None = None
    """`model`, `data`, `collection`, or the kind of an analysis."""
    done: int | None = None
    total: int | None = None
    unit: str | None = None
    """`batches` or `layers`."""
    layers_done: int | None = None
    layers_total: int | None = None
    percent: float | None = None
    updated_at: datetime | None = None


@record
class FailureView:
    """Why a job failed, and who can act."""

    category: Literal["usage", "transient", "fatal"]
    """`usage`: change the document; `transient`: try again; `fatal`: the operator."""
    code: str
    message: str
    pointer: str | None
    """JSON pointer into the document, where a field is to blame."""
    layer: str | None


@record
class PlacementView:
    """Where a job computes, or why it does not yet."""

    status: Literal["placed", "reserved", "waiting", "no_device", "no_worker"]
    """`placed`: it computes; `reserved`: a device is kept for it; `waiting`: for its turn and a free device;
    `no_device`: no known device could ever hold it; `no_worker`: no worker that is there could take it."""
    message: str
    device: str | None
    """UUID of the device that it computes on, or that is kept for it."""


@record
class JobView:
    """One job."""

    id: str
    state: State
    kinds: tuple[str, ...]
    document: Mapping[str, Any]
    """The job document with every default written out."""
    document_sha256: str
    labels: Mapping[str, str]
    priority: int
    """-10 to 10: which of your own waiting jobs goes first."""
    deadline_at: datetime | None
    """It ends as failed then, if it has not ended before."""
    placement: PlacementView | None
    """Of a job that is asked for by itself and has not ended; no part of its ETag."""
    progress: ProgressView | None
    failure: FailureView | None
    attempt: int
    """How often a worker has taken it up."""
    failures: int
    max_failures: int
    plan: Mapping[str, Any] | None
    created_at: datetime
    queued_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    archived_at: datetime | None
    """When its rows and events left the ledger for its file `archive.jsonl.gz`; they are read from there."""
    cancel_requested_at: datetime | None
    links: Mapping[str, str]


@record
class JobListView:
    """Jobs, newest first."""

    items: tuple[JobView, ...]
    next: str | None
    """Give it as `before` for the next page; also in the header Link."""


@record
class EventView:
    """One line of a job's history."""

    seq: int
    """Grows with every event of the job, with gaps; give it as `after`, or as `Last-Event-ID`, to read on."""
    at: datetime
    type: str
    """Such as `state`, `started`, `plan`, `progress`, `layer`, `artifact`, `summary`, `log`, `digest_differs`."""
    data: Mapping[str, Any]


@record
class EventListView:
    """A part of a job's history, in order."""

    items: tuple[EventView, ...]
    through: int
    """Every event up to this number stands here or before; give it as `after` to read on, now or later."""
    more: bool
    """Whether there are further events already."""
    ended: bool
    """Whether nothing follows."""


@record
class ValidationView:
    """The document is sound and would be accepted; nothing was stored."""

    valid: Literal[True]
    document: Mapping[str, Any]
    document_sha256: str
    placement: PlacementView
    """Where the job would stand now."""


@record
class LayerView:
    """One row of the results."""

    kind: str
    ordinal: int
    layer: str
    module: str | None
    status: str
    """`covered`, `zero_curvature`, or `declared`: trainable and not covered, for `reason`."""
    reason: str | None
    parameters: tuple[str, ...]
    parameter_count: int | None
    metrics: Mapping[str, Any] | None
    record: Mapping[str, Any] | None
    """The reproducibility record."""
    observed: Mapping[str, Any]
    """Seconds and bytes of this run; outside the digest."""
    sha256: str
    """Over the canonical JSON of everything but `observed`."""
    attempt: int


@record
class LayerListView:
    """A page of layers."""

    items: tuple[LayerView, ...]
    next: str | None
    """Give it as `after` for the next page; also in the header Link."""


@record
class ArtifactView:
    """A file that a job left."""

    name: str
    sha256: str
    size_bytes: int
    media_type: str
    href: str


@record
class ArtifactListView:
    """All files of a job, by name."""

    items: tuple[ArtifactView, ...]


@record
class LayersLink:
    """Where the layers are."""

    count: int
    href: str


@record
class ResultsView:
    """What came of a job."""

    job: JobView
    summary: Mapping[str, Any]
    """One summary per analysis, by kind."""
    manifest: Mapping[str, Any] | None
    """With what it was computed."""
    layers: LayersLink
    artifacts: tuple[ArtifactView, ...]


@record
class PlaceBytes:
    """Bytes in each place."""

    device: int | None
    """Of a GPU; null where there is none, or no limit."""
    host: int | None
    disk: int | None
    """Null where the disk has no part in it."""


@record
class EstimateView:
    """What a job would take. Until it is `succeeded` everything from `fits` to `plan` is null."""

    id: str
    state: State
    document: Mapping[str, Any]
    """The job document with every default written out."""
    document_sha256: str
    progress: ProgressView | None
    fits: bool | None
    """Whether a job of this document would be taken up where the estimate was made, or be refused."""
    peak: PlaceBytes | None
    """The most that is held at once, over all stages."""
    seconds: float | None
    """The sum over the stages."""
    budget: PlaceBytes | None
    """What the peak is held against: the document's own budgets, or what was free then."""
    smallest_budget: PlaceBytes | None
    """What would do, for `memory.device` and `memory.host`."""
    why: str | None
    """Which way was chosen of those that fit, and for what."""
    plan: Mapping[str, Any] | None
    """The whole plan: `stages` with their bytes and seconds, `terms` of each layer with their formulas, `rungs` of each
    layer's decompositions, what was chosen, and what was `assumed`, as no weight was read."""
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    links: Mapping[str, str]


def placement_view(placement: Placement) -> PlacementView:
    """A placement as its caller sees it."""
    return PlacementView(status=placement.status, message=placement.message, device=placement.device)


def job_view(job: Job, placement: Placement | None = None) -> JobView:
    """A job as its caller sees it."""
    here = f"/v1/jobs/{job.id}"
    labels = job.document.get("labels") or {}
    return JobView(
        id=job.id,
        state=job.state,
        kinds=job.kinds,
        document=job.document,
        document_sha256=job.document_sha256,
        labels=labels,
        priority=job.priority,
        deadline_at=job.deadline_at,
        placement=None if placement is None else placement_view(placement),
        progress=None if job.progress is None else _progress(job.progress),
        failure=None if job.failure is None else _failure(job.failure),
        attempt=job.attempt,
        failures=job.failures,
        max_failures=job.max_failures,
        plan=job.plan,
        created_at=job.created_at,
        queued_at=job.queued_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        archived_at=job.archived_at,
        cancel_requested_at=job.cancel_requested_at,
        links={
            "self": here,
            "results": f"{here}/results",
            "layers": f"{here}/layers",
            "log": f"{here}/log",
            "events": f"{here}/events",
            "artifacts": f"{here}/artifacts",
            "cancel": f"{here}:cancel",
        },
    )


def estimate_view(job: Job) -> EstimateView:
    """An estimate as its caller sees it."""
    plan = job.plan if job.state == "succeeded" else None
    peak, budget, smallest = _places(plan)
    stages = [] if plan is None else [stage.get("seconds") for stage in plan.get("stages", {}).values()]
    told = [seconds for seconds in stages if seconds is not None]
    return EstimateView(
        id=job.id,
        state=job.state,
        document=job.document,
        document_sha256=job.document_sha256,
        progress=None if job.progress is None else _progress(job.progress),
        fits=None if plan is None else plan["fits"],
        peak=peak,
        seconds=sum(told) if told else None,
        budget=budget,
        smallest_budget=smallest,
        why=None if plan is None else plan["why"],
        plan=plan,
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        links={"self": f"/v1/estimates/{job.id}"},
    )


def _places(plan: Mapping[str, Any] | None) -> tuple[PlaceBytes | None, PlaceBytes | None, PlaceBytes | None]:
    """Peak, budget and the smallest budget that would do."""
    if plan is None:
        return None, None, None
    peaks = {place: plan.get(f"{place}_peak_bytes") for place in ("device", "host", "disk")}
    # a job that uses no device has no peak there, and no limit
    uses = {place: bool(peak) for place, peak in peaks.items()}

    def of(part: str) -> PlaceBytes:
        sizes = plan.get(part) or {}
        return PlaceBytes(
            device=sizes.get("device_bytes") if uses["device"] else None, host=sizes.get("host_bytes"), disk=None
        )

    return PlaceBytes(**peaks), of("budget"), of("smallest_budget")


def _progress(progress: Mapping[str, Any]) -> ProgressView:
    known = {name: progress[name] for name in ProgressView.__annotations__ if name in progress}
    stamp = known.get("updated_at")
    return ProgressView(**known | {"updated_at": None if stamp is None else datetime.fromisoformat(stamp)})


def _failure(failure: Mapping[str, Any]) -> FailureView:
    return FailureView(
        category=failure["category"],
        code=failure["code"],
        message=failure["message"],
        pointer=failure.get("pointer"),
        layer=failure.get("layer"),
    )


def layer_view(row: LayerRow) -> LayerView:
    """A layer's row as its caller sees it."""
    outcome = row.outcome
    return LayerView(
        kind=row.kind,
        ordinal=row.ordinal,
        layer=row.layer,
        module=outcome.get("module"),
        status=outcome.get("status", "covered"),
        reason=outcome.get("reason"),
        parameters=tuple(outcome.get("parameters") or ()),
        parameter_count=outcome.get("parameter_count"),
        metrics=outcome.get("metrics"),
        record=outcome.get("record"),
        observed=row.observed,
        sha256=row.sha256,
        attempt=row.attempt,
    )


def artifact_view(artifact: Artifact) -> ArtifactView:
    """A file's record as its caller sees it."""
    return ArtifactView(
        name=artifact.name,
        sha256=artifact.sha256,
        size_bytes=artifact.size_bytes,
        media_type=artifact.media_type,
        href=f"/v1/jobs/{artifact.job_id}/artifacts/{quote(artifact.name)}",
    )
