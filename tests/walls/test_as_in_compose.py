"""A worker with the rights that Compose gives it, and a job whose own code attacks the job beside it."""

import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from jobs.codec import parse_document
from jobs.records import LOCAL_TENANT, Job
from jobs.repository.results import layer_rows
from jobs.repository.store import read_job
from jobs.repository.submission import submit
from jobs.schema.database import open_database
from tests.conftest import Databases
from tests.machine.stopwatch import until
from tests.walls.interpreter import JOBS, PACKAGES, ROOT, WORKER, as_worker, environment, is_open

HONEST = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
    "keep": ["factors"],
    "cache": "refresh",
}
EVIL = '''
import glob, json, os, signal, time
from pathlib import Path
from torch import nn


def tried(what, seen):
    """Note which of these paths can be opened, for reading or for writing."""
    for path in what:
        for mode in ("rb", "r+b"):
            try:
                with open(path, mode) as file:
                    file.read(1)
                seen.append(f"{mode} {path}")
            except OSError:
                pass


def model(report, artifacts, models, known):
    seen, until = [], time.monotonic() + 6
    own = {os.getpid(), os.getppid()}
    others = 0
    while time.monotonic() < until:
        for status in glob.glob("/proc/[0-9]*/cmdline"):
            pid = int(status.split("/")[2])
            try:
                is_job = b"worker.execution" in Path(status).read_bytes()
            except OSError:
                continue
            if is_job and pid not in own:
                others += 1
                tried([f"/proc/{pid}/{name}" for name in ("environ", "mem", "maps")], seen)
                for number in (signal.SIGSTOP, signal.SIGKILL):
                    try:
                        os.kill(pid, number)
                        seen.append(f"signal {number} to {pid}")
                    except OSError:
                        pass
        try:
            os.kill(-1, signal.SIGKILL)
        except OSError:
            pass
        # even where it knows their names
        for job in known:
            for place in (job, f"{job}/1", f"{job}/2", f"{job}/.waiting", f"{job}/.waiting/1", f"{job}/.waiting/2"):
                try:
                    seen.append(f"listed {place}: {os.listdir(f'{artifacts}/{place}')}")
                except OSError:
                    pass
                try:
                    Path(artifacts, place, "planted").write_text("x")
                    seen.append(f"written in {place}")
                except OSError:
                    pass
        tried(glob.glob(f"{artifacts}/objects/**", recursive=True) + glob.glob(f"{artifacts}/.objects/*"), seen)
        for place in (artifacts, f"{artifacts}/.factor-cache", f"{artifacts}/objects"):
            try:
                seen.append(f"listed {place}: {os.listdir(place)}")
            except OSError:
                pass
        for place in (f"{models}/builtin", f"{models}/hub"):
            for path in (f"{place}/new", f"{models}/new", f"{models}/pace/new", *glob.glob(f"{place}/*")):
                for attack in (lambda: open(path, "ab"), lambda: os.unlink(path), lambda: os.chmod(path, 0o777)):
                    try:
                        attack()
                        seen.append(f"changed {path}")
                    except OSError:
                        pass
            for attack in (lambda: os.rename(place, f"{place}-moved"), lambda: os.chmod(place, 0o777)):
                try:
                    attack()
                    seen.append(f"moved {place}")
                except OSError:
                    pass
        time.sleep(0.2)
    Path(report).write_text(json.dumps({"seen": sorted(set(seen)), "others": others, "user": os.getuid()}))
    return nn.Linear(12, 3)
'''

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not is_open(ROOT) or not is_open(PACKAGES),
    reason="only root may start a worker with these rights, on a project that every user may read",
)


@pytest.fixture
def place(reachable: Path) -> Path:
    """A folder that every user may come to, with the folders that a worker of Compose owns."""
    for name in ("artifacts", "models"):
        (reachable / name).mkdir()
        (reachable / name).chmod(0o775)
        os.chown(reachable / name, WORKER, WORKER)
    (reachable / "reports").mkdir()
    (reachable / "reports").chmod(0o777)
    (reachable / "kronoscope_test_evil.py").write_text(EVIL)
    return reachable


@pytest.fixture
def url(databases: Databases) -> str:
    """A ledger of PostgreSQL, which several users reach; SQLite is for one."""
    return databases.migrated("postgresql")


@pytest.fixture
def ledger(url: str) -> Iterator[Engine]:
    engine = open_database(url)
    yield engine
    engine.dispose()


def done_by_a_worker(place: Path, url: str, python: str) -> str:
    """Run a worker of two slots until nothing is left to do; returns its log."""
    given = environment(python) | {
        "HOME": str(place),
        "KRONOSCOPE_DATABASE_URL": url,
        "KRONOSCOPE_ARTIFACTS": str(place / "artifacts"),
        "KRONOSCOPE_MODEL_STORE": str(place / "models"),
        "KRONOSCOPE_CHILD_USER": str(JOBS),
        "KRONOSCOPE_SLOTS": "2",
        "KRONOSCOPE_THREADS": "1",
        "KRONOSCOPE_ALLOW_FACTORIES": "kronoscope_test_evil:model",
        "KRONOSCOPE_FACTORY_PATH": str(place),
    }
    worker = as_worker(python, "-P", "-m", "worker.embedded", "--until-idle")
    done = subprocess.run(worker, env=given, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    return done.stdout + done.stderr


def submitted(ledger: Engine, **changes: Any) -> str:
    return submit(ledger, LOCAL_TENANT, parse_document(json.dumps(HONEST | changes).encode())).job.id


def digests(ledger: Engine, job_id: str) -> list[tuple[str, int, Any]]:
    return [(row.kind, row.ordinal, row.sha256) for row in layer_rows(ledger, LOCAL_TENANT, job_id).items]


def ended(ledger: Engine, job_id: str) -> Job:
    found = read_job(ledger, LOCAL_TENANT, job_id)
    assert found is not None
    return found


def test_the_job_beside_an_attacker_gets_the_numbers_of_an_undisturbed_run(
    ledger: Engine, url: str, place: Path, python: str
) -> None:
    alone = submitted(ledger)
    log = done_by_a_worker(place, url, python)
    assert '"neighbours"' in log
    assert ended(ledger, alone).state == "succeeded", log[-4_000:]
    evil, report = (
        {"source": "factory", "factory": "kronoscope_test_evil:model"},
        place / "reports" / secrets.token_hex(4),
    )
    data = {"source": "synthetic", "shape": [12], "examples": 40, "classes": 3}
    folders = {"report": str(report), "artifacts": str(place / "artifacts"), "models": str(place / "models")}
    beside = submitted(ledger)
    attacker = submitted(ledger, model=evil | {"kwargs": {**folders, "known": [alone, beside]}}, data=data)
    done_by_a_worker(place, url, python)
    until(report.exists, 60, "the attacker has told what it could do")
    told = json.loads(report.read_text())
    assert told["others"] > 0, "the two have met"
    assert JOBS <= told["user"] < JOBS + 40_000
    assert told["seen"] == []
    for each in (alone, attacker, beside):
        assert (ended(ledger, each).state, ended(ledger, each).attempt) == ("succeeded", 1)
    assert digests(ledger, beside) == digests(ledger, alone)
    assert len(digests(ledger, beside)) == 10
