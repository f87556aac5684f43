"""What the routes answer: the ledger's records as callers see them."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal
from urllib.parse import quote

from catalog.record import record
from jobs.lifecycle import State
from jobs.records import Artifact, Job, LayerRow


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
class JobView:
    """One job."""

    id: str
    state: State
    kinds: tuple[str, ...]
    document: Mapping[str, Any]
    """The job document with every default written out."""
    document_sha256: str
    labels: Mapping[str, str]
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
    cancel_requested_at: datetime | None
    links: Mapping[str, str]


@record
class JobListView:
    """Jobs, newest first."""

    items: tuple[JobView, ...]
    next: str | None
    """Give it as `before` for the next page; also in the header Link."""


@record
class ValidationView:
    """The document is sound and would be accepted; nothing was stored."""

    valid: Literal[True]
    document: Mapping[str, Any]
    document_sha256: str


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


def job_view(job: Job) -> JobView:
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
        cancel_requested_at=job.cancel_requested_at,
        links={
            "self": here,
            "results": f"{here}/results",
            "layers": f"{here}/layers",
            "log": f"{here}/log",
            "artifacts": f"{here}/artifacts",
            "cancel": f"{here}:cancel",
        },
    )


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
