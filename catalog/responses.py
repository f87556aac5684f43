"""The responses of the service, as records: the API's schema, the bodies it sends and what its client returns.

A moment is a text here, as JSON has none: ISO 8601 in UTC, such as `2030-01-01T12:00:00Z`.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from catalog.record import TextFormat, record

JobState = Literal["queued", "running", "cancelling", "succeeded", "failed", "cancelled"]
DeviceState = Literal["free", "leased", "draining", "stale"]
Timestamp = Annotated[str, TextFormat("date-time")]

ENDED: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})
"""States that a job does not leave."""


def timestamp(moment: datetime) -> Timestamp:
    """Return an aware ``moment`` in UTC as the text that stands for it in a response."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


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
    updated_at: Timestamp | None = None


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
    state: JobState
    kinds: tuple[str, ...]
    document: Mapping[str, Any]
    """The job document with every default written out."""
    document_sha256: str
    labels: Mapping[str, str]
    priority: int
    """-10 to 10: which of your own waiting jobs goes first."""
    deadline_at: Timestamp | None
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
    created_at: Timestamp
    queued_at: Timestamp
    started_at: Timestamp | None
    finished_at: Timestamp | None
    archived_at: Timestamp | None
    """When its rows and events left the ledger for its file `archive.jsonl.gz`; they are read from there."""
    cancel_requested_at: Timestamp | None
    links: Mapping[str, str]

    @property
    def ended(self) -> bool:
        """Whether its state is final."""
        return self.state in ENDED


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
    at: Timestamp
    type: str
    """Such as `state`, `started`, `plan`, `progress`, `layer`, `artifact`, `summary`, `log`, `digest_differs`."""
    data: Mapping[str, Any]

    @property
    def ends(self) -> bool:
        """Whether it is the job's last event."""
        return self.type == "state" and self.data.get("state") in ENDED


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

    def __getitem__(self, place: Literal["device", "host", "disk"]) -> int | None:
        """Return the bytes in ``place``."""
        return {"device": self.device, "host": self.host, "disk": self.disk}[place]


@record
class EstimateView:
    """What a job would take. Until it is `succeeded` everything from `fits` to `plan` is null."""

    id: str
    state: JobState
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
    created_at: Timestamp
    started_at: Timestamp | None
    finished_at: Timestamp | None
    links: Mapping[str, str]

    @property
    def ended(self) -> bool:
        """Whether it is there, or was given up."""
        return self.state in ENDED


@record
class DeviceView:
    """One device."""

    uuid: str
    kind: Literal["cuda", "fake", "host"]
    """A GPU; one of bytes only, for trying things out; or the memory of a machine without one."""
    name: str
    node: str
    state: DeviceState
    """`leased`: a job computes there; `draining`: processes of one that was taken away are not gone yet; `stale`: no
    worker that was seen lately offers it."""
    capacity_bytes: int
    free_bytes: int
    """For the next job. A GPU with a job has none: a job gets it for itself."""
    leased_bytes: int
    """By jobs."""
    foreign_bytes: int
    """Held by others than jobs."""
    jobs: int
    reserved: bool
    """Kept for a job that waits for all of its memory to become free."""
    seen_at: Timestamp


@record
class DeviceListView:
    """Devices, those of one node together."""

    items: tuple[DeviceView, ...]
    next: str | None
    """Give it as `after` for the next page; also in the header Link."""
