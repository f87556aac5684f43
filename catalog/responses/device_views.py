"""The devices of the service as records: the API's schema, the bodies it sends and what its client returns."""

from typing import Literal

from catalog.brief import Brief
from catalog.record import record
from catalog.responses.views import Timestamp

DeviceState = Literal["free", "leased", "draining", "stale"]


@record
class DeviceView(Brief):
    """One device."""

    uuid: str
    """The device's id."""
    kind: Literal["cuda", "fake", "host"]
    """A GPU; a simulated one, which only counts bytes; or the memory of a machine without a GPU."""
    name: str
    """The model of the device."""
    node: str
    """The machine that it is in."""
    state: DeviceState
    """`leased`: a job runs there; `draining`: processes of a job that has lost it have not ended; `stale`: no worker
    has offered it lately."""
    capacity_bytes: int
    """All of its memory."""
    free_bytes: int
    """Memory for the next job; 0 of a GPU with a job, which has it to itself."""
    leased_bytes: int
    """Memory leased to jobs."""
    foreign_bytes: int
    """Memory held by processes that are not jobs."""
    jobs: int
    """Jobs that hold a lease on it."""
    reserved: bool
    """Whether it is kept for a job that waits until enough of its memory is free."""
    seen_at: Timestamp
    """The moment when a worker last reported it."""


@record
class DeviceListView:
    """Devices, ordered by node."""

    items: tuple[DeviceView, ...]
    """The devices of this page."""
    next: str | None
    """Give it as `after` for the next page; also in the header Link."""
