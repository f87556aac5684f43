"""PostgreSQL goes away in the middle of a job and comes back: asked ever less often, nothing half-written."""

import itertools
import math
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from jobs.queue.claims import claim
from jobs.schema.database import open_database, upgrade_schema, writing
from tests import servers
from worker.supervision.supervisor import Supervisor

pytestmark = pytest.mark.real_programs

LEASE_SECONDS = 300
"""Longer than any restart takes, however little of this machine there is."""
_END_CONNECTIONS = text(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


@pytest.fixture(scope="module")
def server() -> Iterator[servers.PrivateServer]:
    """A PostgreSQL of these tests' own: it is killed, and started again."""
    with servers.private_postgres(synchronous_commit="on") as started:
        upgrade_schema(started.url)
        yield started


@pytest.fixture
def ledger_url(server: servers.PrivateServer) -> str:
    return server.url


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Any]:
    engine = open_database(ledger_url)
    yield engine
    engine.dispose()


@pytest.fixture
def start(ledger: Any, settings: Any, scripted: Any, submitted: Any) -> Callable[..., tuple[str, threading.Thread]]:
    """Claim a new job and run its child's steps; its id, and the thread that does it."""

    def run(*steps: Any) -> tuple[str, threading.Thread]:
        job_id = submitted()
        held = claim(ledger, job_id, "test", secrets.token_hex(8), LEASE_SECONDS)
        assert held is not None
        supervisor = Supervisor(ledger, held, settings(lease_seconds=LEASE_SECONDS), scripted(*steps))
        running = threading.Thread(target=supervisor.run, daemon=True)
        running.start()
        return job_id, running

    return run


def test_a_restart_in_the_middle_costs_patience_only(
    server: servers.PrivateServer, start: Any, job: Any, events: Any, log_lines: Any, eventually: Any, tmp_path: Path
) -> None:
    def pauses() -> list[float]:
        return [line["pause_seconds"] for line in log_lines() if "the write is repeated" in line["event"]]

    def soonest_retry() -> float:
        """Between two heartbeats that failed."""
        at = [datetime.fromisoformat(each["timestamp"]) for each in log_lines() if each["event"] == "heartbeat failed"]
        return min(((later - earlier).total_seconds() for earlier, later in itertools.pairwise(at)), default=math.inf)

    gate = tmp_path / "gate"
    job_id, running = start(
        ["started"], ["layer", 0], ["wait_for", str(gate)], ["layer", 1], ["log", "later"], ["finish"]
    )
    eventually(lambda: events(job_id, "layer"))
    server.kill(signal.SIGQUIT)
    gate.touch()
    # a heartbeat is due twice a second; one that failed is tried again sooner than that
    eventually(lambda: len(pauses()) >= 3 and soonest_retry() < 0.4)
    server.restart()
    running.join(240)
    done = job(job_id)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 1, 0)
    assert [event.data["ordinal"] for event in events(job_id, "layer")] == [0, 1]
    assert len(events(job_id, "log")) == 1
    assert pauses() == [min(round(0.2 * 2**number, 1), 5.0) for number in range(len(pauses()))]
    assert not [line for line in log_lines() if line["event"] == "lease lost"]


def test_connections_that_the_server_ends_cost_no_attempt(
    ledger_url: str, start: Any, job: Any, events: Any, eventually: Any, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job_id, running = start(["started"], ["layer", 0], ["wait_for", str(gate)], ["layer", 1], ["finish"])
    eventually(lambda: events(job_id, "layer"))
    other = open_database(ledger_url)  # a connection of the job's own pool would spare itself
    with writing(other) as connection:
        ended = connection.execute(_END_CONNECTIONS).scalar_one()
    other.dispose()
    assert ended >= 1
    gate.touch()
    running.join(240)
    done = job(job_id)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 1, 0)
    assert [event.data["ordinal"] for event in events(job_id, "layer")] == [0, 1]
