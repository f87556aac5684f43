"""``GET /metrics``: the ledger's counts, and this process's own, as Prometheus reads them.

Counts come from the database, so any one API process tells of all workers. A database that does not answer is
what `kronoscope_database_up` says, within seconds and with status 200: a scrape that fails could say nothing.
"""

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from api.background.metrics_cache import Sight
from api.background.prometheus import LedgerMetrics
from api.requests.auth import for_the_scraper
from api.requests.openapi import refusals_to_scraper
from api.service import ServiceOf
from api.settings import Settings

router = APIRouter(tags=["health"])


@router.get("/metrics", summary="Metrics", response_class=Response, responses=refusals_to_scraper())
@for_the_scraper
async def metrics(service: ServiceOf) -> Response:
    """For Prometheus, in its text format 0.0.4; it needs the operator's token, no key."""
    seen = await service.lookout.look()
    return Response(
        _text(service.settings, seen, service.streams.under_way) + generate_latest(service.traffic.registry),
        media_type=CONTENT_TYPE_PLAIN_0_0_4,
    )


def _text(settings: Settings, seen: Sight, streams_under_way: int) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerMetrics(seen.census))
    streams = Gauge("kronoscope_http_event_streams", "Streams of events to readers now.", registry=registry)
    streams.set(streams_under_way)
    if settings.ledger.bucket is not None:
        # a bucket has no disk, and what workers stage on is theirs
        return generate_latest(registry)
    floor = Gauge("kronoscope_disk_floor_bytes", "Below this the service is not ready.", registry=registry)
    floor.set(settings.disk_floor_bytes)
    if seen.disk_free_bytes is not None:
        free = Gauge("kronoscope_disk_free_bytes", "Free space where artifacts are kept.", registry=registry)
        free.set(seen.disk_free_bytes)
    return generate_latest(registry)
