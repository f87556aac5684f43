"""Estimate view: the response to a document that is planned and not run."""

from collections.abc import Mapping
from typing import Any, Literal

from catalog.brief import Brief
from catalog.record import record
from catalog.responses.views import ENDED, JobState, ProgressView, Timestamp


@record
class PlaceBytes:
    """Bytes on the device, in host memory and on the disk."""

    device: int | None
    """Memory of a GPU; null where there is none, or no limit."""
    host: int | None
    """Bytes of host memory; null where there is no figure."""
    disk: int | None
    """Null for budgets, which do not limit the disk."""

    def __getitem__(self, place: Literal["device", "host", "disk"]) -> int | None:
        """Return the bytes in ``place``."""
        return {"device": self.device, "host": self.host, "disk": self.disk}[place]


@record
class EstimateView(Brief, shown=("id", "state", "fits", "seconds", "peak", "smallest_budget", "why")):
    """The memory and time that a job would take. Until it is `succeeded` everything from `fits` to `plan` is null."""

    id: str
    """The estimate's id."""
    state: JobState
    """`succeeded`, `failed` and `cancelled` are final."""
    document: Mapping[str, Any]
    """The job document with every default written out."""
    document_sha256: str
    """Digest of the canonical JSON of the document."""
    progress: ProgressView | None
    """Null before a worker reports."""
    fits: bool | None
    """Whether a job of this document would be taken up where the estimate was made, or be refused."""
    peak: PlaceBytes | None
    """The largest sum of bytes held at one time, over all stages."""
    seconds: float | None
    """Estimated seconds from the start of the job's process to its last row."""
    seconds_range: tuple[float, ...] | None
    """Lower and upper end of the estimate; null where the machine's speed was not measured and the job is short."""
    budget: PlaceBytes | None
    """The limits of the peak: the document's own budgets, or the free memory at that time."""
    smallest_budget: PlaceBytes | None
    """The smallest `memory.device` and `memory.host` with which the job would run."""
    why: str | None
    """The plan that was chosen among those that fit, and the reason."""
    plan: Mapping[str, Any] | None
    """The whole plan: `stages` with their bytes and seconds, `terms` of each layer with their formulas, `rungs` of each
    layer's decompositions, the choice, and what was `assumed`, as no weight was read."""
    created_at: Timestamp
    """The moment when it was asked for."""
    started_at: Timestamp | None
    """The moment when its first attempt began."""
    finished_at: Timestamp | None
    """The moment when it reached a final state."""
    links: Mapping[str, str]
    """Addresses, by name."""

    @property
    def ended(self) -> bool:
        """Whether the plan is ready, or has failed."""
        return self.state in ENDED
