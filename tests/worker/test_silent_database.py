"""PostgreSQL goes away in the middle of a job and comes back: asked ever less often, nothing half-written."""

import itertools
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.claims import claim
from jobs.database import open_database, upgrade_schema
from tests import servers
from worker.supervisor import Supervisor

LEASE_SECONDS = 20
DOWN_SECONDS = 2.5


@pytest.fixture
def server() -> Iterator[servers.PrivateServer]:
    """A PostgreSQL of this test's own: it is killed."""
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
        running = threading.Thread(target=supervisor.run)
        running.start()
        return job_id, running

    return run


def test_a_restart_in_the_middle_costs_patience_only(
    server: servers.PrivateServer, start: Any, job: Any, events: Any, log_lines: Any, eventually: Any, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job_id, running = start(
        ["started"], ["layer", 0], ["wait_for", str(gate)], ["layer", 1], ["log", "later"], ["finish"]
    )
    eventually(lambda: events(job_id, "layer"))
    server.kill(signal.SIGQUIT)
    gate.touch()
    time.sleep(DOWN_SECONDS)  # the outage
    server.restart()
    running.join(120)
    done = job(job_id)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 1, 0)
    assert [event.data["ordinal"] for event in events(job_id, "layer")] == [0, 1]
    assert len(events(job_id, "log")) == 1
    pauses = [line["pause_seconds"] for line in log_lines() if "the write is repeated" in line["event"]]
    assert pauses[:3] == [0.2, 0.4, 0.8]
    assert all(later > earlier for earlier, later in itertools.pairwise(pauses))
    # one heartbeat fits into the outage; what failed was tried again sooner than the next was due
    failed = [line for line in log_lines() if line["event"] == "heartbeat failed"]
    assert len(failed) >= 2
    assert not [line for line in log_lines() if line["event"] == "lease lost"]
