"""File reads of downloads, in threads of their own: many downloads, and slow ones, take no thread of a query.

A part of a file is sent only once the whole file has proved its digest, which may take seconds of a processor. So few
files are verified at a time, and each once, however many readers wait for it.
"""

import asyncio
import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from io import UnsupportedOperation
from typing import Any, BinaryIO, TypeVar
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread

from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.local_store import require_digest
from jobs.records import Artifact

T = TypeVar("T")

_READS = 8
"""Files that are opened, or of which a piece is read, at a time."""
_DIGESTS = 1
"""Files of which the digest is computed at a time."""
_KEPT = 4096
_KEPT_SECONDS = 600.0
_Stamp = tuple[int, ...] | None


class VerifiedFiles:
    """The memory of one process: which files were verified, and when."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[_Stamp, float]] = OrderedDict()

    def is_known(self, artifacts: ArtifactFolder, artifact: Artifact) -> bool:
        """Whether a file was verified within ten minutes, and its inode has not changed since."""
        with artifacts.open(artifact) as file:
            stamp = _stamp(file)
        with self._lock:
            known = self._known.get(artifact.uri)
        return known is not None and known[0] == stamp and time.monotonic() - known[1] < _KEPT_SECONDS

    def verify(self, artifacts: ArtifactFolder, artifact: Artifact) -> None:
        """Read a file to its end, and require its digest."""
        with artifacts.open(artifact) as file:
            stamp = _stamp(file)
            require_digest(file, artifact.sha256, called=artifact.uri)
        with self._lock:
            self._known[artifact.uri] = (stamp, time.monotonic())
            self._known.move_to_end(artifact.uri)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)


def _stamp(file: BinaryIO) -> _Stamp:
    """Return what changes with the bytes of a local file; None over a bucket, whose objects are replaced whole."""
    try:
        status = os.fstat(file.fileno())
    except (AttributeError, UnsupportedOperation):
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True, kw_only=True)
class FileReads:
    """The reads of one process."""

    artifacts: ArtifactFolder
    verified: VerifiedFiles = field(default_factory=VerifiedFiles)
    _reads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_READS))
    _digests: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_DIGESTS))
    _verifying: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def open(self, artifact: Artifact) -> BinaryIO:
        """Open a file whose digest is proved as it is read."""
        return await self._run(self.artifacts.open, artifact)

    async def open_verified(self, artifact: Artifact, first: int) -> BinaryIO:
        """Open a file for a part of it, once the whole has proved its digest."""
        lock = self._verifying.setdefault(artifact.uri, asyncio.Lock())
        async with lock:
            if not await self._run(self.verified.is_known, self.artifacts, artifact):
                await to_thread.run_sync(self.verified.verify, self.artifacts, artifact, limiter=self._digests)
        return await self._run(self.artifacts.open, artifact, first)

    async def read(self, file: BinaryIO, size: int, digest: "hashlib._Hash") -> bytes:
        """Read a piece of a file, and add it to a digest."""

        def read_piece() -> bytes:
            piece = file.read(size)
            digest.update(piece)
            return piece

        return await self._run(read_piece)

    async def _run(self, call: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401 - those of the call
        return await to_thread.run_sync(call, *arguments, limiter=self._reads)
