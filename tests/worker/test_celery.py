"""A real Celery worker on a real Redis, and the embedded worker: neither holds torch, both do jobs."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, update

from jobs.queue.wakeups import WakeupSender
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.tables import jobs
from worker.agent.agent import DRAIN_SECONDS

CELERY = [sys.executable, "-P", "-m", "celery", "-A", "worker.app", "worker", "-P", "threads"]
KRONOSCOPE = [sys.executable, "-P", "-c", "from kronoscope.cli import main; main()"]
EMBEDDED = [sys.executable, "-P", "-m", "worker.embedded"]
SLURM = Path(__file__).resolve().parents[2] / "examples/slurm/worker.sbatch"
USAGE = {"model": {"source": "directory", "path": "/not/listed/here"}}


class Process:
    """A worker process and every line that it logged, parsed."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.popen = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.raw: list[str] = []
        self.reader = threading.Thread(target=lambda: self.raw.extend(self.popen.stderr or ()))
        self.reader.start()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.raw]

    def said(self, text: str) -> bool:
        return any(text in line for line in self.raw)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            return self.popen.wait(240)
        finally:
            self.popen.kill()
            self.popen.wait()
            self.reader.join()
            if self.popen.stderr is not None:
                self.popen.stderr.close()


@pytest.fixture
def dialect(request: pytest.FixtureRequest) -> str:
    """Each worker on the database that it is run with: every test here starts processes that take seconds."""
    return "sqlite" if "embedded" in request.node.name else "postgresql"


@pytest.fixture
def broker(redis_url: str) -> Iterator[str]:
    """A Redis database of its own on the test server; it is emptied, so it is the last, which nobody else uses."""
    url = redis_url.rstrip("/").rsplit("/", 1)[0] if redis_url.count("/") > 2 else redis_url
    chosen = f"{url}/15"
    with redis.Redis.from_url(chosen) as client:
        client.flushdb()
    yield chosen
    with redis.Redis.from_url(chosen) as client:
        client.flushdb()


@pytest.fixture
def worker(ledger_url: str, broker: str, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start worker processes; they are told to end after the test."""
    started: list[Process] = []

    def start(command: list[str], **environment: str) -> Process:
        ours = {
            "KRONOSCOPE_DATABASE_URL": ledger_url,
            "KRONOSCOPE_REDIS_URL": broker,
            "KRONOSCOPE_ARTIFACTS": str(tmp_path / "artifacts"),
            "KRONOSCOPE_MODEL_STORE": str(tmp_path / "store"),
            "KRONOSCOPE_REAPER_SECONDS": "0.5",
            "OMP_NUM_THREADS": "1",
            "KRONOSCOPE_THREADS": "1",
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KRONOSCOPE_")}
        process = Process(command, inherited | ours | environment, tmp_path)
        started.append(process)
        return process

    yield start
    for process in started:
        process.stop()


def mapped_libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.real_programs
@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("command", [CELERY, EMBEDDED], ids=["celery", "embedded"])
@pytest.mark.part(of=2, law="a worker takes jobs and hands them back")
def test_it_does_a_job_to_the_end_without_torch(
    worker: Any, submitted: Any, job: Any, eventually: Any, command: list[str]
) -> None:
    process = worker(command)
    job_id = submitted(**USAGE)
    eventually(lambda: job(job_id).state == "failed")
    assert job(job_id).failure["category"] == "usage"  # told by the real child, which holds torch
    assert "torch" not in mapped_libraries(process.popen.pid)
    assert process.stop() == 0
    first = process.lines()[0]
    assert first["event"] == "worker starts"
    assert first["device"].startswith(("cpu", "cuda"))
    assert {"job": job_id, "attempt": 1, "fence": 1}.items() <= next(
        line for line in process.lines() if line["event"] == "job claimed"
    ).items()
    assert "worker ends" in [line["event"] for line in process.lines()]


@pytest.mark.part(of=2, law="a worker takes jobs and hands them back")
def test_the_wakeup_is_answered_before_any_poll(
    worker: Any, submitted: Any, job: Any, eventually: Any, ledger: Engine, broker: str
) -> None:
    process = worker(CELERY, KRONOSCOPE_POLL_SECONDS="3600")
    eventually(lambda: process.said("ready"))
    for _ in range(2):
        job_id = submitted(**USAGE)
        ring(ledger, broker)
        eventually(lambda job_id=job_id: job(job_id).state == "failed")
        for _ in range(3):
            ring(ledger, broker)  # for nothing


@pytest.mark.part(of=2, law="a worker takes jobs and hands them back")
def test_every_worker_hears_a_wakeup(
    worker: Any, submitted: Any, job: Any, eventually: Any, ledger: Engine, broker: str, gated: Any
) -> None:
    """Two jobs and one message: each worker takes one."""
    given = {"KRONOSCOPE_POLL_SECONDS": "3600", "KRONOSCOPE_SLOTS": "1", **gated.environment}
    started = [worker(CELERY, **given) for _ in range(2)]
    eventually(lambda: all(each.said("ready") for each in started))
    ids = [submitted(**gated.document) for _ in range(2)]
    with redis.Redis.from_url(broker) as client:
        assert client.publish(channel_of(ledger), "") == 2
    eventually(lambda: [job(each).state for each in ids] == ["running", "running"])
    gated.open()


@pytest.mark.part(of=2, law="a worker takes jobs and hands them back")
def test_what_a_worker_hands_back_another_takes_at_once(
    worker: Any, submitted: Any, job: Any, eventually: Any, gated: Any
) -> None:
    """No poll finds it: the wake-up follows the commit of whoever queues it, though that ends by now."""
    given = {"KRONOSCOPE_POLL_SECONDS": "3600", **gated.environment}
    first = worker(CELERY, **given)
    job_id = submitted(**gated.document)
    eventually(gated.begun)
    second = worker(CELERY, **given)
    eventually(lambda: second.said("ready"))
    assert first.stop() == 0
    eventually(lambda: second.said("job claimed"))
    gated.open()
    eventually(lambda: job(job_id).ended)


@pytest.mark.part(of=2, law="a worker takes jobs and hands them back")
def test_a_job_without_a_wakeup_is_found_by_the_poll(worker: Any, submitted: Any, job: Any, eventually: Any) -> None:
    process = worker(CELERY, KRONOSCOPE_POLL_SECONDS="0.5")
    eventually(lambda: process.said("ready"))
    job_id = submitted(**USAGE)  # no wake-up is sent
    eventually(lambda: job(job_id).state == "failed")


def test_without_redis_jobs_are_done_all_the_same(worker: Any, submitted: Any, job: Any, eventually: Any) -> None:
    process = worker(CELERY, KRONOSCOPE_REDIS_URL="redis://127.0.0.1:1/0")
    job_id = submitted(**USAGE)
    eventually(lambda: job(job_id).state == "failed")
    assert process.popen.poll() is None


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("command", [CELERY, EMBEDDED], ids=["celery", "embedded"])
def test_an_outdated_schema_is_refused_with_the_remedy(
    worker: Any, databases: Any, dialect: Any, command: list[str]
) -> None:
    process = worker(command, KRONOSCOPE_DATABASE_URL=databases.empty(dialect))
    assert process.popen.wait(240) == 2
    process.reader.join()
    assert process.said("migrat")
    assert not process.said("Traceback")


def channel_of(ledger: Engine) -> str:
    """The channel in Redis on which this ledger's workers hear."""
    return f"/kronoscope.{WakeupSender(ledger, '').exchange.name}"


def ring(ledger: Engine, broker: str) -> None:
    """Send a wake-up, as whatever process has queued something."""
    sender = WakeupSender(ledger, broker)
    sender.stop(0)  # so that it does no more than send its last
    sender.start()
    sender.stop(240)
    assert sender.failing == {}, "the test's Redis does not answer"


def children_of(pid: int) -> list[int]:
    """Every descendant's pid."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry.name), *children_of(int(entry.name))]
    return found


@pytest.mark.real_programs
@pytest.mark.nightly(
    covered_by=(
        "tests/chaos/test_named_faults.py::test_a_busy_worker_hands_its_job_back_and_another_goes_on_from_the_checkpoint",
    )
)
def test_sigterm_hands_the_job_back_and_another_worker_finishes_it(
    worker: Any, submitted: Any, job: Any, eventually: Any, ended: Any, gated: Any
) -> None:
    first = worker(CELERY, **gated.environment)
    job_id = submitted(**gated.document)
    eventually(gated.begun)
    running = children_of(first.popen.pid)
    assert len(running) >= 2  # guardian and child
    assert first.stop() == 0
    assert ended(running, 2)
    handed = job(job_id)
    assert (handed.state, handed.attempt, handed.failures) == ("queued", 0, 0)
    gated.open()
    worker(CELERY, **gated.environment)
    eventually(lambda: job(job_id).ended)
    done = job(job_id)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 1, 0), done.failure
    assert done.summary["capacity"]["coverage"]["covered_share"] == 1.0


@pytest.mark.part(of=2, law="a worker takes jobs and hands them back")
def test_under_slurm_a_job_is_handed_back_before_the_wall_time(  # noqa: PLR0917 - it takes what it needs
    worker: Any, submitted: Any, job: Any, eventually: Any, ended: Any, gated: Any, ledger_url: str, broker: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """What `--signal=B:TERM@…` does: SIGTERM to the batch shell, and to no other process of the job."""
    (tmp_path / "database-url").write_text(ledger_url)
    (tmp_path / "redis-url").write_text(broker)
    first = worker(
        ["bash", str(SLURM)],
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        KRONOSCOPE_DATABASE_URL="",
        KRONOSCOPE_DATABASE_URL_FILE=str(tmp_path / "database-url"),
        KRONOSCOPE_REDIS_URL="",
        KRONOSCOPE_REDIS_URL_FILE=str(tmp_path / "redis-url"),
        SLURM_JOB_ID="17",
        SLURM_CPUS_PER_TASK="1",
        **gated.environment,
    )
    job_id = submitted(**gated.document)
    eventually(gated.begun)
    running = children_of(first.popen.pid)
    assert len(running) >= 3  # worker, guardian and child
    assert first.stop() == 0
    assert ended(running, 2)
    handed = job(job_id)
    assert (handed.state, handed.attempt, handed.failures) == ("queued", 0, 0)
    assert [line["drained"] for line in first.lines() if line["event"] == "worker ends"] == [True]


def test_slurm_is_asked_for_more_time_than_a_drain_takes() -> None:
    (asked,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", SLURM.read_text(), flags=re.MULTILINE)
    assert int(asked) > DRAIN_SECONDS


@pytest.mark.real_programs
@pytest.mark.nightly(
    covered_by=(
        "tests/worker/process/test_guardian.py::test_a_parent_killed_with_minus_9_leaves_no_orphan",
        "tests/chaos/test_kill_matrix.py::test_every_job_ends_as_if_nobody_had_killed_anything[worker-mid_layer]",
    )
)
def test_a_worker_killed_with_minus_9_leaves_no_orphan_and_loses_no_job(
    ledger: Any, worker: Any, submitted: Any, job: Any, eventually: Any, ended: Any, gated: Any
) -> None:
    first = worker(CELERY, **gated.environment)
    job_id = submitted(**gated.document)
    eventually(gated.begun)
    running = children_of(first.popen.pid)
    first.stop(signal.SIGKILL)
    assert ended(running, 2)
    assert (job(job_id).state, job(job_id).attempt) == ("running", 1)
    with writing(ledger) as connection:  # as it does by itself when nobody renews it any more
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(lease_expires_at=ledger_now(-1)))
    gated.open()
    second = worker(EMBEDDED, **gated.environment)
    eventually(lambda: job(job_id).ended)
    done = job(job_id)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 2, 1), done.failure
    assert second.said("reaped")


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("command", [CELERY, EMBEDDED], ids=["celery", "embedded"])
@pytest.mark.part(of=2, law="a worker takes jobs and hands them back")
def test_until_idle_it_does_what_is_queued_and_ends(worker: Any, submitted: Any, job: Any, command: list[str]) -> None:
    ids = [submitted(**USAGE) for _ in range(2)]
    process = worker(command, KRONOSCOPE_UNTIL_IDLE="1")
    assert process.popen.wait(240) == 0
    assert [job(each).state for each in ids] == ["failed", "failed"]  # each through a real child
    process.reader.join()
    assert "worker ends" in [line["event"] for line in process.lines()]


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(
    ("command", "given"),
    [
        (CELERY, {"KRONOSCOPE_UNTIL_IDLE": "1"}),
        (CELERY, {"KRONOSCOPE_UNTIL_IDLE": "1", "KRONOSCOPE_REDIS_URL": "redis://127.0.0.1:1/0"}),
        ([*KRONOSCOPE, "worker", "--until-idle"], {}),
    ],
    ids=["celery", "celery without redis", "kronoscope"],
)
@pytest.mark.part(of=2, law="a worker takes jobs and hands them back")
def test_until_idle_with_nothing_queued_it_ends_at_once(worker: Any, command: list[str], given: dict[str, str]) -> None:
    """Before Celery listens to signals, too, and while it looks for a broker."""
    process = worker(command, **given)
    assert process.popen.wait(240) == 0
    process.reader.join()
    assert "worker ends" in [line["event"] for line in process.lines()]


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("command", [CELERY, EMBEDDED], ids=["celery", "embedded"])
@pytest.mark.part(of=2, law="a worker takes jobs and hands them back")
def test_before_the_wall_time_it_hands_its_job_back_and_has_ended(
    worker: Any, submitted: Any, job: Any, gated: Any, command: list[str]
) -> None:
    """Its machine goes so many seconds from now; 4 s before that it has ended, so its jobs are told 24 s before."""
    job_id = submitted(**gated.document)
    for wall in (32, 60, 240):  # the later ones where the machine is too busy to begin within the first
        started = time.time()
        if command == EMBEDDED:
            process = worker([*command, "--wall", f"{wall}s", "--drain-before", "4s"], **gated.environment)
        else:
            end = {"KRONOSCOPE_DRAIN_BEFORE": "4s", "SLURM_JOB_END_TIME": str(round(started + wall))}
            process = worker(command, **end, **gated.environment)
        ran = False
        while process.popen.poll() is None:
            ran = ran or job(job_id).state == "running"
            time.sleep(0.1)
        process.reader.join()
        assert process.popen.returncode == 0, process.raw[-5:]
        assert (job(job_id).state, job(job_id).attempt, job(job_id).failures) == ("queued", 0, 0)
        if ran:
            break
    assert ran
    at = {line["event"]: datetime.fromisoformat(line["timestamp"]).timestamp() for line in process.lines()}
    began = at["worker starts"] if command == EMBEDDED else started  # the one counts from its own start
    assert at["worker ends by itself"] > started + wall - 25
    assert at["worker ends by itself"] < began + wall - 4
    assert [line["drained"] for line in process.lines() if line["event"] == "worker ends"] == [True]


def test_a_worker_that_cannot_start_ends(worker: Any) -> None:
    """Celery would go on without what its handlers did not do: as a worker that takes no job."""
    process = worker(CELERY, KRONOSCOPE_ARTIFACTS="/proc/no/such/folder")
    assert process.popen.wait(240) == 4
    process.reader.join()
    assert process.said("the worker does not start: FileNotFoundError")


def test_a_wall_time_too_near_is_refused_with_the_remedy(worker: Any) -> None:
    process = worker(CELERY, KRONOSCOPE_WALL="5m", KRONOSCOPE_DRAIN_BEFORE="10m")
    assert process.popen.wait(240) == 2
    process.reader.join()
    assert process.said("lengthen the one or shorten the other")
    assert not process.said("Traceback")
