"""The main application of one process: routes, middleware and background threads.

``create_app(settings)`` builds it; ``api.main:app`` builds it from the environment when a server
asks for it. No import here leads to torch.
"""

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from api.background.maintenance import Maintenance
from api.background.metrics_cache import MetricsCache
from api.background.request_metrics import RequestMetrics
from api.connections.audit_trail import AuditTrail
from api.connections.client_addresses import ClientAddresses
from api.live.job_watcher import JobWatcher
from api.requests import exception_handlers
from api.requests.auth import Reader, authenticate
from api.requests.file_reads import FileReads
from api.requests.limits import KeyLimitsMiddleware, Limits, RefusedKeysMiddleware
from api.requests.middleware import AnswersMiddleware, HeadMiddleware, SecurityMiddleware
from api.requests.openapi import check_parameters, openapi_document
from api.routes import (
    analyses,
    artifacts,
    comparison,
    dashboard,
    devices,
    estimates,
    events,
    exports,
    health,
    jobs,
    metrics,
    results,
    uploads,
    webhooks,
)
from api.service import Service
from api.settings import Settings
from jobs.objects.artifacts import open_artifacts
from jobs.queue.wakeups import WakeupSender
from jobs.schema.database import across_tenants, after_queueing, for_purpose, open_database, require_current_schema
from jobs.schema.tenant_declaration import EVENTS, FLEET, KEYS

_DESCRIPTION = """\
Measure the curvature of trained neural networks, layer by layer.

Submit a job document with `POST /v1/jobs`, follow it with `GET /v1/jobs/{job_id}?wait=30` or `/events`, read
`/results`, `/layers`, `/log` and `/artifacts`. `POST /v1/estimates` takes the same document, and estimates the memory
and time of the job. Every error is `application/problem+json` (RFC 9457).
"""


def create_app(settings: Settings) -> FastAPI:
    """Build the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = _open(settings, limits, request_metrics)
        try:
            await run_in_threadpool(require_current_schema, service.fleet)
            app.state.service = service
            service.maintenance.start()
            try:
                async with service.job_watcher.running():
                    yield
            finally:
                await run_in_threadpool(service.maintenance.stop)
        finally:
            audit_trail.write()
            service.metrics_cache.close()
            service.engine.dispose()

    app = FastAPI(
        title="Kronoscope",
        version=version("kronoscope"),
        description=_DESCRIPTION,
        lifespan=lifespan,
        # closed by default: a route is open only where its endpoint says so
        dependencies=[Depends(authenticate), Depends(check_parameters)],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    limits = Limits(settings)
    app.state.connections = set()  # the server that runs it puts its own here
    request_metrics = RequestMetrics(lambda: limits.long_polls.open, lambda: len(app.state.connections))
    addresses = app.state.addresses = ClientAddresses(settings.trusted_proxies)
    audit_trail = AuditTrail(addresses)
    app.add_middleware(KeyLimitsMiddleware, limits=limits)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(RefusedKeysMiddleware, addresses=addresses, limits=limits)
    app.add_middleware(SecurityMiddleware, embedded=settings.embedded, database_seconds=settings.database_seconds)
    app.add_middleware(AnswersMiddleware, notes=(audit_trail.record, request_metrics.count))
    exception_handlers.install(app)
    rooms = (jobs, comparison, events, results, artifacts, exports, estimates, analyses, devices, health, metrics)
    for room in (*rooms, dashboard, uploads, webhooks):
        app.include_router(room.router)

    @app.get("/openapi.json", include_in_schema=False)
    def openapi(_: Reader) -> JSONResponse:
        return JSONResponse(openapi_document(app))

    app.openapi = lambda: openapi_document(app)  # type: ignore[method-assign]  # FastAPI's own extension point
    return app


def _open(settings: Settings, limits: Limits, request_metrics: RequestMetrics) -> Service:
    engine = open_database(settings.ledger.database_url, tenants_apart=True)
    # embedded mode has no broker: its worker polls the database
    wakeups = None
    if settings.redis_url and not settings.embedded:
        wakeups = WakeupSender(engine, settings.redis_url)
        after_queueing(engine, wakeups.wake)
    if settings.ledger.bucket is None:
        settings.ledger.artifact_root.mkdir(parents=True, exist_ok=True)
    stopping = threading.Event()
    artifacts = open_artifacts(settings.ledger)
    return Service(
        settings=settings,
        engine=engine,
        keys=for_purpose(engine, KEYS),
        fleet=for_purpose(engine, FLEET),
        artifacts=artifacts,
        file_reads=FileReads(artifacts=artifacts),
        maintenance=Maintenance(across_tenants(engine), settings.ledger, wakeups),
        metrics_cache=MetricsCache(settings),
        request_metrics=request_metrics,
        job_watcher=JobWatcher(for_purpose(engine, EVENTS), stopping),
        limits=limits,
        stopping=stopping,
    )


def __getattr__(name: str) -> FastAPI:
    """``app``, built when a server asks for it: importing this module reads no environment."""
    if name == "app":
        return create_app(Settings.from_environment(os.environ))
    raise AttributeError(name)
