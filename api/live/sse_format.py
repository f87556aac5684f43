"""The wire format of Server-Sent Events: a job's event, the hint when to reconnect, the keepalive."""

import json

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from api.requests.response_bodies import event_view
from catalog.record import plain
from jobs.records import Event

MEDIA_TYPE = "text/event-stream"
KEEPALIVE = KEEPALIVE_COMMENT


def encode_event(event: Event) -> bytes:
    """Return an event as it goes over the wire."""
    data = json.dumps(plain(event_view(event)), allow_nan=False)
    return format_sse_event(event=event.type, id=str(event.seq), data_str=data)


def retry_hint(milliseconds: int) -> bytes:
    """Return the field `retry` of a stream."""
    return format_sse_event(retry=milliseconds)
