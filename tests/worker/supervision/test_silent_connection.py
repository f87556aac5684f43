"""A database behind a connection that is open and silent: nobody who kills waits for it, and no query for ever."""

import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import make_url, text

from jobs.errors import LedgerUnavailable
from jobs.queue.claims import claim
from jobs.schema.database import open_database, reading
from jobs.schema.query_limits import limit_queries
from tests.chaos.stack.proxy import LossyProxy
from tests.machine.stopwatch import Stopwatch
from worker.process.guardian import node_seconds
from worker.supervision.supervisor import Supervisor

LEASE_SECONDS = 2.0


@pytest.fixture
def dialect() -> str:
    return "postgresql"


@pytest.fixture
def proxy(ledger_url: str) -> Iterator[LossyProxy]:
    url = make_url(ledger_url)
    assert url.host is not None
    assert url.port is not None
    started = LossyProxy(url.host, url.port)
    yield started
    started.close()


@pytest.fixture
def through(ledger_url: str, proxy: LossyProxy) -> Iterator[Any]:
    """The ledger as the worker sees it."""
    url = make_url(ledger_url).set(host="127.0.0.1", port=proxy.port)
    engine = open_database(url.render_as_string(hide_password=False))
    yield engine
    proxy.keep()
    engine.dispose()


def test_a_query_ends_with_its_limit_and_the_next_one_is_answered(through: Any, proxy: LossyProxy) -> None:
    with reading(through) as connection:
        connection.execute(text("SELECT 1"))
    proxy.hush()
    watch = Stopwatch()
    with limit_queries(0.3), pytest.raises(LedgerUnavailable), reading(through) as connection:
        connection.execute(text("SELECT 1"))
    assert watch.seconds() < 5  # a new connection has three seconds, and is tried once
    proxy.keep()
    with limit_queries(5), reading(through) as connection:
        assert connection.execute(text("SELECT 2")).scalar_one() == 2


def test_all_queries_of_a_block_share_its_limit(through: Any) -> None:
    def ask_often() -> None:
        with limit_queries(0.5), reading(through) as connection:
            for _ in range(10):
                connection.execute(text("SELECT pg_sleep(0.2)"))

    with pytest.raises(LedgerUnavailable):
        ask_often()


def test_the_child_ends_within_the_lease_while_the_heartbeat_waits_in_its_query(
    through: Any, proxy: LossyProxy, settings: Any, scripted: Any, submitted: Any, log_lines: Any, eventually: Any
) -> None:
    asked = node_seconds()
    held = claim(through, submitted(), "test", secrets.token_hex(8), LEASE_SECONDS)
    assert held is not None
    chosen = settings(lease_seconds=LEASE_SECONDS)
    supervisor = Supervisor(through, held, chosen, scripted(["started"], ["ignore_sigterm"], ["sleep", 600]))
    running = threading.Thread(target=supervisor.run, args=(asked,), daemon=True)
    running.start()
    child: Any = eventually(lambda: supervisor._child)
    proxy.hush()
    silent = Stopwatch()
    child.wait(60)
    assert silent.seconds() < LEASE_SECONDS + 0.3  # the last answer came before the silence
    running.join(60)
    assert not running.is_alive()
    assert any(line["event"] == "lease lost" for line in log_lines())


def test_a_child_that_was_claimed_long_ago_is_not_even_let_begin(
    through: Any, settings: Any, scripted: Any, submitted: Any, job: Callable[[str], Any]
) -> None:
    job_id = submitted()
    held = claim(through, job_id, "test", secrets.token_hex(8), LEASE_SECONDS)
    assert held is not None
    supervisor = Supervisor(through, held, settings(lease_seconds=LEASE_SECONDS), scripted(["layer", 0], ["finish"]))
    supervisor.run(held_since=node_seconds() - LEASE_SECONDS)
    assert job(job_id).state == "running"  # what becomes of it is for the reaper to say
