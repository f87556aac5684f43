"""Views: the responses of the service as records: the API's schema, the bodies it sends and what its client returns.

A moment is a text here, as JSON has none: ISO 8601 in UTC, such as `2030-01-01T12:00:00Z`.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from catalog.analyses.analysis import RefusedAnalysis
from catalog.brief import Brief
from catalog.record import TextFormat, record
from catalog.requests.pieces import Piece
from catalog.responses.coverage import CoverageView

JobState = Literal["queued", "running", "waiting", "cancelling", "succeeded", "failed", "cancelled"]
Timestamp = Annotated[str, TextFormat("date-time")]

ENDED: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})
"""States that a job does not leave."""


def timestamp(moment: datetime) -> Timestamp:
    """Return a moment with a time zone as a response's text: ISO 8601 in UTC, with a final `Z`."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


@record
class ProgressView(Brief):
    """The progress of a job."""

    stage: str | None = None
    """`model`, `data`, `collection`, `correction`, `decomposition` of a divided job, or a stage of an analysis; null of
    a job that is queued again."""
    done: int | None = None
    """Finished units of the stage."""
    total: int | None = None
    """Units of the stage; null while nobody knows."""
    unit: str | None = None
    """`batches`, `layers`, `queries` of an influence, or `episodes` of a training; of a job that waits for its pieces,
    over all of them, `examples`, `layers` or `queries`."""
    layers_done: int | None = None
    """Rows of layers that are written, over all analyses; null where no row is of a layer, as in a training."""
    layers_total: int | None = None
    """Rows of layers that there will be; null before the layers are known."""
    percent: float | None = None
    """The part that is done, of a queued job what its checkpoints hold; null while the stage has no known length."""
    eta_seconds: float | None = None
    """Remaining seconds of the whole job, as of `updated_at`; null where the plan leaves them open."""
    updated_at: Timestamp | None = None
    """The moment when this was written."""


@record
class CallerFrame:
    """One call in a factory's own code, under which the job failed."""

    module: str
    """Name of the module."""
    line: int
    """Line of the module's file."""
    function: str
    """Qualified name of the function."""


@record
class FailureView(Brief):
    """The reason why a job failed, and who can act."""

    category: Literal["usage", "transient", "fatal"]
    """`usage`: change the document; `transient`: try again; `fatal`: the operator."""
    code: str
    """Stable name of the failure."""
    message: str
    """What must hold, what was found and the remedy."""
    pointer: str | None
    """JSON pointer into the document, where a field is to blame."""
    layer: str | None
    """The layer that failed, where one did."""
    trace: tuple[CallerFrame, ...] = ()
    """Where a factory's own code raised, or the model that it made: its calls, the innermost last, 32 at most."""


@record
class PlacementView(Brief):
    """The device that a job runs on, or the reason why it has not begun."""

    status: Literal["placed", "reserved", "waiting", "no_device", "no_worker"]
    """`placed`: it runs; `reserved`: a device is reserved for it; `waiting`: for its turn and a free device;
    `no_device`: no known device could ever hold it; `no_worker`: no known worker could take it, or those that could
    take no jobs at the moment."""
    message: str
    """The status and its reason in a sentence."""
    device: str | None
    """UUID of the device that it runs on, or that is reserved for it; of several, the first."""
    devices: tuple[str, ...] = ()
    """UUIDs of all those devices: one for each rank, or the host that ranks share."""
    own_before: int | None = None
    """Jobs of your own that go before a waiting one, as claims would be made now; null where they were not counted."""
    others_before: int | None = None
    """Jobs of other tenants that do, give or take one of each; no more than 100 are counted with your own."""


@record
class PieceView(Brief):
    """One piece of a divided job, and the job that computes it."""

    round: str
    """`collect`, `correct`, `decompose` or `score`: the step of the divided job that the piece is of."""
    index: int
    """Place among the pieces of the round, from 0; their results are merged in this order."""
    count: int
    """Pieces of the round."""
    id: str
    """The id of the job that computes it; that job can be read as any other."""
    state: JobState
    """The state of that job."""
    worker: str | None
    """The worker process that computes it, as `host:pid`; null while none does."""
    progress: float | None
    """Per cent that are done; null where nobody knows."""
    examples: int | None
    """Examples that it measures, or queries that it scores; null in a round over layers."""
    layers: int | None
    """Layers that it decomposes; null in a round over examples."""
    attempt: int
    """The number of times that a worker has taken it up."""
    failures: int
    """Attempts that failed; at `max_failures` of its job it fails, and the divided job with it."""


@record
class JobView(Brief, shown=("id", "name", "state", "kinds", "progress", "failure", "refused", "created_at")):
    """One job."""

    id: str
    """The job's id."""
    name: str | None
    """The caller's own name of it."""
    state: JobState
    """`succeeded`, `failed` and `cancelled` are final; a divided job, or a series, is `waiting` for its jobs."""
    kinds: tuple[str, ...]
    """Analyses, in the order of the document."""
    document: Mapping[str, Any]
    """The job document with every default written out."""
    document_sha256: str
    """Digest of the canonical JSON of the document."""
    labels: Mapping[str, str]
    """The caller's own labels, by name; at first those of the document."""
    note: str | None = None
    """The caller's own text; null before one is written."""
    priority: int
    """-10 to 10: the higher of your own waiting jobs goes first."""
    deadline_at: Timestamp | None
    """The job fails at this moment if it has not ended."""
    placement: PlacementView | None
    """Only of a job that is read by itself and has not ended; not part of its ETag."""
    progress: ProgressView | None
    """Null before the first attempt reports."""
    coverage: CoverageView | None
    """The share of the model that was measured; null before the first summary, and where no model was given."""
    refused: tuple[RefusedAnalysis, ...]
    """Of a job that has succeeded: the analyses that were refused while others were done; their results are missing."""
    notices: tuple[str, ...]
    """Of a job that has ended: what of its model's folder or data was read otherwise than it stands there, in a way
    that changes numbers, such as texts that were cut."""
    imported: bool
    """Whether its results are those of a foreground run's folder that was sent: the service has computed none."""
    failure: FailureView | None
    """Null unless the job has failed."""
    attempt: int
    """The number of times that a worker has taken it up."""
    failures: int
    """Attempts that failed; at `max_failures` the job ends."""
    max_failures: int
    """Failures after which the job ends."""
    plan: Mapping[str, Any] | None
    """The memory plan; null before it is made."""
    created_at: Timestamp
    """The moment of submission."""
    queued_at: Timestamp
    """The moment since which it waits, or waited last."""
    started_at: Timestamp | None
    """The moment when its first attempt began."""
    finished_at: Timestamp | None
    """The moment when it reached a final state."""
    archived_at: Timestamp | None
    """The moment when its rows and events moved from the ledger to its file `archive.jsonl.gz`."""
    cancel_requested_at: Timestamp | None
    """The moment when its end was asked for."""
    cancel_requested_by: str | None
    """Prefix of the API key that asked for it; null in embedded mode, and of a piece, which ends with its job."""
    parent: str | None
    """For a piece, or a job of a series, the id of the whole, with which it is cancelled, rescheduled and deleted."""
    piece: Piece | None
    """Of a piece: which part of the divided job it computes."""
    pieces: tuple[PieceView, ...] | None
    """Of a divided job that is read by itself: its pieces in the order of rounds and places; not part of its ETag."""
    links: Mapping[str, str]
    """Addresses of the job and its parts, by name."""

    @property
    def ended(self) -> bool:
        """Whether its state is final."""
        return self.state in ENDED


@record
class RelativeView(Brief):
    """A job that gave its factors to another, or used them."""

    id: str
    """Its id."""
    relation: str
    """The field of the user's document that names the source, such as `extends`; `cache` where the cache gave it."""
    name: str | None
    """The caller's own name of it."""
    state: JobState | None
    """Its state; null where there is no such job, or none any more."""
    kinds: tuple[str, ...]
    """Its analyses."""


@record
class LineageView:
    """The jobs that a job has to do with, and its own history."""

    sources: tuple[RelativeView, ...]
    """The jobs whose factors it used."""
    users: tuple[RelativeView, ...]
    """The newest 100 jobs that used its own."""
    history: tuple["EventView", ...]
    """The last 100 of its events `state`, `started` and `crash`; of an archived job `state` alone."""


@record
class JobListView:
    """Jobs, newest first."""

    items: tuple[JobView, ...]
    """The jobs of this page."""
    next: str | None
    """Give it as `before` for the next page; also in the header Link."""


@record
class EventView(Brief, shown=("seq", "at", "type", "data")):
    """One line of a job's history."""

    seq: int
    """Grows with every event of the job, with gaps; give it as `after`, or as `Last-Event-ID`, to read on."""
    at: Timestamp
    """The moment of the event."""
    type: str
    """Such as `state`, `started`, `plan`, `progress`, `layer`, `artifact`, `summary`, `log`, `digest_differs`, and
    `piece` where one of a divided job has begun or ended."""
    data: Mapping[str, Any]
    """Its content; the fields depend on `type`."""

    @property
    def ends(self) -> bool:
        """Whether it is the job's last event."""
        return self.type == "state" and self.data.get("state") in ENDED


@record
class EventListView:
    """A part of a job's history, in order."""

    items: tuple[EventView, ...]
    """The events of this page."""
    through: int
    """All events up to this number are on this page or before; give it as `after` to read on, now or later."""
    more: bool
    """Whether there are further events now."""
    ended: bool
    """Whether nothing follows."""


@record
class ValidationView(Brief):
    """A document that is valid and would be accepted; nothing was stored."""

    valid: Literal[True]
    """Always true; a document that is not valid is answered with 422."""
    document: Mapping[str, Any]
    """The job document with every default written out."""
    document_sha256: str
    """Digest of the canonical JSON of the document."""
    placement: PlacementView
    """The placement that the job would have now."""


@record
class LayerView(Brief, shown=("kind", "layer", "module", "status", "reason", "parameter_count")):
    """One row of the results."""

    kind: str
    """The analysis."""
    ordinal: int
    """Position in the model, from 0."""
    layer: str
    """Qualified name of the module."""
    module: str | None
    """Class of the module."""
    status: str
    """`covered`, `zero_curvature`, or `declared`: trainable and not covered, for `reason`."""
    reason: str | None
    """Why the layer is not covered; null for one that is."""
    parameters: tuple[str, ...]
    """Names of its parameters."""
    parameter_count: int | None
    """Numbers in its parameters."""
    metrics: Mapping[str, Any] | None
    """What the analysis measured; null for a layer that is not covered."""
    record: Mapping[str, Any] | None
    """The reproducibility record."""
    observed: Mapping[str, Any]
    """Seconds and bytes of this run; outside the digest."""
    sha256: str
    """Digest of the canonical JSON of everything but `observed`."""
    attempt: int
    """The attempt that wrote the row."""


@record
class LayerListView:
    """A page of layers."""

    items: tuple[LayerView, ...]
    """The rows of this page."""
    next: str | None
    """Give it as `after` for the next page; also in the header Link."""


@record
class ArtifactView(Brief):
    """A file of a job."""

    name: str
    """Name of the file; it may hold slashes."""
    sha256: str
    """Digest of the file."""
    size_bytes: int
    """Size of the file."""
    media_type: str
    """Its media type."""
    href: str
    """Its address."""


@record
class ArtifactListView:
    """All files of a job, by name."""

    items: tuple[ArtifactView, ...]
    """The files."""


@record
class LayersLink:
    """A link to the layers."""

    count: int
    """Rows that are written."""
    href: str
    """Address of the rows."""


@record
class ResultsView(Brief, shown=("job",)):
    """The results of a job."""

    job: JobView
    """The job."""
    summary: Mapping[str, Any]
    """One summary per analysis, by kind."""
    manifest: Mapping[str, Any] | None
    """The environment in which it was computed, and, of a job that succeeded, the digests of its model and data."""
    layers: LayersLink
    """Where the rows are."""
    artifacts: tuple[ArtifactView, ...]
    """The job's files."""
