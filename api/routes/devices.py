"""Devices over HTTP: what the workers compute on, with what is free there and what is leased."""

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response

from api.problem_details import parameter_refused
from api.requests.auth import Reader
from api.requests.openapi import refusals
from api.service import ServiceOf
from catalog.record import record
from jobs.devices.registry import DeviceStatus, list_devices
from jobs.repository.store import check_limit

router = APIRouter(prefix="/v1/devices", tags=["devices"])

DeviceState = Literal["free", "leased", "draining", "stale"]


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
    seen_at: datetime


@record
class DeviceListView:
    """Devices, those of one node together."""

    items: tuple[DeviceView, ...]
    next: str | None
    """Give it as `after` for the next page; also in the header Link."""


_EXAMPLE = {
    "items": [
        {
            "uuid": "GPU-5c1f7a3e-0d62-4a77-9a54-1f0f3c8d2b10",
            "kind": "cuda",
            "name": "NVIDIA H200",
            "node": "node-1",
            "state": "leased",
            "capacity_bytes": 150_754_820_096,
            "free_bytes": 0,
            "leased_bytes": 42_949_672_960,
            "foreign_bytes": 4_194_304,
            "jobs": 1,
            "reserved": False,
            "seen_at": "2026-12-01T12:00:00Z",
        }
    ],
    "next": None,
}
_LISTED: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"application/json": {"example": _EXAMPLE}},
        "headers": {"Link": {"description": '`rel="next"`, where there is more', "schema": {"type": "string"}}},
    },
    **refusals(422),
}


@router.get("", summary="List devices", responses=_LISTED)
def list_all(
    response: Response,
    _: Reader,
    service: ServiceOf,
    after: Annotated[str | None, Query(description="`next` of the page before.")] = None,
    limit: Annotated[int, Query(description="1 to 100.")] = 100,
) -> DeviceListView:
    """Every device that a worker has offered within the last day, whoever's jobs compute there."""
    check_limit(limit)
    known = list_devices(service.engine)
    first = 0
    if after is not None:
        place = next((place for place, each in enumerate(known) if each.uuid == after), None)
        if place is None:
            raise parameter_refused("after", "is no device that is known (any more); begin at the first page")
        first = place + 1
    shown = known[first : first + limit]
    following = shown[-1].uuid if first + limit < len(known) else None
    if following is not None:
        response.headers["link"] = f'</v1/devices?after={following}&limit={limit}>; rel="next"'
    return DeviceListView(items=tuple(_view(each) for each in shown), next=following)


def _view(device: DeviceStatus) -> DeviceView:
    return DeviceView(
        uuid=device.uuid,
        kind=device.kind,
        name=device.name,
        node=device.node,
        state=_state(device),
        capacity_bytes=device.capacity_bytes,
        free_bytes=device.free_bytes,
        leased_bytes=device.leased_bytes,
        foreign_bytes=device.foreign_bytes,
        jobs=device.jobs,
        reserved=device.reserved,
        seen_at=device.seen_at,
    )


def _state(device: DeviceStatus) -> DeviceState:
    if device.stale:
        return "stale"
    if device.jobs > device.draining:
        return "leased"
    return "draining" if device.draining else "free"
