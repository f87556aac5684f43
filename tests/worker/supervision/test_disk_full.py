"""A disk that is really full: a small file system of its own, filled to the last byte or the last file."""

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from sqlalchemy import Engine, update

from catalog.record import record
from jobs.errors import ArtifactDamaged
from jobs.objects.artifacts import open_artifacts
from jobs.records import LOCAL_TENANT
from jobs.repository.results import list_artifacts
from jobs.scheduling.placement import placement_of
from jobs.schema.database import writing
from jobs.schema.tables import jobs
from jobs.settings import LedgerSettings
from tests.queue_order import next_claimable
from worker.agent.agent import Agent
from worker.process.child_process import EXECUTION

MIB = 2**20
MODEL = """
from torch import nn


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
"""


@record
class Disk:
    """A file system of 4 MiB."""

    root: Path

    def fill(self, leave_bytes: int = 0) -> None:
        """Leave no more than that much room."""
        free = os.statvfs(self.root).f_bavail * os.statvfs(self.root).f_frsize
        (self.root / ".filler").write_bytes(bytes(max(0, free - leave_bytes)))

    def fill_with_files(self, leave: int) -> None:
        """Leave room for no more than that many new files and folders."""
        for number in range(os.statvfs(self.root).f_favail - leave):
            (self.root / f".filler-{number}").touch()

    def make_room(self) -> None:
        for filler in self.root.glob(".filler*"):
            filler.unlink()

    def torn(self) -> list[Path]:
        """Files under temporary names."""
        return list(self.root.rglob(".part-*"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    root = tmp_path / "disk"
    root.mkdir()
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    options = f"size={4 * MIB},nr_inodes=200,mode=0777"
    mount = [*as_root, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(root)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode().strip()
        pytest.fail(
            f"no file system can be mounted to fill it up ({said}); run as root, or let sudo mount without asking"
        )
    try:
        yield Disk(root=root)
    finally:
        subprocess.run([*as_root, "umount", "--lazy", str(root)], check=True)


class Reader:
    """Verifies every listed file all the time."""

    def __init__(self, ledger: Engine, settings: LedgerSettings, job_id: str) -> None:
        self.damaged: list[str] = []
        self.rounds = 0
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(ledger, open_artifacts(settings), job_id), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(120)

    def _read(self, ledger: Engine, folder: Any, job_id: str) -> None:
        while not self._enough.wait(0.05):
            for artifact in list_artifacts(ledger, LOCAL_TENANT, job_id):
                try:
                    folder.verify(artifact)
                except ArtifactDamaged as error:
                    self.damaged.append(str(error))
            self.rounds += 1


@pytest.fixture
def on_disk(settings: Any, disk: Disk) -> Any:
    """``on_disk(disk_floor_bytes=0)``: settings of a worker that writes to the small disk."""

    def make(**changes: Any) -> Any:
        found = settings(**{"disk_floor_bytes": 0, "disk_pause_seconds": 900} | changes)
        ledger = LedgerSettings(**{**vars(found.ledger), "artifact_root": disk.root / "artifacts", "cache_bytes": 0})
        return type(found)(**{**vars(found), "ledger": ledger})

    return make


@pytest.fixture
def agent(ledger: Engine) -> Iterator[Any]:
    """``agent(settings, command)``: a running one."""
    started: list[Agent] = []

    def start(settings: Any, command: Any) -> Agent:
        started.append(Agent(ledger, settings, command))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.drain(240)


def end_pauses(ledger: Engine) -> None:
    """As time does, which no test waits for."""
    with writing(ledger) as connection:
        connection.execute(update(jobs).values(not_before=None))


def failed_for(events: Any, job_id: str) -> list[str]:
    """Why the job went back into the queue, each time."""
    moves = [each.data for each in events(job_id, "state")]
    return [move["reason"] for move in moves if move["state"] == "queued" and "reason" in move]


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_a_job_on_a_full_disk_waits_and_finishes_once_there_is_room(  # noqa: PLR0917 - it takes what it needs
    ledger: Engine, submitted: Any, on_disk: Any, disk: Disk, agent: Any, eventually: Any, job: Any, events: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "kronoscope_test_wide.py").write_text(MODEL)
    job_id = submitted(
        kind="factors",
        keep=["factors"],
        model={"source": "factory", "factory": "kronoscope_test_wide:Wide"},
        data={"source": "synthetic", "shape": [100], "examples": 20, "classes": 10},
    )
    disk.fill(leave_bytes=60_000)
    settings = on_disk(allowed_factories=("*",), paths=(str(tmp_path),))
    with Reader(ledger, settings.ledger, job_id) as reader:
        agent(settings, EXECUTION)
        eventually(lambda: failed_for(events, job_id) or job(job_id).ended)
        assert failed_for(events, job_id)[0] == "disk_full"
        assert disk.torn() == []
        disk.make_room()
        end_pauses(ledger)
        eventually(lambda: job(job_id).ended and reader.rounds > 10)
    done = job(job_id)
    assert (done.state, done.failure) == ("succeeded", None)
    assert done.failures == 1
    assert reader.damaged == []
    kept = list_artifacts(ledger, LOCAL_TENANT, job_id)
    assert "factors/factors.index.json" in [each.name for each in kept]
    folder = open_artifacts(settings.ledger)
    for artifact in kept:
        folder.verify(artifact)
    assert {each.key for each in folder.objects()} == {each.uri for each in kept}


def test_a_file_that_finds_no_place_in_the_store_is_not_listed(  # noqa: PLR0917 - it takes what it needs
    ledger: Engine, submitted: Any, on_disk: Any, disk: Disk, agent: Any, scripted: Any, eventually: Any, job: Any,
    events: Any, log_lines: Any,
) -> None:  # fmt: skip
    job_id = submitted()
    # the folders of root, job and attempt and the file itself; none is left for the store's
    disk.fill_with_files(leave=4)
    agent(on_disk(), scripted(["artifact", "a.json", "{}"], ["finish"]))
    eventually(lambda: failed_for(events, job_id))
    assert set(failed_for(events, job_id)) == {"disk_full"}
    assert list_artifacts(ledger, LOCAL_TENANT, job_id) == ()
    (said, *_) = [line["message"] for line in log_lines() if line.get("code") == "disk_full"]
    assert str(disk.root) in said
    assert "bytes are free" in said
    disk.make_room()
    end_pauses(ledger)
    eventually(lambda: job(job_id).ended)
    assert job(job_id).state == "succeeded"
    assert [each.name for each in list_artifacts(ledger, LOCAL_TENANT, job_id)] == ["a.json"]


@pytest.fixture
def reason(ledger: Engine, job: Any) -> Any:
    """``reason(job_id)``: why a job waits."""

    def read(job_id: str) -> str:
        said = placement_of(ledger, job(job_id))
        assert said is not None
        return said.message

    return read


def test_below_the_floor_no_job_is_taken_and_each_says_so(  # noqa: PLR0917 - fixtures
    submitted: Any,
    on_disk: Any,
    disk: Disk,
    agent: Any,
    scripted: Any,
    eventually: Any,
    job: Any,
    reason: Any,
    log_lines: Any,
) -> None:
    disk.fill(leave_bytes=MIB)
    job_id = submitted()
    agent(on_disk(disk_floor_bytes=2 * MIB), scripted(["finish"]))
    eventually(lambda: [line for line in log_lines() if "too full" in line["event"]])
    eventually(lambda: "its disk has 1.05 MB free, and it takes jobs from 2.1 MB on" in reason(job_id))
    assert (job(job_id).state, job(job_id).attempt) == ("queued", 0)
    disk.make_room()
    eventually(lambda: job(job_id).state == "succeeded")
    assert job(job_id).failures == 0
    assert len([line for line in log_lines() if "too full" in line["event"]]) == 1


def test_a_pause_grows_and_is_nobody_elses(
    ledger: Engine, submitted: Any, settings: Any, scripted: Any, agent: Any, eventually: Any, events: Any, job: Any
) -> None:
    paused, other = submitted(), submitted()
    agent(settings(disk_pause_seconds=900), scripted(["fail", "transient", "disk_full"]))
    eventually(lambda: failed_for(events, paused) and failed_for(events, other))
    assert next_claimable(ledger) == []
    assert [(job(each).state, job(each).attempt, job(each).failures) for each in (paused, other)] == [
        ("queued", 1, 1)
    ] * 2
