"""A job has a limit of bytes and files on the disk while it writes, whatever it does to hide them."""

import os
import secrets
import subprocess
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine

from catalog.frames import Failed, Finished
from jobs.objects import job_folders
from jobs.queue.claims import claim
from jobs.records import Job
from worker.process.child_process import Child
from worker.process.confinement import Confinement, DiskLimit, Excess
from worker.process.disk_monitor import DiskMonitor
from worker.supervision.attempt_failures import within_disk
from worker.supervision.supervisor import Supervisor

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may start processes of other users")

USER = 20_071
MIB = 2**20
MOST_BYTES, MOST_FILES = 8 * MIB, 300
FILL = "head -c 3M /dev/zero"
LINGER = "while :; do sleep 1; done"

TOO_MUCH = {
    "one file": ("bytes", f"head -c 20M /dev/zero > file; {LINGER}"),
    "several files": ("bytes", f"for i in 1 2 3; do {FILL} > $i; done; {LINGER}"),
    "behind a closed door": ("bytes", f"umask 077; mkdir in; for i in 1 2 3; do {FILL} > in/$i; done; {LINGER}"),
    "without a name": (
        "bytes",
        f"exec 7> x 8> y 9> z; rm x y z; for i in 7 8 9; do {FILL} >&$i; done; {LINGER}",
    ),
    "in an earlier attempt's folder": ("bytes", f"for i in 1 2 3; do {FILL} > ../.waiting/0/$i; done; {LINGER}"),
    "in its scratch": ("bytes", f"for i in 1 2 3; do {FILL} > ../.waiting/1/$i; done; {LINGER}"),
    "many files": ("files", f"mkdir in; for i in $(seq 400); do echo > in/$i; done; {LINGER}"),
    "many folders": ("files", f"mkdir $(seq 400); {LINGER}"),
    "and it is gone at once": ("bytes", f"for i in 1 2 3; do {FILL} > $i; done"),
}
HIDDEN = {
    "in shared memory": ("bytes", f"for i in 1 2 3; do {FILL} > /dev/shm/quota-$i; done; {LINGER}"),
    "in a folder that cannot be read": ("hidden", f"mkdir in; {FILL} > in/x; chmod 000 in; {LINGER}"),
    "deeper than a path can be long": (
        "hidden",
        f"n=$(printf %0200d 0); for i in $(seq 30); do mkdir $n && cd -P $n || exit; done; {FILL} > x; {LINGER}",
    ),
}
ENOUGH = {
    "a sparse file": "truncate -s 7M a b c",
    "inputs": "cat ../1/inputs/* > /dev/null",
    "what is removed in time": f"for i in 1 2 3 4; do {FILL} > x; rm x; done",
    "a file of two names": f"{FILL} > a; {FILL} > b; ln a c; ln b d",
}


@pytest.fixture
def held(reachable: Path) -> Callable[..., tuple[int, Excess | None]]:
    """``held(command, user)``: the exit code of a command in an attempt's folder, and what it had too much of."""

    def run(command: str, user: int | None) -> tuple[int, Excess | None]:
        job = reachable / "job"
        attempt, scratch = job / "1", job / ".waiting"
        for folder in (job, attempt, scratch, scratch / "0", scratch / "1"):
            folder.mkdir()
            if user is not None:
                job_folders.give(folder, user, written=folder not in (job, scratch))
        kept = reachable / "objects"
        kept.mkdir()
        (attempt / "inputs").mkdir()
        for number in range(3):
            (kept / f"{number}").write_bytes(bytes(4 * MIB))
            (attempt / "inputs" / f"{number}").hardlink_to(kept / f"{number}")
        limit = DiskLimit(folder=str(job), total_bytes=MOST_BYTES, total_files=MOST_FILES)
        shell = ["/bin/bash", "-c", f"cd {attempt} || exit 99; {command}"]
        confinement = Confinement(user=user, disk=limit)
        with closing(Child.start({}, subprocess.DEVNULL, {"PATH": os.defpath}, shell, confinement)) as child:
            excess, code = child.excess(), child.wait()
        job_folders.clear(attempt)
        job_folders.clear(scratch)
        assert not attempt.exists()
        assert not scratch.exists()
        return code, excess

    return run


USERS = pytest.param(USER, marks=as_root), None


@pytest.mark.part(of=32, by=("how",))
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("how", TOO_MUCH)
def test_a_job_with_too_much_on_the_disk_is_ended_with_the_figure(held: Any, how: str, user: int | None) -> None:
    kind, command = TOO_MUCH[how]
    code, excess = held(command, user)
    assert code == 137
    assert excess is not None
    assert excess.kind == kind
    limit = MOST_BYTES if kind == "bytes" else MOST_FILES
    assert (excess.limit, excess.found >= limit) == (limit, True)


@as_root
@pytest.mark.parametrize("how", HIDDEN)
def test_what_a_user_of_its_own_hides_is_found(held: Any, how: str) -> None:
    kind, command = HIDDEN[how]
    code, excess = held(command, USER)
    assert (code, excess and excess.kind) == (137, kind)
    assert not list(Path("/dev/shm").glob("quota-*"))


@pytest.mark.part(of=32, by=("how",))
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("how", ENOUGH)
def test_a_job_within_its_limit_is_left_alone(held: Any, how: str, user: int | None) -> None:
    # as long as it takes to be looked at
    assert held(f"{ENOUGH[how]} && sleep 1.7", user) == (0, None)


def test_no_file_grows_beyond_the_limit(reachable: Path) -> None:
    limit = DiskLimit(folder=str(reachable), total_bytes=2 * MIB)
    command = ["/bin/bash", "-c", "ulimit -f"]
    with closing(Child.start({}, subprocess.PIPE, {"PATH": os.defpath}, command, Confinement(disk=limit))) as child:
        assert list(child.output(100)) == [b"2048\n"]


def test_a_child_cannot_write_to_its_assignment() -> None:
    command = ["/bin/bash", "-c", "echo more >&0 && echo written; cat"]
    with closing(Child.start({"a": 1}, subprocess.PIPE, {"PATH": os.defpath}, command)) as child:
        said = b"".join(child.output(1_000))
    assert b"written" not in said
    assert b'{"a": 1}' in said


class Room:
    """A volume of 100 MiB, of which others take something while a job runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 100 * MIB
        monkeypatch.setattr("worker.process.disk_monitor.os.statvfs", self._status)
        # this process is no guardian: servers that other tests have started are its children
        monkeypatch.setattr("worker.process.disk_monitor.descendants", lambda _: ())
        for name in ("_TICK_SECONDS", "_FIRST_SECONDS"):
            monkeypatch.setattr(f"worker.process.disk_monitor.{name}", 0.05)

    def _status(self, _: object) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=self.free // 4096, f_frsize=4096, f_favail=10**6)


@pytest.mark.parametrize(("taken", "others", "ended"), [(50, 0, False), (50, 95, True), (40, 99, False)])
def test_without_a_figure_a_job_is_held_to_its_part_once_room_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int, others: int, *, ended: bool
) -> None:
    room = Room(monkeypatch)
    reading, report = os.pipe()
    done = threading.Event()
    monitor = DiskMonitor(DiskLimit(folder=str(tmp_path), parts=2), None, report, done.set)
    monitor.start()
    (tmp_path / "file").write_bytes(bytes(taken * MIB))
    room.free = (100 - others) * MIB
    assert done.wait(0.8 if not ended else 60) is ended
    monitor.finish()
    os.close(report)
    told = os.read(reading, 10_000)
    os.close(reading)
    assert bool(told) is ended
    if ended:
        excess = Excess.from_bytes(told)
        assert (excess.kind, excess.limit) == ("room", 45 * MIB)
        assert excess.found >= 50 * MIB


EVIL = f"head -c 100M /dev/zero > $PLACE/file; {LINGER}"
FACTORY = {"source": "factory", "factory": "made.up:model"}


@as_root
def test_the_job_ends_without_a_second_attempt_and_the_volume_is_given_back(
    ledger: Engine, settings: Any, submitted: Callable[..., str], job: Callable[[str], Job]
) -> None:
    chosen = settings(child_user=20_000, child_disk_bytes=16 * MIB)
    root = chosen.ledger.artifact_root
    root.mkdir(parents=True)
    root.chmod(0o755)
    for parent in root.parents:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    evil = submitted(model=FACTORY, data={"source": "synthetic", "shape": [4], "examples": 8, "classes": 2})

    def run(job_id: str, script: str) -> None:
        claimed = claim(ledger, job_id, "worker", secrets.token_hex(8), 3600)
        assert claimed is not None
        place = root / job_id / str(claimed.fence)
        command = ["/bin/bash", "-c", script.replace("$PLACE", str(place)), "child"]
        Supervisor(ledger, claimed, chosen, command).run()

    run(evil, EVIL)
    failure = job(evil).failure
    assert failure is not None
    assert (job(evil).state, failure["category"], failure["code"]) == ("failed", "usage", "disk_limit")
    assert f"{16 * MIB:,}" in failure["message"]
    assert "KRONOSCOPE_CHILD_DISK_BYTES" in failure["message"]
    assert job(evil).attempt == 1
    assert not (root / evil).exists()


def test_a_job_whose_plan_needs_more_than_it_may_have_is_refused_before_it_computes(
    ledger: Engine, settings: Any, submitted: Callable[..., str], job: Callable[[str], Job], scripted: Any
) -> None:
    job_id = submitted()
    claimed = claim(ledger, job_id, "worker", secrets.token_hex(8), 3600)
    assert claimed is not None
    plan = {"disk_peak_bytes": 3 * MIB}
    command = scripted(["plan", plan], ["wait_for_sigterm"])
    Supervisor(ledger, claimed, settings(child_disk_bytes=2 * MIB), command).run()
    failure = job(job_id).failure
    assert failure is not None
    assert (job(job_id).state, failure["category"], failure["code"]) == ("failed", "usage", "disk_limit")
    assert "3,145,728 bytes on the disk" in failure["message"]
    assert "less than 2,097,152" in failure["message"]


@pytest.mark.parametrize(
    ("kind", "planned", "last", "then"),
    [
        ("room", 45, None, ("transient", "disk_full")),
        ("room", 40, None, ("usage", "disk_limit")),
        ("room", None, None, ("usage", "disk_limit")),
        ("bytes", 45, None, ("usage", "disk_limit")),
        ("bytes", 45, Finished(), None),
    ],
)
def test_a_job_waits_for_room_where_its_plan_needs_it_and_is_not_undone_once_it_is_done(
    kind: Any, planned: int | None, last: Finished | None, then: tuple[str, str] | None
) -> None:
    child: Any = SimpleNamespace(excess=lambda: Excess(kind=kind, found=50, limit=40, place="/data"))
    ended = within_disk(child, last, planned)
    if isinstance(ended, Failed):
        assert (ended.category, ended.code) == then
        assert "50 bytes" in ended.message
    else:
        assert (ended, then) == (last, None)
