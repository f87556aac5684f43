"""The wire format of Server-Sent Events: a job's event, the hint when to reconnect, the keepalive."""

import json

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from api.requests.response_bodies import event_view
from catalog.record import plain
from jobs.records import Event

MEDIA_TYPE = "text/event-stream"
KEEPALIVE = KEEPALIVE_COMMENT


def encode_event(event: Event) -> bytes:
    """Return an event as it goes over the wire.

    Args:
        event: The ledger's record; its number becomes the `id` that a reader sends back as `Last-Event-ID`.

    Returns:
        Lines in ASCII with the event's JSON as `data`: some readers end a line at U+2028.
    """
    data = json.dumps(plain(event_view(event)), allow_nan=False)
    return format_sse_event(event=event.type, id=str(event.seq), data_str=data)


def retry_hint(milliseconds: int) -> bytes:
    """Return the field `retry` of a stream.

    Args:
        milliseconds: How long the reader is to wait before it connects again.

    Returns:
        The line as it goes over the wire.
    """
    return format_sse_event(retry=milliseconds)
