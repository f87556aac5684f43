"""Wake-ups at a real Redis: they never pile up, and the user that compose makes may count them."""

import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from sqlalchemy import Engine, delete, func, select, text, update

from api.background.maintenance import WakeupSender
from jobs.codec import parse_document
from jobs.queue.broker_backlog import QUEUE
from jobs.queue.outbox import MAX_OUTSTANDING, relay
from jobs.records import LOCAL_TENANT
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, reading, writing
from jobs.schema.tables import outbox
from tests.api import seeding
from tests.conftest import Databases

COMPOSE = Path(__file__).resolve().parents[3] / "docker-compose.yml"
QUEUED = 10_000
ROUNDS = 30


@pytest.fixture
def broker(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Redis database of its own on the test server; no test here is about one that takes long to answer."""
    monkeypatch.setattr("api.background.maintenance._BROKER_SECONDS", 60)
    monkeypatch.setattr("jobs.queue.broker_backlog._SECONDS", 60)
    chosen = urlsplit(redis_url)._replace(path="/13").geturl()
    with redis.Redis.from_url(chosen) as client:
        client.flushdb()
        yield chosen
        client.flushdb()


@pytest.fixture
def backlog(databases: Databases) -> Iterator[Engine]:
    """A ledger with ten thousand queued jobs."""
    engine = open_database(databases.migrated("postgresql"))
    submit(engine, LOCAL_TENANT, parse_document(seeding.raw()))
    columns = "tenant_id, kind, document, document_sha256, state, created_at, queued_at"
    copies = (
        f"INSERT INTO jobs (id, {columns}) SELECT gen_random_uuid(), {columns} FROM jobs, generate_series(2, :count)"
    )
    bells = "INSERT INTO outbox (id, job_id, tenant_id, created_at) SELECT gen_random_uuid(), id, tenant_id, created_at"
    with writing(engine) as connection:
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text(copies), {"count": QUEUED})
        connection.execute(delete(outbox))
        connection.execute(text(f"{bells} FROM jobs"))
    yield engine
    engine.dispose()


def nobody_answered(engine: Engine) -> None:
    """Let the time pass after which a wake-up is sent again."""
    with writing(engine) as connection:
        connection.execute(update(outbox).where(outbox.c.sent_at.is_not(None)).values(sent_at=ledger_now(-16)))


def test_without_workers_a_backlog_of_ten_thousand_takes_no_more_of_redis(backlog: Engine, broker: str) -> None:
    wakeups = WakeupSender(broker)
    with redis.Redis.from_url(broker) as client:
        sent = 0
        for _ in range(ROUNDS):
            sent += relay(backlog, wakeups.send, 15, wakeups.backlog)
            nobody_answered(backlog)
        assert client.llen(QUEUE) == sent == MAX_OUTSTANDING
        assert int(client.memory_usage(QUEUE, samples=0)) < 4096 * MAX_OUTSTANDING
        # a worker takes ten of them: there is room for ten
        client.lpop(QUEUE, 10)
        assert relay(backlog, wakeups.send, 15, wakeups.backlog) == 10
        # the broker loses all of them: they are sent again
        client.flushdb()
        nobody_answered(backlog)
        assert relay(backlog, wakeups.send, 15, wakeups.backlog) == MAX_OUTSTANDING
    wakeups.close()


def test_a_broker_that_cannot_be_asked_marks_nothing_as_rung_for(ledger: Engine) -> None:
    submit(ledger, LOCAL_TENANT, parse_document(seeding.raw()))
    wakeups = WakeupSender("redis://127.0.0.1:1/0")
    with pytest.raises(redis.RedisError):
        relay(ledger, wakeups.send, 15, wakeups.backlog)
    wakeups.close()
    with reading(ledger) as connection:
        assert connection.execute(select(func.count()).where(outbox.c.sent_at.is_not(None))).scalar_one() == 0


def test_the_user_of_compose_may_ring_and_count(ledger: Engine, broker: str) -> None:
    (rules,) = re.findall(r"user kronoscope on >%s (.*?)\\n", COMPOSE.read_text())
    name, password = f"test-{secrets.token_hex(4)}", secrets.token_hex(16)
    parsed = urlsplit(broker)
    theirs = parsed._replace(netloc=f"{name}:{password}@{parsed.hostname}:{parsed.port}").geturl()
    submit(ledger, LOCAL_TENANT, parse_document(seeding.raw()))
    with redis.Redis.from_url(broker) as admin:
        admin.execute_command("ACL", "SETUSER", name, "on", f">{password}", *rules.split())
        try:
            with redis.Redis.from_url(theirs) as client, pytest.raises(redis.exceptions.NoPermissionError):
                client.flushall()
            wakeups = WakeupSender(theirs)
            assert relay(ledger, wakeups.send, 15, wakeups.backlog) == 1
            assert wakeups.backlog() == 1
            wakeups.close()
        finally:
            admin.execute_command("ACL", "DELUSER", name)
