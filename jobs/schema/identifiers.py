"""Identifiers: UUIDs of version 7 (RFC 9562), which sort by the millisecond of their creation.

The order serves paging and locality alone; nothing is decided by it, since it comes from the
clock of whichever process made the id.
"""

import re
import secrets
import time
import uuid

_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def new_id() -> str:
    """A fresh id: 48 bits of milliseconds, 12 bits of their fraction, 62 random bits."""
    milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
    fraction = nanoseconds * 4096 // 1_000_000
    value = (milliseconds & (2**48 - 1)) << 80 | 7 << 76 | fraction << 64 | 2 << 62 | secrets.randbits(62)
    return str(uuid.UUID(int=value))


def is_id(text: str) -> bool:
    """Return whether a text has the form of an id; others are never looked up."""
    return _ID.fullmatch(text) is not None
