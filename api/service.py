"""What the routes stand on: settings, the ledger's engine, the artifact folder, the caretaker, what is counted."""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import Engine

from api.background.maintenance import Caretaker
from api.background.metrics_cache import Lookout
from api.background.request_metrics import Traffic
from api.live.event_stream import Streams
from api.live.job_watcher import Watch
from api.settings import Settings
from jobs.objects.artifacts import ArtifactFolder


@dataclass(kw_only=True)
class Probe:
    """The last answer to the readiness probe, kept for a moment: anyone may ask for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    at: float = -1e9
    checks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Service:
    """One running front door."""

    settings: Settings
    engine: Engine
    artifacts: ArtifactFolder
    caretaker: Caretaker
    lookout: Lookout
    traffic: Traffic
    watch: Watch
    """What long polls and streams of events wait at."""
    streams: Streams
    """Streams of events under way, counted against their caps."""
    probe: Probe = field(default_factory=Probe)
    stopping: threading.Event
    """Set when the process is asked to end: long polls answer and streams end at once."""


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(_service)]
