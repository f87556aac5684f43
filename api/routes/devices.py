"""The devices of the workers over HTTP, with their free and leased memory."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from api.problem_details import invalid_parameter
from api.requests.auth import Reader
from api.requests.openapi import error_responses
from api.requests.response_bodies import device_view
from api.service import ServiceOf
from catalog.responses.device_views import DeviceListView
from jobs.devices.registry import list_devices
from jobs.repository.store import check_limit

router = APIRouter(prefix="/v1/devices", tags=["devices"])

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
    **error_responses(422),
}


@router.get("", operation_id="list_devices", summary="List devices", responses=_LISTED)
def list_all(
    response: Response,
    _: Reader,
    service: ServiceOf,
    after: Annotated[str | None, Query(description="`next` of the page before.")] = None,
    limit: Annotated[int, Query(description="1 to 100.")] = 100,
) -> DeviceListView:
    """Every device that a worker has offered within the last day, with the jobs of all tenants."""
    check_limit(limit)
    devices = list_devices(service.fleet)
    first = 0
    if after is not None:
        place = next((place for place, each in enumerate(devices) if each.uuid == after), None)
        if place is None:
            raise invalid_parameter("after", "is not a known device; begin at the first page")
        first = place + 1
    shown = devices[first : first + limit]
    following = shown[-1].uuid if first + limit < len(devices) else None
    if following is not None:
        response.headers["link"] = f'</v1/devices?after={following}&limit={limit}>; rel="next"'
    return DeviceListView(items=tuple(device_view(each) for each in shown), next=following)
