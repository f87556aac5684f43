"""Events of a job over HTTP: Server-Sent Events until the job has ended, or a page as JSON."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool

from api.live.event_stream import MEDIA_TYPE, EventStream
from api.problem_details import invalid_parameter, not_found
from api.requests.auth import Reader
from api.requests.openapi import error_responses
from api.requests.response_bodies import event_list_view
from api.service import ServiceOf
from catalog.record import record
from catalog.responses.views import EventListView
from jobs.repository.events import MAX_NUMBER, History, read_history

_PAGE: TypeAdapter[EventListView] = TypeAdapter(EventListView)
_STATE = {"seq": 1, "at": "2030-01-01T12:00:00Z", "type": "state", "data": {"state": "queued", "attempt": 0}}
_LAYER = {
    "seq": 9,
    "at": "2030-01-01T12:00:07.250000Z",
    "type": "layer",
    "data": {"kind": "capacity", "ordinal": 0, "layer": "features.0", "sha256": "9f86d081…"},
}
_STREAM_EXAMPLE = """\
retry: 2000

event: state
data: {"seq": 1, "at": "2030-01-01T12:00:00Z", "type": "state", "data": {"state": "queued", "attempt": 0}}
id: 1

: ping

event: layer
data: {"seq": 9, "at": "2030-01-01T12:00:07.250000Z", "type": "layer", "data": {"kind": "capacity", "ordinal": 0}}
id: 9

"""
_EVENT = {
    "description": "One event; a client that knows `id` may continue after it.",
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "Its number."},
        "event": {"type": "string", "description": "Its type."},
        "data": {
            "type": "string",
            "description": "The event, as JSON.",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/EventView"},
        },
        "retry": {"type": "integer", "description": "Milliseconds to wait before connecting again."},
    },
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The events. A stream ends after the job's last one, or when its time is over: then connect "
        "again with `Last-Event-ID`; each event comes exactly once. Lines that begin with a colon are keepalives.",
        "content": {
            MEDIA_TYPE: {
                "schema": _EVENT,
                "examples": {"stream": {"value": _STREAM_EXAMPLE}},
            },
            "application/json": {
                "examples": {
                    "page": {"value": {"items": [_STATE, _LAYER], "through": 9, "more": False, "ended": False}}
                }
            },
        },
    },
    204: {"description": "As a stream: the job has ended, and you have all of its events. Do not connect again."},
    **error_responses(404, 422, 429),
}

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@record
class EventRange:
    """The parameters of a request for events."""

    after: Annotated[int, Query(description="Number of the last event that you have; 0 begins at the first.")] = 0
    limit: Annotated[int, Query(description="Of a page: 1 to 100.")] = 100
    last_event_id: Annotated[
        str | None, Header(description="The same as `after`, which it overrides: browsers send it when they reconnect.")
    ] = None

    def position(self) -> int:
        """Return the number of the last event that the caller has.

        Raises:
            Refusal: 422 if it is not an event number.
        """
        after, text = self.after, self.last_event_id
        if text is not None:
            if not (text.isascii() and text.isdigit() and len(text) <= 19):
                raise invalid_parameter(
                    "Last-Event-ID", "is not an event number; take `id` of the last event that you have"
                )
            after = int(text)
        if not 0 <= after <= MAX_NUMBER:
            name = "after" if text is None else "Last-Event-ID"
            raise invalid_parameter(name, "is out of range; take `seq` of the last event that you have, or 0")
        return after


@router.get(
    "/{job_id}/events",
    operation_id="follow_job",
    response_model=EventListView,
    summary="Follow a job",
    responses=_ANSWERS,
)
async def events(
    job_id: str, request: Request, caller: Reader, service: ServiceOf, chosen: Annotated[EventRange, Depends()]
) -> Response:
    """The events of a job, as they happen.

    `Accept: application/json` asks for a page instead of a stream. Each key may have some streams open at a time.
    """
    read = partial(_read, service, caller.tenant_id, job_id)
    as_page = _wants_json(request)
    history = await run_in_threadpool(read, chosen.position(), chosen.limit if as_page else 100)
    if history is None:
        raise not_found("there is no such job")
    if as_page:
        return Response(_PAGE.dump_json(event_list_view(history)), media_type="application/json")
    if history.ended and not history.events:
        return Response(status_code=204)
    return EventStream(service, job_id, caller.key, history, read)


def _read(service: ServiceOf, tenant_id: str, job_id: str, position: int, limit: int = 100) -> History | None:
    return read_history(service.engine, tenant_id, job_id, position, limit)


def _wants_json(request: Request) -> bool:
    """Return whether the caller names JSON and no stream; a browser's EventSource names the stream, curl neither."""
    accept = request.headers.get("accept", "")
    return "application/json" in accept and MEDIA_TYPE not in accept
