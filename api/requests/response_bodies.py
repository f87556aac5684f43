"""The bodies of responses: records of the ledger as ``catalog.responses.views`` shows them to their caller."""

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar, cast
from urllib.parse import quote

from catalog.analyses.analysis import RefusedAnalysis
from catalog.requests.pieces import read_piece
from catalog.responses.coverage import assess_coverage
from catalog.responses.device_views import DeviceState, DeviceView
from catalog.responses.estimate_view import EstimateView, PlaceBytes
from catalog.responses.views import (
    ArtifactView,
    CallerFrame,
    EventListView,
    EventView,
    FailureView,
    JobView,
    LayerView,
    PieceView,
    PlacementView,
    ProgressView,
    timestamp,
)
from jobs.devices.registry import DeviceStatus
from jobs.records import Artifact, Event, Job, LayerRow
from jobs.repository.events import History
from jobs.repository.pieces import PieceJob

T = TypeVar("T")


def job_view(job: Job, placement: PlacementView | None = None, pieces: tuple[PieceJob, ...] | None = None) -> JobView:
    """Return a job as its caller sees it.

    Args:
        job: The ledger's record.
        placement: Its device, or the reason why it waits; None in lists and in the body that the ETag is taken of.
        pieces: Its pieces; None there, and of a job that was not divided.

    Returns:
        The body, with links to the job's other resources.
    """
    here = f"/v1/jobs/{job.id}"
    parts = ("results", "layers", "log", "events", "artifacts")
    named = {"parent": job.parent_id, "reproduces": job.document.get("reproduces")}
    others = {name: f"/v1/jobs/{other}" for name, other in named.items() if other is not None}
    trace = tuple(CallerFrame(**each) for each in (job.failure or {}).get("trace") or ())
    return _filled(
        JobView,
        vars(job),
        placement=placement,
        progress=_progress(job),
        coverage=assess_coverage(job.summary, _min_coverage(job)),
        refused=tuple(RefusedAnalysis(**each) for each in (job.manifest or {}).get("refused") or ()),
        notices=tuple((job.manifest or {}).get("notices") or ()),
        imported=bool((job.manifest or {}).get("imported")),
        failure=None if job.failure is None else _filled(FailureView, job.failure, trace=trace),
        parent=job.parent_id,
        piece=None if job.piece is None else read_piece(job.piece),
        pieces=None if pieces is None else tuple(map(piece_view, pieces)),
        links={"self": here, **{part: f"{here}/{part}" for part in parts}, "cancel": f"{here}:cancel", **others},
    )


def piece_view(job: PieceJob) -> PieceView:
    """Return a piece of a divided job as the caller of that sees it."""
    piece, percent = job.piece, (job.progress or {}).get("percent")
    given = None if piece.begin is None or piece.end is None else piece.end - piece.begin
    return _filled(
        PieceView,
        vars(job) | {name: getattr(piece, name) for name in ("round", "index", "count")},
        progress=100.0 if job.state == "succeeded" else percent,
        examples=given if job.examples is None else job.examples,
        layers=None if piece.layers is None else len(piece.layers),
    )


def estimate_view(job: Job) -> EstimateView:
    """Return an estimate as its caller sees it.

    Args:
        job: The ledger's record of the estimate, which is a job of a kind of its own.

    Returns:
        The body; everything from `fits` to `plan` is None until the estimate has succeeded.
    """
    plan = job.plan if job.state == "succeeded" else None
    figures: dict[str, Any] = dict.fromkeys(("peak", "budget", "smallest_budget"))
    if plan is not None:
        peaks = {place: plan.get(f"{place}_peak_bytes") for place in ("device", "host", "disk")}
        figures = {name: _limits(plan.get(name) or {}, on_device=bool(peaks["device"])) for name in figures}
        figures["peak"] = PlaceBytes(**peaks)
    return _filled(
        EstimateView,
        vars(job),
        progress=_progress(job),
        fits=None if plan is None else plan["fits"],
        seconds=None if plan is None else plan.get("seconds"),
        seconds_range=None if plan is None or not plan.get("seconds_range") else tuple(plan["seconds_range"]),
        why=None if plan is None else plan["why"],
        plan=plan,
        links={"self": f"/v1/estimates/{job.id}"},
        **figures,
    )


def _limits(sizes: Mapping[str, Any], *, on_device: bool) -> PlaceBytes:
    # a job that uses no device has no limit there
    device = sizes.get("device_bytes") if on_device else None
    return PlaceBytes(device=device, host=sizes.get("host_bytes"), disk=None)


def _progress(job: Job) -> ProgressView | None:
    if job.progress is None:
        return None
    written = job.progress.get("updated_at")
    updated_at = None if written is None else timestamp(datetime.fromisoformat(written))
    return _filled(ProgressView, job.progress, updated_at=updated_at)


def layer_view(row: LayerRow) -> LayerView:
    """Return a row of the results as its caller sees it; fields that the stored outcome does not have are None."""
    status, parameters = row.outcome.get("status", "covered"), tuple(row.outcome.get("parameters") or ())
    return _filled(LayerView, {**row.outcome, **vars(row)}, status=status, parameters=parameters)


def _min_coverage(job: Job) -> float | None:
    share = (job.document.get("collection") or {}).get("min_coverage")
    return None if share is None else float(share)


def artifact_view(artifact: Artifact) -> ArtifactView:
    """Return a file's record as its caller sees it, with the address of the file in place of its key in the store."""
    href = f"/v1/jobs/{artifact.job_id}/artifacts/{quote(artifact.name)}"
    return _filled(ArtifactView, vars(artifact), href=href)


def event_view(event: Event) -> EventView:
    """Return an event as its readers see it, the same in streams and in pages."""
    return _filled(EventView, vars(event))


def event_list_view(history: History) -> EventListView:
    """Return a part of a job's history as its caller sees it."""
    items = tuple(map(event_view, history.events))
    return _filled(EventListView, vars(history), items=items)


def device_view(device: DeviceStatus) -> DeviceView:
    """Return a device as its callers see it, the same for all tenants.

    One state stands in place of the counts of draining jobs.
    """
    state: DeviceState = "free"
    if device.stale:
        state = "stale"
    elif device.jobs > device.draining:
        state = "leased"
    elif device.draining:
        state = "draining"
    return _filled(DeviceView, vars(device), state=state)


def _filled(view: type[T], values: Mapping[str, Any], **others: Any) -> T:  # noqa: ANN401 - fields of any type
    """Return a ``view`` with the ``values`` of its fields' names, moments as texts; what is missing is None."""
    fields = [field.name for field in dataclasses.fields(cast("Any", view))]
    present = {name: values.get(name) for name in fields}
    moments = {name: timestamp(value) for name, value in present.items() if isinstance(value, datetime)}
    return view(**present | moments | others)
