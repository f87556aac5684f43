"""The limit of what one attempt may have on the disk while it writes, and the report of an attempt beyond it.

::

    bytes   more than the operator allows an attempt                               (`DiskLimit.total_bytes`)
    room    a volume has less than a tenth left of what was free at the start, and
            the attempt has more of it than its part of the other nine tenths      (`DiskLimit.parts`)
    files   more files and folders than an attempt may have, or too many to count  (`DiskLimit.total_files`)
    hidden  a folder or process of it that cannot be looked into

Without a figure of the operator's an attempt is held to its part only when room is short: as long as all keep to their
parts it never is, and a job that needs more while no other misses it is left alone.

Standard library only: the guardian imports it.
"""

import json
from dataclasses import asdict, dataclass
from typing import Literal

ExcessKind = Literal["bytes", "room", "files", "hidden"]


@dataclass(frozen=True, kw_only=True)
class DiskLimit:
    """The disk limit of one attempt."""

    folder: str
    """The job's folder: whatever its attempts write is below it."""
    total_bytes: int | None = None
    """The most bytes, in all places together; None: its part of what is free."""
    total_files: int = 2**17
    """The most files and folders."""
    parts: int = 1
    """Attempts that may write to the volume at a time."""
    floor_bytes: int = 0
    """Bytes of the folder's volume that belong to no attempt's part."""


@dataclass(frozen=True, kw_only=True)
class Excess:
    """The use of an attempt when it was found beyond its limit."""

    kind: ExcessKind
    found: int
    limit: int
    place: str
    """The folder of the volume, or what could not be looked into."""

    def as_bytes(self) -> bytes:
        """Return it for a pipe."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> "Excess":
        """Read what `as_bytes` returned."""
        return cls(**json.loads(text))
