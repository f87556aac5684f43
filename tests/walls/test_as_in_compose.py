"""A worker with the rights that Compose gives it, and a job whose own code attacks the job beside it."""

import json
import os
import secrets
import subprocess
import sys
import sysconfig
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
from tests.machine.stopwatch import until

ROOT = Path(__file__).parent.parent.parent
WORKER, JOBS = 10_001, 20_000
RIGHTS = "-all,+kill,+setgid,+setuid"
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
    """What of these paths can be opened, for reading and for writing."""
    for path in what:
        for mode in ("rb", "r+b"):
            try:
                with open(path, mode) as file:
                    file.read(1)
                seen.append(f"{mode} {path}")
            except OSError:
                pass


def model(report, artifacts, models):
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
        tried(glob.glob(f"{artifacts}/objects/**", recursive=True) + glob.glob(f"{artifacts}/.objects/*"), seen)
        for place in (artifacts, f"{artifacts}/.factor-cache", f"{artifacts}/objects"):
            try:
                seen.append(f"listed {place}: {os.listdir(place)}")
            except OSError:
                pass
        for place in (f"{models}/builtin", f"{models}/hub"):
            for path in (f"{place}/new", *glob.glob(f"{place}/*")):
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

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may start a worker with these rights")


def interpreter() -> str:
    """An interpreter that every user may execute; the environment's own may lie in root's home."""
    for name in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        path = Path(os.path.realpath(name))
        if path.exists() and all(each.stat().st_mode & 0o001 for each in (path, *path.parents)):
            return str(path)
    pytest.skip("no interpreter of this version can be executed by another user")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder that every user may come to, with what a worker of Compose owns."""
    for each in (tmp_path, *tmp_path.parents):
        if each.stat().st_uid == os.getuid() and str(each).startswith("/tmp/"):
            each.chmod(0o755)
    for name in ("artifacts", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o775)
        os.chown(tmp_path / name, WORKER, WORKER)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports").chmod(0o777)
    (tmp_path / "kronoscope_test_evil.py").write_text(EVIL)
    return tmp_path


def done_by_a_worker(place: Path, ledger_url: str) -> str:
    """Run a worker of two slots until nothing is left to do; returns its log."""
    rights = [f"--{each}={RIGHTS}" for each in ("inh-caps", "ambient-caps", "bounding-set")]
    command = ["setpriv", f"--reuid={WORKER}", f"--regid={WORKER}", "--clear-groups", *rights, "--no-new-privs"]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(place),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
        "KRONOSCOPE_DATABASE_URL": ledger_url,
        "KRONOSCOPE_ARTIFACTS": str(place / "artifacts"),
        "KRONOSCOPE_MODEL_STORE": str(place / "models"),
        "KRONOSCOPE_CHILD_USER": str(JOBS),
        "KRONOSCOPE_SLOTS": "2",
        "KRONOSCOPE_THREADS": "1",
        "KRONOSCOPE_ALLOW_FACTORIES": "kronoscope_test_evil:model",
        "KRONOSCOPE_FACTORY_PATH": str(place),
    }
    worker = [*command, interpreter(), "-P", "-m", "worker.embedded", "--until-idle"]
    done = subprocess.run(worker, env=environment, capture_output=True, text=True, timeout=600, check=False)
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
    ledger: Engine, ledger_url: str, place: Path
) -> None:
    if ledger_url.startswith("sqlite"):
        pytest.skip("the worker's user may not write to the test's own file of a ledger")
    alone = submitted(ledger)
    log = done_by_a_worker(place, ledger_url)
    assert '"neighbours"' in log
    evil, report = (
        {"source": "factory", "factory": "kronoscope_test_evil:model"},
        place / "reports" / secrets.token_hex(4),
    )
    data = {"source": "synthetic", "shape": [12], "examples": 40, "classes": 3}
    folders = {"report": str(report), "artifacts": str(place / "artifacts"), "models": str(place / "models")}
    attacker = submitted(ledger, model=evil | {"kwargs": folders}, data=data)
    beside = submitted(ledger)
    done_by_a_worker(place, ledger_url)
    until(report.exists, 60, "the attacker has told what it could do")
    told = json.loads(report.read_text())
    assert told["others"] > 0, "the two have met"
    assert JOBS <= told["user"] < JOBS + 40_000
    assert told["seen"] == []
    for each in (alone, attacker, beside):
        assert (ended(ledger, each).state, ended(ledger, each).attempt) == ("succeeded", 1)
    assert digests(ledger, beside) == digests(ledger, alone)
    assert len(digests(ledger, beside)) == 10
