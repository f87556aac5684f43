"""A worker with the rights that Compose gives it, and a job whose own code attacks the job beside it."""

import json
import os
import secrets

import pytest

from jobs.records import LOCAL_TENANT
from jobs.repository.results import events_after
from tests.machine.stopwatch import until
from tests.walls.compose import Compose
from tests.walls.interpreter import JOBS, PACKAGES, ROOT, is_open

HONEST = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "digits_cnn"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
    "keep": ["factors"],
    "cache": "refresh",
}
EVIL = '''
import glob, hashlib, json, os, signal, time
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
            names = ("", "1", "2", "1.cached", "1.cached/factors", ".waiting", ".waiting/1", ".waiting/2")
            for place in (f"{job}/{name}".rstrip("/") for name in names):
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
        cache = f"{artifacts}/.factor-cache"
        for place in (artifacts, cache, f"{cache}/{hashlib.sha256(b'local').hexdigest()[:32]}", f"{artifacts}/objects"):
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

GREEDY = """
import os, time
from pathlib import Path


def model(nameless):
    place = Path(os.environ["HOME"]) / "closed"
    place.mkdir(mode=0o700)
    for number in range(64):
        with open(place / str(number), "wb") as file:
            file.write(os.urandom(2**20))
            file.flush()
            if nameless:
                os.unlink(file.name)
                os.dup(file.fileno())
    time.sleep(600)
"""

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not is_open(ROOT) or not is_open(PACKAGES),
    reason="only root may start a worker with these rights, on a project that every user may read",
)


def test_the_job_beside_an_attacker_gets_the_numbers_of_an_undisturbed_run(compose: Compose) -> None:
    compose.factory("kronoscope_test_evil", EVIL)
    alone = compose.submit(HONEST)
    log = compose.done()
    assert '"neighbours"' in log
    assert compose.job(alone).state == "succeeded", log[-4_000:]
    report = compose.place / "reports" / secrets.token_hex(4)
    data = {"source": "synthetic", "shape": [12], "examples": 40, "classes": 3}
    folders = {
        "report": str(report),
        "artifacts": str(compose.place / "artifacts"),
        "models": str(compose.place / "models"),
    }
    beside = compose.submit(HONEST)
    told_of = {**folders, "known": [alone, beside]}
    evil = {"source": "factory", "factory": "kronoscope_test_evil:model", "kwargs": told_of}
    attacker = compose.submit(HONEST | {"model": evil, "data": data})
    compose.done()
    until(report.exists, 60, "the attacker has told what it could do")
    told = json.loads(report.read_text())
    assert told["others"] > 0, "the two have met"
    assert JOBS <= told["user"] < JOBS + 40_000
    assert told["seen"] == []
    for each in (alone, attacker, beside):
        assert (compose.job(each).state, compose.job(each).attempt) == ("succeeded", 1)
    assert compose.digests(beside) == compose.digests(alone)
    assert len(compose.digests(beside)) > 10
    # what was left in the cache is what the next one finds
    later = compose.submit(HONEST | {"cache": "use"})
    log = compose.done()
    assert compose.job(later).state == "succeeded", log[-4_000:]
    said = [each.data.get("message", "") for each in events_after(compose.ledger, LOCAL_TENANT, later)]
    assert any(f"factors from the cache of job {beside}" in line for line in said), said
    assert compose.digests(later) == compose.digests(alone)


def test_the_job_beside_one_that_fills_the_disk_succeeds(compose: Compose) -> None:
    compose.factory("kronoscope_test_greedy", GREEDY)
    factory = {"source": "factory", "factory": "kronoscope_test_greedy:model"}
    data = {"source": "synthetic", "shape": [12], "examples": 40, "classes": 3}
    greedy = [
        compose.submit(HONEST | {"model": factory | {"kwargs": {"nameless": nameless}}, "data": data})
        for nameless in (True, False)
    ]
    beside = compose.submit(HONEST)
    compose.done(KRONOSCOPE_CHILD_DISK_BYTES=str(32 * 2**20))
    assert (compose.job(beside).state, compose.job(beside).attempt) == ("succeeded", 1), compose.job(beside).failure
    for each in greedy:
        failure = compose.job(each).failure
        assert failure is not None
        assert (compose.job(each).attempt, failure["category"], failure["code"]) == (1, "usage", "disk_limit")
        assert "33,554,432" in failure["message"]
        assert not (compose.place / "artifacts" / each).exists()
