"""`/metrics`: names and labels from closed sets, counts as the ledger has them, and an answer when it has none."""

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Connection, event, text

from api.background.metrics_cache import LedgerReading, MetricsCache
from api.settings import Settings
from catalog.frames import Failed
from jobs.metrics.snapshot import take_snapshot
from jobs.queue.attempt_endings import fail, finish
from jobs.queue.claims import claim
from jobs.schema.database import open_database
from jobs.settings import LedgerSettings
from tests.api.conftest import Embedded, Keyed
from tests.api.server import METRICS_TOKEN
from tests.conftest import Databases
from tests.machine.stopwatch import until
from tests.ops.test_alert_rules import rules

LABELS = {"limit", "reason", "state", "reconciler", "category", "code", "kind", "route", "method", "status", "le"}
UNITS = (
    "_seconds",
    "_bytes",
    "_total",
    "_fds",
    "_up",
    "_connections",
    "_jobs",
    "_expired",
    "_polls",
    "_streams",
    "_workers",
    "_slots",
    "_devices",
    "_draining",
)
DOCUMENT = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}
EVIL = 'x"} 1\nkronoscope_evil{a="<script>\u2028'


def families(client: httpx.Client) -> dict[str, Metric]:
    """Of a scrape that saw the ledger: on a machine that is busy enough the first look takes too long."""
    for _ in range(20):
        answer = client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        found = {family.name: family for family in text_string_to_metric_families(answer.text)}
        if value(found, "kronoscope_database_up"):
            return found
    raise AssertionError("twenty scrapes did not see the ledger")


def value(found: dict[str, Metric], name: str, **labels: str) -> float | None:
    """Of one sample; a counter's ends in `_total`."""
    samples = [sample for family in found.values() for sample in family.samples]
    return next((each.value for each in samples if each.name == name and each.labels == labels), None)


@pytest.fixture
def scraper(keyed: Keyed) -> Iterator[httpx.Client]:
    with keyed.server.client(METRICS_TOKEN) as client:
        yield client


def test_names_and_labels_are_ours_and_nobody_else_s(scraper: httpx.Client, ours: httpx.Client) -> None:
    for request in (
        ours.build_request("GET", "/v1/jobs/" + "0" * 36),
        ours.build_request("GET", "/v1/jobs", params={"kind": EVIL}),
        ours.build_request("GET", "/tenant-canary"),
        ours.build_request("CANARY", "/v1/jobs"),
        ours.build_request("POST", "/v1/jobs", json={"labels": {"name": EVIL}}),
    ):
        ours.send(request)
    found = families(scraper)
    for family in found.values():
        assert family.name.startswith("kronoscope_")
        assert family.documentation
        for sample in family.samples:
            assert set(sample.labels) <= LABELS, sample
            plain = re.sub(r"_(bucket|count|sum|created)$", "", sample.name)
            assert plain.endswith(UNITS), sample.name
            assert "canary" not in repr(sample.labels).lower()
            assert "evil" not in repr(sample.labels)
    assert value(found, "kronoscope_http_requests_total", route="/v1/jobs/{job_id}", method="GET", status="404")
    assert value(found, "kronoscope_http_requests_total", route="none", method="GET", status="404")
    assert value(found, "kronoscope_http_requests_total", route="/v1/jobs", method="other", status="405")
    assert value(found, "kronoscope_http_request_duration_seconds_count", route="/v1/jobs/{job_id}", method="GET")


def test_every_counter_that_alerts_stand_on_begins_at_zero(embedded: Embedded) -> None:
    with embedded.server.client() as client:
        found = families(client)
    for name in ("attempts", "attempts_drained", "leases_reaped", "fenced_writes"):
        assert value(found, f"kronoscope_{name}_total") == 0, name
    for state in ("succeeded", "failed", "cancelled"):
        assert value(found, "kronoscope_jobs_ended_total", state=state) == 0
    for category in ("usage", "transient", "fatal"):
        assert value(found, "kronoscope_jobs_failed_total", category=category) == 0
    for state in ("queued", "running", "waiting", "cancelling"):
        assert value(found, "kronoscope_jobs", state=state) == 0
    assert value(found, "kronoscope_database_up") == 1
    free, floor = (value(found, f"kronoscope_disk_{what}_bytes") for what in ("free", "floor"))
    assert free is not None
    assert free > floor == 256 * 2**20


def test_what_the_alerts_read_is_told(embedded: Embedded) -> None:
    with embedded.server.client() as client:
        told = families(client)
    # a parser leaves the ending out of a counter's name
    names = {f"{name}_total" if family.type == "counter" else name for name, family in told.items()}
    read = {name for rule in rules() for name in re.findall(r"kronoscope_\w+", rule["expr"])}
    assert len(read) > 10
    assert read <= names


def test_it_tells_what_other_processes_did(keyed: Keyed, scraper: httpx.Client, ours: httpx.Client) -> None:
    before = families(scraper)
    ids = [ours.post("/v1/jobs", json=DOCUMENT).json()["id"] for _ in range(3)]
    claims = [claim(keyed.engine, job_id, "w", f"token-{job_id}", 45) for job_id in ids[:2]]
    failure = Failed(category="fatal", code="unexpected", message=EVIL, pointer=None, layer=EVIL, detail=None)
    for held, end in zip(claims, (finish, lambda engine, mine: fail(engine, mine, failure)), strict=True):
        assert held is not None
        end(keyed.engine, held)
    after = families(scraper)

    def grown(name: str, **labels: str) -> float:
        return (value(after, name, **labels) or 0) - (value(before, name, **labels) or 0)

    assert grown("kronoscope_jobs", state="queued") == 1
    assert grown("kronoscope_attempts_total") == 2
    assert grown("kronoscope_jobs_ended_total", state="succeeded") == 1
    assert grown("kronoscope_jobs_failed_total", category="fatal") == 1
    assert grown("kronoscope_attempts_failed_total", category="fatal", code="unexpected") == 1
    assert value(after, "kronoscope_queue_oldest_age_seconds") > 0  # type: ignore[operator]

    def since_a_round() -> float:
        return value(families(scraper), "kronoscope_reconciler_last_round_age_seconds", reconciler="reaper") or 1e9

    until(lambda: since_a_round() < 60)


def test_a_poll_that_waits_is_seen(keyed: Keyed, scraper: httpx.Client, ours: httpx.Client) -> None:
    job_id = ours.post("/v1/jobs", json=DOCUMENT).json()["id"]

    def poll() -> int:
        with keyed.server.client(keyed.key) as other:
            return other.get(f"/v1/jobs/{job_id}", params={"wait": 30}).status_code

    with ThreadPoolExecutor(1) as pool:
        polled = pool.submit(poll)
        until(lambda: value(families(scraper), "kronoscope_http_long_polls") == 1)
        assert ours.post(f"/v1/jobs/{job_id}:cancel").status_code == 202
        assert polled.result() == 200
    assert value(families(scraper), "kronoscope_http_long_polls") == 0


def test_a_stream_that_is_read_is_seen(scraper: httpx.Client, ours: httpx.Client) -> None:
    job_id = ours.post("/v1/jobs", json=DOCUMENT).json()["id"]
    assert value(families(scraper), "kronoscope_http_event_streams") == 0
    with ours.stream("GET", f"/v1/jobs/{job_id}/events", headers={"accept": "text/event-stream"}) as answer:
        assert answer.status_code == 200
        assert value(families(scraper), "kronoscope_http_event_streams") == 1
    assert value(
        families(scraper),
        "kronoscope_http_requests_total",
        route="/v1/jobs/{job_id}/events",
        method="GET",
        status="200",
    )


def test_a_look_that_ended_when_nobody_waited_is_not_told_later(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = databases.migrated("postgresql")
    engine = open_database(url)
    settings = Settings(
        ledger=LedgerSettings(database_url=url, artifact_root=tmp_path), embedded=True, metrics_seconds=0
    )
    monkeypatch.setattr("api.background.metrics_cache._READ_SECONDS", 0.2)
    metrics_cache = MetricsCache(settings)

    async def look() -> tuple[LedgerReading, LedgerReading]:
        with engine.begin() as connection:
            connection.execute(text("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE"))
            late = await metrics_cache.read()
        assert metrics_cache._pending is not None
        await metrics_cache._pending
        with engine.begin() as connection:
            connection.execute(text(FILL), {"state": "queued", "first": 1, "last": 3})
        monkeypatch.setattr("api.background.metrics_cache._READ_SECONDS", 300)
        return late, await metrics_cache.read()

    try:
        late, then = asyncio.run(look())
    finally:
        metrics_cache.close()
        engine.dispose()
    assert late.snapshot is None
    assert then.snapshot is not None
    assert then.snapshot.active_jobs["queued"] == 3


FILL = """
INSERT INTO jobs (id, tenant_id, kind, document, document_sha256, state, needs_bytes, created_at, queued_at)
SELECT md5(n::text), 'local', 'capacity', '{}', '', CAST(:state AS text), 1,
       clock_timestamp() - make_interval(secs => n), clock_timestamp() - make_interval(secs => n)
FROM generate_series(CAST(:first AS int), CAST(:last AS int)) AS n
"""


def test_a_snapshot_costs_no_more_with_many_jobs(databases: Databases) -> None:
    """What it reads, as PostgreSQL plans it: no sequential scan over jobs, so ended ones cost nothing."""
    engine = open_database(databases.migrated("postgresql"))
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text(FILL), {"state": "succeeded", "first": 1, "last": 30_000})
        connection.execute(text(FILL), {"state": "queued", "first": 30_001, "last": 32_000})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    plans: list[str] = []

    def explain(connection: Connection, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT") and re.search(r"\bFROM jobs\b", statement):
            raw = connection.connection.dbapi_connection
            assert raw is not None
            cursor = raw.cursor()
            cursor.execute("EXPLAIN " + statement, parameters)
            plans.append("\n".join(row[0] for row in cursor.fetchall()))

    event.listen(engine, "before_cursor_execute", explain)
    snapshot = take_snapshot(engine)
    engine.dispose()
    assert snapshot.active_jobs["queued"] == 2_000
    assert len(plans) == 4
    assert [plan for plan in plans if "Seq Scan" in plan] == []
