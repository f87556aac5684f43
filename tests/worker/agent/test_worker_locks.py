"""A worker that was killed is known to be dead at once, by its machine; one that only stands still is not."""

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from jobs.devices.leases import Place
from jobs.devices.registry import Device, Worker, register
from jobs.queue.claims import claim
from jobs.queue.reaper import reap_ended_worker
from jobs.schema.database import reading
from jobs.schema.identifiers import new_id
from jobs.schema.tables import device_leases, workers
from worker.agent import worker_locks
from worker.agent.worker_locks import EndedWorkers, WorkerLock
from worker.process.child_process import Child, Hold

pytestmark = pytest.mark.real_programs

WORKER = """
import json, math, os, subprocess, sys, time
from pathlib import Path
from worker.agent.worker_locks import WorkerLock
from worker.process.child_process import Child, Hold
lock = WorkerLock(Path(sys.argv[1]), "killed")
lock.hold()
hold = Hold(until=math.inf, lock=lock.descriptor)
child = Child.start({}, subprocess.DEVNULL, os.environ, json.loads(sys.argv[2]), hold=hold)
print(json.dumps([child.pid, *json.loads(next(child.frames()).message)]), flush=True)
time.sleep(600)
"""


class Started:
    """A worker process with a child, and the sweep of its neighbour."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        program = [sys.executable, "-P", "-c", WORKER, str(folder), json.dumps(command)]
        self.process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.guardian, *self.computing = json.loads(self.process.stdout.readline())
        self._ended = EndedWorkers(folder)

    def dead(self) -> list[str]:
        """What a look finds."""
        found: list[str] = []
        self._ended.sweep(lambda worker_id: len(found.append(worker_id) or found))
        return found


@pytest.fixture
def started(tmp_path: Path, scripted: Any) -> Iterator[Started]:
    made = Started(tmp_path, scripted(["pids"], ["ignore_sigterm"], ["sleep", 600]))
    yield made
    for pid in (made.process.pid, made.guardian):
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue
    made.process.kill()
    made.process.wait()
    assert made.process.stdout is not None
    made.process.stdout.close()


def test_a_killed_worker_is_dead_when_nothing_of_it_computes(
    started: Started, eventually: Callable[..., object], ended: Callable[..., bool]
) -> None:
    assert started.dead() == []
    started.process.kill()
    eventually(lambda: started.dead() == ["killed"])
    assert ended(started.computing, 0)


def test_a_frozen_worker_is_not_dead_nor_one_with_a_frozen_guardian(
    started: Started, eventually: Callable[..., object]
) -> None:
    started.process.send_signal(signal.SIGSTOP)
    assert started.dead() == []
    os.kill(started.guardian, signal.SIGSTOP)
    started.process.kill()
    started.process.wait()
    assert started.dead() == []
    os.kill(started.guardian, signal.SIGCONT)
    eventually(lambda: started.dead() == ["killed"])


def test_the_child_cannot_let_go_of_the_lock(tmp_path: Path) -> None:
    lock = WorkerLock(tmp_path, "mine")
    lock.hold()
    hold = Hold(until=math.inf, lock=lock.descriptor)
    program = "import os; print([os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')])"
    with (tmp_path / "said").open("w+b") as said:
        child = Child.start({}, said, os.environ, [sys.executable, "-c", program], hold=hold)
        assert child.wait(60) == 0
        child.close()
        said.seek(0)
        assert b".lock" not in said.read()
    lock.release()
    assert list((tmp_path / ".workers").iterdir()) == []


def test_a_dead_worker_is_looked_at_for_a_while_and_then_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = WorkerLock(tmp_path, "mine")
    lock.hold()
    assert lock.descriptor is not None
    os.close(lock.descriptor)
    ended = EndedWorkers(tmp_path)
    assert (ended.sweep(lambda _: 1), ended.sweep(lambda _: 1)) == (1, 1)
    monkeypatch.setattr(worker_locks, "_FORGET_SECONDS", 0.0)
    assert (ended.sweep(lambda _: 1), ended.sweep(lambda _: 1)) == (1, 0)
    assert list((tmp_path / ".workers").iterdir()) == []


def test_files_of_another_boot_mean_nothing(tmp_path: Path) -> None:
    (tmp_path / ".workers").mkdir()
    (tmp_path / ".workers" / "elsewhere.other.lock").touch()
    assert EndedWorkers(tmp_path).sweep(lambda _: 1) == 0


def test_a_worker_killed_before_its_lock_had_a_name_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making and renaming: the file has no lock, and might be that of a worker on its way to a name."""
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from worker.agent.worker_locks import WorkerLock\n"
        "Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "WorkerLock(Path(sys.argv[1]), 'killed').hold()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = (tmp_path / ".workers").iterdir()
    assert left.suffix == ".new"
    asked: list[str] = []
    ended = EndedWorkers(tmp_path)
    for _ in range(2):
        ended.sweep(lambda worker_id: len(asked.append(worker_id) or asked))
    assert left.exists()
    monkeypatch.setattr(worker_locks, "_FORGET_SECONDS", 0.0)
    ended.sweep(lambda worker_id: len(asked.append(worker_id) or asked))
    assert not left.exists()
    # it had no job yet
    assert asked == []


def test_a_lock_on_its_way_to_its_name_is_not_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_locks, "_FORGET_SECONDS", 0.0)
    ended = EndedWorkers(tmp_path)
    lock = WorkerLock(tmp_path, "mine")
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        for _ in range(3):
            ended.sweep(lambda _: 1)
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    lock.hold()
    assert lock.descriptor is not None
    assert [each.suffix for each in (tmp_path / ".workers").iterdir()] == [".lock"]
    lock.release()


@pytest.mark.parametrize("suffix", [".lock", ".new"])
def test_an_old_file_of_another_machine_goes_once_nobody_holds_it(tmp_path: Path, suffix: str) -> None:
    (tmp_path / ".workers").mkdir()
    file = tmp_path / ".workers" / f"elsewhere.other{suffix}"
    file.touch()
    old = time.time() - worker_locks._OLD_SECONDS - 60
    os.utime(file, (old, old))
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        os.utime(file, (old, old))
        EndedWorkers(tmp_path).sweep(lambda _: 1)
        assert file.exists()
    EndedWorkers(tmp_path).sweep(lambda _: 1)
    assert not file.exists()


def test_whoever_holds_a_lock_keeps_it_young_for_machines_that_cannot_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = WorkerLock(tmp_path, "mine")
    lock.touch()
    lock.hold()
    (file,) = (tmp_path / ".workers").iterdir()
    os.utime(file, (0, 0))
    lock.touch()
    assert file.stat().st_mtime == 0
    monkeypatch.setattr(worker_locks, "_TOUCH_SECONDS", 0.0)
    lock.touch()
    assert time.time() - file.stat().st_mtime < 60
    lock.release()


def test_its_job_is_queued_again_and_its_device_free_where_no_process_can_be_seen(
    ledger: Engine, submitted: Callable[..., str], job: Callable[[str], Any]
) -> None:
    device = Device(uuid="GPU-0", kind="fake", name="fake", capacity_bytes=2**34)
    dead, living = new_id(), new_id()
    held = []
    for worker_id, uuid in ((dead, "GPU-0"), (living, "GPU-1")):
        worker = Worker(id=worker_id, node="n", process_space=f"space {worker_id}", version="1", slots=1, factories=())
        register(ledger, worker, [Device(**{**vars(device), "uuid": uuid})], 600)
        place = Place(job_id=submitted(), worker_id=worker_id, device_uuids=(uuid,))
        held.append(claim(ledger, place.job_id, "somebody:1", new_id(), 600, place=place))
    lost, kept = held
    assert lost is not None
    assert kept is not None
    assert reap_ended_worker(ledger, dead, "space of another") == 1
    assert reap_ended_worker(ledger, dead, "space of another") == 0
    after = job(lost.job_id)
    assert (after.state, after.failures) == ("queued", 1)
    assert job(kept.job_id).state == "running"
    with reading(ledger) as connection:
        assert connection.execute(select(device_leases.c.job_id)).scalars().all() == [kept.job_id]
        assert connection.execute(select(workers.c.id)).scalars().all() == [living]
