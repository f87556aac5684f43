"""The running service that routes share: settings, database, artifacts, background threads, metrics."""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request
from sqlalchemy import Engine

from api.background.maintenance import Maintenance
from api.background.metrics_cache import MetricsCache
from api.background.request_metrics import RequestMetrics
from api.live.job_watcher import JobWatcher
from api.requests.file_reads import FileReads
from api.requests.limits import Limits
from api.settings import Settings
from jobs.objects.artifacts import ArtifactFolder


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
    file_reads: FileReads
    maintenance: Maintenance
    metrics_cache: MetricsCache
    request_metrics: RequestMetrics
    job_watcher: JobWatcher
    """Wakes long polls and streams of events when their job changes."""
    limits: Limits
    imports: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))
    """Its one import at a time."""
    probe: Probe = field(default_factory=Probe)
    stopping: threading.Event
    """Set when the process is asked to end: long polls answer and streams end at once."""


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(_service)]
