"""Redis is a replica, full or away, or sends what is no message: the worker stays, and wake-ups work."""

import base64
import functools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Engine

from tests import servers
from tests.worker.test_celery import CELERY, USAGE, Process, channel_of, ring
from worker.app import create_app

COMPOSE = Path(__file__).resolve().parents[2] / "docker-compose.yml"
HEADERS = {"task": "worker.tasks.ring", "id": "x", "argsrepr": None}
"""As an earlier version sent them, to a task that there is no more."""
PROPERTIES = {
    "delivery_tag": "t",
    "delivery_info": {"exchange": "", "routing_key": "celery"},
    "body_encoding": "base64",
}
MALFORMED = [
    *("[]", "{}", "null", "1", '"text"', "{this is not a message", "\ud800", "[" * 5000, "NaN", ""),
    json.dumps({"properties": [], "headers": {}, "body": ""}),
    json.dumps({"properties": PROPERTIES, "headers": None, "body": "e30="}),
    json.dumps({"properties": PROPERTIES, "headers": [], "body": "?"}),
    json.dumps({"properties": PROPERTIES, "headers": HEADERS, "body": 7}),
    json.dumps({"properties": PROPERTIES, "headers": HEADERS | {"eta": [], "expires": {}}, "body": "W10="}),
    json.dumps({"properties": PROPERTIES, "headers": HEADERS | {"task": []}, "body": "W10="}),
    json.dumps({"properties": PROPERTIES, "headers": HEADERS | {"id": {}}, "body": "e30="}),
    json.dumps({"properties": PROPERTIES | {"delivery_tag": []}, "headers": HEADERS, "body": "W10="}),
]


@pytest.fixture
def dialect() -> str:
    return "postgresql"


@pytest.fixture(scope="module")
def server() -> Iterator[servers.PrivateServer]:
    """A Redis of these tests' own: it is made a replica, filled and killed."""
    with servers.private_redis() as started:
        yield started


@pytest.fixture
def admin(server: servers.PrivateServer) -> Iterator["redis.Redis[Any]"]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def start(ledger_url: str, server: servers.PrivateServer, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start a worker that finds jobs by wake-ups alone."""
    started = []

    def run(broker: str | None = None) -> Process:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KRONOSCOPE_")}
        environment = inherited | {
            "PATH": str(Path(sys.executable).parent),
            "PYTHONPATH": ":".join(sys.path[1:]),
            "KRONOSCOPE_DATABASE_URL": ledger_url,
            "KRONOSCOPE_REDIS_URL": broker or server.url,
            "KRONOSCOPE_ARTIFACTS": str(tmp_path / "artifacts"),
            "KRONOSCOPE_MODEL_STORE": str(tmp_path / "store"),
            "KRONOSCOPE_POLL_SECONDS": "3600",
            "OMP_NUM_THREADS": "1",
            "KRONOSCOPE_THREADS": "1",
        }
        process = Process(CELERY, environment, tmp_path)
        started.append(process)
        return process

    yield run
    for process in started:
        process.stop()


@pytest.fixture
def wakes(
    ledger: Engine,
    server: servers.PrivateServer,
    submitted: Callable[..., str],
    job: Callable[[str], Any],
    eventually: Any,
) -> Callable[[Process], None]:
    """``wakes(process)``: a wake-up reaches it, and it does the job."""

    def ask(process: Process) -> None:
        job_id = submitted(**USAGE)
        with redis.Redis.from_url(server.url) as client:
            heard_by = functools.partial(client.pubsub_numsub, channel_of(ledger))
            eventually(lambda: process.popen.poll() is not None or heard_by()[0][1] > 0)
        ring(ledger, server.url)
        eventually(lambda: process.popen.poll() is not None or job(job_id).state == "failed")
        assert process.popen.poll() is None, process.raw[-20:]

    return ask


def connections(process: Process) -> int:
    """How often it has connected to its broker."""
    return sum("Connected to" in line for line in process.raw)


def test_what_is_no_message_ends_no_worker(start: Any, wakes: Any, admin: Any, eventually: Any, ledger: Engine) -> None:
    process = start()
    eventually(lambda: process.said("ready"))
    for text in MALFORMED:
        assert admin.publish(channel_of(ledger), text.encode(errors="surrogatepass")) == 1
        assert process.popen.poll() is None, text
    wakes(process)
    assert admin.pubsub_numsub(channel_of(ledger))[0][1] == 1
    assert connections(process) == 1  # nothing made it connect anew


def test_no_message_fills_the_log_or_reaches_celery(
    start: Any, wakes: Any, admin: Any, eventually: Any, ledger: Engine
) -> None:
    process = start()
    eventually(lambda: process.said("ready"))
    known = "11111111-2222-4333-8444-555555555555"
    long, ahead, calls = "x" * 5_000_000, "2099-01-01T00:00:00+00:00", {"task": "evil", "args": [], "kwargs": {}}
    embedded = {"callbacks": [calls], "errbacks": [calls], "chain": [calls], "chord": None}
    body = base64.b64encode(json.dumps([["x"], {}, embedded]).encode()).decode()
    for headers in (
        {"id": long},
        {"id": known, "task": long},
        {"id": known, "argsrepr": long, "kwargsrepr": long, "origin": long, "shadow": long, "root_id": long},
        {"id": known, "eta": ahead, "expires": "a" * 100_000, "retries": 10**6, "timelimit": [0, 0]},
    ):
        text = json.dumps({"properties": PROPERTIES, "headers": HEADERS | headers, "body": body})
        for _ in range(3):
            admin.publish(channel_of(ledger), text)  # Redis ends a subscription that is too far behind
            admin.lpush("celery", text)  # where earlier versions had their queue, and Celery has its own
    wakes(process)
    assert sum(map(len, process.raw)) < 20_000
    assert not process.said("evil")
    assert admin.llen("celery") == 12  # nothing is taken from there


@pytest.mark.nightly(
    covered_by=(
        # its user may write no key, and misses nothing
        "tests/worker/test_broker_faults.py::test_the_user_of_compose_runs_no_scripts_and_needs_none",
    )
)
def test_a_worker_writes_no_key(start: Any, wakes: Any, admin: Any, eventually: Any) -> None:
    """So that what kills a worker leaves nothing in Redis, and its user needs no right to any key."""
    process = start()
    eventually(lambda: process.said("ready"))
    wakes(process)
    process.stop(signal.SIGKILL)
    assert admin.keys() == []


def test_a_replica_and_a_full_server_carry_wakeups(
    start: Any, wakes: Any, admin: Any, eventually: Any, ledger: Engine
) -> None:
    """A replica is what a worker is connected to that stayed with the former primary after a failover."""
    running = start()
    eventually(lambda: running.said("ready"))
    admin.replicaof("127.0.0.1", "1")
    begun = start()
    eventually(lambda: begun.said("ready") or begun.popen.poll() is not None)
    wakes(running)
    begun.stop()
    admin.replicaof("NO", "ONE")
    admin.config_set("maxmemory", "1")
    admin.client_kill_filter(_type="pubsub", skipme=True)
    eventually(lambda: connections(running) == 2)
    wakes(running)
    admin.config_set("maxmemory", "0")


@pytest.mark.nightly(
    covered_by=(
        "tests/chaos/test_kill_matrix.py::test_every_job_ends_as_if_nobody_had_killed_anything[redis-before_claim]",
    )
)
def test_one_that_was_killed_is_waited_for(start: Any, wakes: Any, server: Any, eventually: Any) -> None:
    process = start()
    eventually(lambda: process.said("ready"))
    server.kill()
    eventually(lambda: process.said("Connection refused"))
    server.restart()
    wakes(process)
    assert create_app("redis://").conf.broker_connection_max_retries is None  # 100 tries were 46 minutes


def test_the_user_of_compose_runs_no_scripts_and_needs_none(
    start: Any, wakes: Any, server: Any, admin: Any, eventually: Any
) -> None:
    written = re.search(r"user kronoscope on >%s ([^\\]+)\\n", COMPOSE.read_text())
    assert written is not None
    admin.execute_command("ACL", "SETUSER", "kronoscope", "on", ">secret", *written[1].split())
    url = re.sub("//.*@", "//kronoscope:secret@", server.url)
    with redis.Redis.from_url(url) as client:
        for words in (["EVAL", "return 1", 0], ["SCRIPT", "LOAD", "return 1"], ["EVALSHA", "0" * 40, 0], ["LPOP", "x"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)
    process = start(url)
    eventually(lambda: process.said("ready"))
    wakes(process)
    assert not process.said("permissions")
