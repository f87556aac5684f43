"""The lines of a pipe that a child writes to, until its process group is gone.

A pipe reads end-of-file only once no process has it open for writing. What a child leaves behind in a
session of its own may have it open for days, so its reader goes by the end of the group instead.
"""

import contextlib
import os
import select
from collections.abc import Iterator

_CHUNK_BYTES = 65_536
_LEFT_OVER_BYTES = 2**20  # as much as a pipe holds


def lines(descriptor: int, gone: int, limit: int) -> Iterator[bytes]:
    """Yield each line with its end, or ``limit`` bytes of one that is longer; the last may have been cut short."""
    pending = bytearray()
    searched = 0
    for chunk in _chunks(descriptor, gone):
        pending += chunk
        while pending:
            end = pending.find(b"\n", searched, limit) + 1
            if not end and len(pending) < limit:
                searched = len(pending)
                break
            piece = bytes(pending[: end or limit])
            del pending[: len(piece)]
            searched = 0
            yield piece
    if pending:
        yield bytes(pending)


def _chunks(descriptor: int, gone: int) -> Iterator[bytes]:
    while True:
        readable, _, _ = select.select([descriptor, gone], [], [])
        if gone in readable:
            os.set_blocking(descriptor, False)
            with contextlib.suppress(BlockingIOError):
                yield os.read(descriptor, _LEFT_OVER_BYTES)
            return
        chunk = os.read(descriptor, _CHUNK_BYTES)
        if not chunk:
            return
        yield chunk
