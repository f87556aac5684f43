"""Server-Sent Events as they go over the wire: a job's event, the hint when to come again, the sign of life."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from jobs.records import Event

MEDIA_TYPE = "text/event-stream"
SIGN_OF_LIFE = KEEPALIVE_COMMENT


def shown(event: Event) -> Mapping[str, Any]:
    """The event as its readers see it."""
    return {"seq": event.seq, "at": event.at.isoformat().replace("+00:00", "Z"), "type": event.type, "data": event.data}


def encode(event: Event) -> bytes:
    """The event under its number, which is what `Last-Event-ID` brings back."""
    # in ASCII: to some readers U+2028 ends a line
    return format_sse_event(event=event.type, id=str(event.seq), data_str=json.dumps(shown(event), allow_nan=False))


def come_again(milliseconds: int) -> bytes:
    """How long to wait before the next connection."""
    return format_sse_event(retry=milliseconds)
