"""Wake-ups: after a commit that queues work a message to all who listen on the ledger's channel, and to no other."""

import contextlib
import json
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from redis.client import PubSub
from redis.exceptions import NoPermissionError
from sqlalchemy import Engine, select

from catalog.requests.job import JobDocument
from jobs.queue.wakeups import WakeupSender
from jobs.records import LOCAL_TENANT
from jobs.repository.submission import submit
from jobs.schema.database import (
    after_queueing,
    for_tenant,
    note_queued,
    open_database,
    reading,
    writing,
)
from jobs.schema.tables import jobs
from tests import servers
from tests.conftest import Databases
from tests.jobs.conftest import POSTGRESQL_OFTEN
from tests.machine.stopwatch import until

COMPOSE = Path(__file__).resolve().parents[3] / "docker-compose.yml"
SECONDS = 240

Sender = Callable[..., WakeupSender]


@pytest.fixture(scope="module")
def server() -> Iterator[servers.PrivateServer]:
    with servers.private_redis() as started:
        yield started


@pytest.fixture
def sender(ledger: Engine, server: servers.PrivateServer) -> Iterator[Sender]:
    """A started sender, which the ledger's commits wake."""
    started = []

    def start(url: str = server.url) -> WakeupSender:
        made = WakeupSender(ledger, url)
        after_queueing(ledger, made.wake)
        made.start()
        started.append(made)
        return made

    yield start
    for each in started:
        each.stop(SECONDS)


@pytest.fixture
def heard(server: servers.PrivateServer) -> Iterator[PubSub]:
    """A subscription to the channels of all ledgers."""
    with redis.Redis.from_url(server.url) as client, client.pubsub() as subscription:
        subscription.psubscribe("/kronoscope.*")
        assert subscription.get_message(timeout=SECONDS)["type"] == "psubscribe"
        yield subscription


def next_of(heard: PubSub, seconds: float = SECONDS) -> dict[str, Any] | None:
    message: dict[str, Any] | None = heard.get_message(timeout=seconds)
    return message


def test_the_call_comes_after_the_commit_and_not_where_nothing_was_queued(ledger: Engine, queued: Any) -> None:
    there: list[int] = []

    def look() -> None:
        with reading(ledger) as connection:
            there.append(len(connection.execute(select(jobs.c.id)).all()))

    after_queueing(ledger, look)
    queued()
    assert there == [1]
    with writing(for_tenant(ledger, LOCAL_TENANT)) as connection:
        note_queued(connection)
    assert there == [1, 1]  # a derived engine is heard too
    with writing(ledger) as connection:
        connection.execute(select(jobs.c.id))
    with contextlib.suppress(ZeroDivisionError), writing(ledger) as connection:
        note_queued(connection)
        raise ZeroDivisionError
    assert there == [1, 1]


def test_a_message_carries_no_job_and_those_of_a_moment_are_one(
    sender: Sender, heard: PubSub, document: Callable[..., JobDocument], ledger: Engine
) -> None:
    made = sender()
    channel = f"/kronoscope.{made.exchange.name}".encode()
    assert next_of(heard) is not None  # the first, at its start
    ids = [submit(ledger, LOCAL_TENANT, document()).job.id for _ in range(20)]
    made.stop(SECONDS)
    messages = []
    while (message := next_of(heard, 1)) is not None:
        messages.append(message)
    assert 1 <= len(messages) <= 20
    assert {message["channel"] for message in messages} == {channel}
    said = b"".join(message["data"] for message in messages).decode()
    assert not any(job_id in said for job_id in ids)
    assert {json.loads(message["data"])["body"] for message in messages} == {""}


def test_a_burst_makes_few_messages(
    sender: Sender, heard: PubSub, monkeypatch: pytest.MonkeyPatch, document: Callable[..., JobDocument], ledger: Engine
) -> None:
    """Each agent looks once for each message: a thousand submissions in a moment are not to make a thousand looks."""
    going_on = threading.Event()
    monkeypatch.setattr("jobs.queue.wakeups.time.sleep", lambda _: going_on.wait(SECONDS))
    made = sender()
    assert next_of(heard) is not None
    for _ in range(20):
        submit(ledger, LOCAL_TENANT, document())
    going_on.set()
    until(lambda: next_of(heard) is not None, SECONDS, "what came meanwhile is told")
    made.stop(SECONDS)
    assert next_of(heard, 1) is not None  # the last one
    assert next_of(heard, 0.5) is None


def test_a_channel_is_one_ledger_s_whoever_asks(databases: Databases, ledger: Engine, ledger_url: str) -> None:
    again = open_database(ledger_url, tenants_apart=True)
    other = open_database(databases.migrated("postgresql"))
    names = [WakeupSender(each, "redis://127.0.0.1:1/0").exchange.name for each in (ledger, again, other)]
    assert names[0] == names[1] != names[2]
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)
    again.dispose()
    other.dispose()


@pytest.mark.parametrize("dialect", POSTGRESQL_OFTEN)
def test_a_broker_that_is_silent_or_gone_delays_and_fails_no_commit(
    sender: Sender,
    server: servers.PrivateServer,
    document: Callable[..., JobDocument],
    ledger: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender waits for ten minutes here; a commit that waited for it would too."""
    monkeypatch.setitem(WakeupSender._publish.__globals__, "_SOCKET_SECONDS", 600)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        made = sender(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        accepted, _ = silent.accept()
        for _ in range(5):
            assert submit(ledger, LOCAL_TENANT, document()).created
        assert made.failing == {}
        accepted.close()
    until(lambda: made.failing, SECONDS, "the sender has given up")
    made.wake()
    assert submit(ledger, LOCAL_TENANT, document()).created
    made._redis_url = server.url  # or its last two messages would look for the other one, two seconds each


@pytest.mark.parametrize("dialect", POSTGRESQL_OFTEN)
def test_after_a_broker_came_back_wakeups_are_heard_again(
    sender: Sender, server: servers.PrivateServer, document: Callable[..., JobDocument], ledger: Engine
) -> None:
    server.kill()
    made = sender()
    until(lambda: made.failing, SECONDS, "it finds nobody there")
    server.restart()
    with redis.Redis.from_url(server.url) as client, client.pubsub() as subscription:
        subscription.subscribe(f"/kronoscope.{made.exchange.name}")
        assert subscription.get_message(timeout=SECONDS)["type"] == "subscribe"
        submit(ledger, LOCAL_TENANT, document())
        assert subscription.get_message(timeout=SECONDS)["type"] == "message"
    until(lambda: not made.failing, SECONDS, "it works again")


@pytest.mark.parametrize("dialect", POSTGRESQL_OFTEN)
def test_the_user_of_compose_sends_and_hears_wakeups_and_does_nothing_else(
    ledger: Engine, server: servers.PrivateServer, heard: PubSub
) -> None:
    (rules,) = re.findall(r"user kronoscope on >%s (.*?)\\n", COMPOSE.read_text())
    name, password = f"test-{secrets.token_hex(4)}", secrets.token_hex(16)
    parsed = urlsplit(server.url)
    theirs = parsed._replace(netloc=f"{name}:{password}@{parsed.hostname}:{parsed.port}").geturl()
    with redis.Redis.from_url(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", name, "on", f">{password}", *rules.split())
    made = WakeupSender(ledger, theirs)
    made.start()
    made.stop(SECONDS)
    assert next_of(heard) is not None
    with redis.Redis.from_url(theirs) as client, client.pubsub() as subscription:
        client.ping()
        subscription.subscribe(f"/kronoscope.{made.exchange.name}")
        for words in (
            ("SET", "key", "1"),
            ("GET", "key"),
            ("LPUSH", "celery", "1"),
            ("KEYS", "*"),
            ("PUBLISH", "another", "1"),
            ("SUBSCRIBE", "another"),
            ("PSUBSCRIBE", "*"),
            ("FLUSHALL",),
            ("CLIENT", "LIST"),
            ("EVAL", "return 1", 0),
            ("CONFIG", "GET", "*"),
        ):
            with pytest.raises(NoPermissionError):
                client.execute_command(*words)
