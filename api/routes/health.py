"""Health probes: liveness of the process, and readiness of the service."""

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import redis
from fastapi import APIRouter
from sqlalchemy import Engine
from starlette.concurrency import run_in_threadpool

from api.problem_details import Fault, Refusal
from api.requests.auth import open_to_all
from api.requests.openapi import error_responses
from api.service import Service, ServiceOf
from catalog.record import record
from jobs.devices.registry import isolation_of_jobs
from jobs.errors import LedgerUnavailable
from jobs.schema.database import require_current_schema
from jobs.tenancy.shared_workers import sharing_of_workers
from jobs.tenancy.tenants import separation_of_tenants

_DATABASE_SECONDS = 1
_BROKER_SECONDS = 1
_KEPT_SECONDS = 1.0

router = APIRouter(tags=["health"])
_ERRORS = error_responses(500, 503, key=False)


@record
class LiveView:
    """The process answers."""

    status: Literal["alive"]
    """Always `alive`."""


@record
class ReadyView:
    """The service can take jobs; `degraded`: they may start some seconds later than usual."""

    status: Literal["ready", "degraded"]
    """`degraded`: jobs may start some seconds later than usual."""
    checks: Mapping[str, str]
    """The state of each part, by its name."""
    isolation: Mapping[str, str]
    """The walls that hold: of `jobs` those between each worker and its jobs, what keeps `tenants` apart in the ledger,
    and in `sharing` whether workers take jobs of several tenants."""


@router.get("/livez", operation_id="read_liveness", summary="Liveness", responses=_ERRORS)
@open_to_all
async def live() -> LiveView:
    """Always 200 while the process answers."""
    return LiveView(status="alive")


@router.get("/readyz", operation_id="read_readiness", summary="Readiness", responses=_ERRORS)
@open_to_all
async def ready(service: ServiceOf) -> ReadyView:
    """The state of the database, its schema and the free disk space, each within a second; without Redis `degraded`."""
    async with service.probe.lock:
        if time.monotonic() - service.probe.at > _KEPT_SECONDS:
            service.probe.checks = await _checks(service)
            service.probe.isolation = await _isolation(service)
            service.probe.at = time.monotonic()
        checks, isolation = service.probe.checks, service.probe.isolation
    failing = {name: result for name, result in checks.items() if result != "ok"}
    if failing.keys() - {"redis"}:
        raise Refusal(
            503,
            "not-ready",
            "The service is not ready",
            "; ".join(f"{name} {result}" for name, result in failing.items()),
            errors=[
                Fault(pointer=None, parameter=None, code=f"{name}_failing", message=f"{name} {result}")
                for name, result in failing.items()
            ],
            headers={"retry-after": "5"},
        )
    return ReadyView(status="degraded" if failing else "ready", checks=checks, isolation=isolation)


async def _checks(service: Service) -> dict[str, str]:
    checks = {
        "database": await _within(_DATABASE_SECONDS, lambda: _database(service)),
        "disk": await run_in_threadpool(_disk, service),
    }
    if service.settings.redis_url and not service.settings.embedded:
        checks["redis"] = await _within(_BROKER_SECONDS, lambda: _redis(service))
    return checks


async def _isolation(service: Service) -> dict[str, str]:
    """Report isolation without a verdict: an operator decides what is enough."""
    # tenants as requests see them: with the rights of the API's own role
    reports = {"jobs": _of_jobs, "tenants": separation_of_tenants, "sharing": sharing_of_workers}
    return {name: await _within(_DATABASE_SECONDS, partial(_known, each, service)) for name, each in reports.items()}


def _known(report: Callable[[Engine], str], service: Service) -> str:
    try:
        return report(service.fleet)
    except LedgerUnavailable:
        return "unknown"


def _of_jobs(fleet: Engine) -> str:
    walls = isolation_of_jobs(fleet)
    return "no worker is known" if walls is None else ", ".join(walls) or "none"


async def _within(limit_seconds: float, check: Callable[[], str]) -> str:
    """Return the result of ``check``, or that it took too long; its thread then ends by itself."""
    task = asyncio.ensure_future(run_in_threadpool(check))
    done, _ = await asyncio.wait([task], timeout=limit_seconds)
    if not done:
        task.add_done_callback(lambda late: late.exception())
        return f"does not answer within {limit_seconds:g} s"
    return task.result()


def _database(service: Service) -> str:
    try:
        require_current_schema(service.fleet)
    except Exception as error:  # noqa: BLE001 - whatever the driver raises, the probe answers
        return f"fails ({type(error).__name__})"
    return "ok"


def _disk(service: Service) -> str:
    if service.settings.ledger.bucket is not None:
        # only workers stage on a disk of their own
        return "ok"
    root = service.settings.ledger.artifact_root
    try:
        free = shutil.disk_usage(root).free
    except OSError as error:
        return f"cannot be read ({type(error).__name__})"
    floor = service.settings.disk_floor_bytes
    return "ok" if free >= floor else f"has {free:,} bytes left, below the floor of {floor:,}"


def _redis(service: Service) -> str:
    url = service.settings.redis_url or ""
    try:
        with redis.Redis.from_url(
            url, socket_connect_timeout=_BROKER_SECONDS, socket_timeout=_BROKER_SECONDS
        ) as connection:
            connection.ping()
    except redis.RedisError as error:
        return f"fails ({type(error).__name__})"
    return "ok"
