"""``GET /metrics``: the ledger's counts, and this process's own, as Prometheus reads them.

Counts come from the database, so that any one API process reports on all workers. Where the database does not answer,
`kronoscope_database_up` is 0, within seconds and with status 200: a scrape that fails would report nothing.
"""

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from api.background.metrics_cache import LedgerReading
from api.background.prometheus import LedgerMetrics
from api.requests.auth import scraper_only
from api.requests.openapi import error_responses
from api.service import ServiceOf
from api.settings import Settings

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    operation_id="read_metrics",
    summary="Metrics",
    response_class=Response,
    responses={
        200: {"description": "Text format 0.0.4", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **error_responses(401, 429, 500, key=False),
    },
)
@scraper_only
async def metrics(service: ServiceOf) -> Response:
    """The metrics for Prometheus, in its text format 0.0.4; it needs the operator's token, no key."""
    reading = await service.metrics_cache.read()
    return Response(
        _text(service.settings, reading, service.limits.streams.open)
        + generate_latest(service.request_metrics.registry),
        media_type=CONTENT_TYPE_PLAIN_0_0_4,
    )


def _text(settings: Settings, reading: LedgerReading, open_streams: int) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerMetrics(reading.snapshot))
    streams = Gauge("kronoscope_http_event_streams", "Streams of events to readers now.", registry=registry)
    streams.set(open_streams)
    if settings.ledger.bucket is not None:
        # a bucket has no disk, and what workers stage on is theirs
        return generate_latest(registry)
    floor = Gauge("kronoscope_disk_floor_bytes", "Below this the service is not ready.", registry=registry)
    floor.set(settings.disk_floor_bytes)
    if reading.disk_free_bytes is not None:
        free = Gauge("kronoscope_disk_free_bytes", "Free space where artifacts are kept.", registry=registry)
        free.set(reading.disk_free_bytes)
    return generate_latest(registry)
