"""The assignment as a child reads it from its standard input."""

import json
from pathlib import Path

from catalog.record_reader import Reader
from catalog.requests.assignment import Assignment

_MAX_BYTES = 16 * 2**20


def read_assignment(raw: bytes) -> Assignment:
    """Read the assignment that the parent wrote."""
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"an assignment of {len(raw):,} bytes; at most {_MAX_BYTES:,} are read")
    try:
        stated = {name: value for name, value in json.loads(raw).items() if value is not None}
        stated.setdefault("scratch", Path(stated["artifacts"]) / ".waiting")
    except (KeyError, TypeError, AttributeError) as error:
        message = f"not an assignment: {error!r}"
        raise ValueError(message) from error
    return Reader(strict=False).read(Assignment, stated, "")  # type: ignore[no-any-return] # by its annotation
