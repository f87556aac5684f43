"""The running service that routes share: settings, database, artifacts, background threads, metrics."""

import asyncio
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from io import UnsupportedOperation
from typing import Annotated, BinaryIO

from fastapi import Depends, Request
from sqlalchemy import Engine

from api.background.maintenance import Maintenance
from api.background.metrics_cache import MetricsCache
from api.background.request_metrics import RequestMetrics
from api.live.job_watcher import JobWatcher
from api.live.stream_limits import StreamLimits
from api.settings import Settings
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


@dataclass(kw_only=True)
class Probe:
    """The last answer to the readiness probe, kept for a second, since it needs no key."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    at: float = -1e9
    checks: dict[str, str] = field(default_factory=dict)
    isolation: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Service:
    """One running API process."""

    settings: Settings
    engine: Engine
    """The ledger's database; each transaction declares its tenant, and sees no other's rows."""
    keys: Engine
    """The same for keys, whose tenant is unknown before they are found; reads them alone."""
    fleet: Engine
    """The same for devices and the jobs that are before another on them; reads these alone."""
    artifacts: ArtifactFolder
    verified_files: VerifiedFiles = field(default_factory=VerifiedFiles)
    maintenance: Maintenance
    metrics_cache: MetricsCache
    request_metrics: RequestMetrics
    job_watcher: JobWatcher
    """Wakes long polls and streams of events when their job changes."""
    stream_limits: StreamLimits
    """The open streams of events, counted against their caps."""
    probe: Probe = field(default_factory=Probe)
    stopping: threading.Event
    """Set when the process is asked to end: long polls answer and streams end at once."""


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(_service)]
