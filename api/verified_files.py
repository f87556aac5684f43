"""Files that were found to be what their rows say, so that a part of one can be sent without reading all of it."""

import os
import threading
import time
from collections import OrderedDict
from io import UnsupportedOperation
from typing import BinaryIO

from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.local_store import require_digest
from jobs.records import Artifact

_KEPT = 4096
_KEPT_SECONDS = 600.0
_Stamp = tuple[int, ...] | None


class VerifiedFiles:
    """The memory of one process: which files were verified, and when."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[_Stamp, float]] = OrderedDict()

    def open(self, artifacts: ArtifactFolder, artifact: Artifact, first: int) -> BinaryIO:
        """Open a verified file for a part of it.

        A file that was verified within ten minutes, and whose inode has not changed since, is not read again.
        """
        with artifacts.open(artifact) as file:
            stamp = _stamp(file)
            if not self._is_known(artifact.uri, stamp):
                require_digest(file, artifact.sha256, called=artifact.uri)
                self._remember(artifact.uri, stamp)
        return artifacts.open(artifact, first)

    def _is_known(self, uri: str, stamp: _Stamp) -> bool:
        with self._lock:
            known = self._known.get(uri)
        return known is not None and known[0] == stamp and time.monotonic() - known[1] < _KEPT_SECONDS

    def _remember(self, uri: str, stamp: _Stamp) -> None:
        with self._lock:
            self._known[uri] = (stamp, time.monotonic())
            self._known.move_to_end(uri)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)


def _stamp(file: BinaryIO) -> _Stamp:
    """Return what changes with the bytes of a local file; None over a bucket, whose objects are replaced whole."""
    try:
        status = os.fstat(file.fileno())
    except (AttributeError, UnsupportedOperation):
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
