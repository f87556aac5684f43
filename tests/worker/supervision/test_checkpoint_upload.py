"""What attempts leave for the next one: kept while there may be one, gone with the job."""

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from engine.collection.checkpoints import MANIFEST
from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.s3_store import S3Objects
from jobs.objects.scratch import Scratch, sweep_scratch
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT, Job
from jobs.repository.results import layer_rows, list_artifacts
from jobs.repository.store import request_cancel
from jobs.s3_settings import S3Settings
from jobs.settings import LedgerSettings
from worker.agent.maintenance import WorkerMaintenance
from worker.execution.attempt import adopt_checkpoint
from worker.process.child_process import EXECUTION
from worker.settings import WorkerSettings
from worker.supervision import checkpoint_upload, retrying_object_store
from worker.supervision.supervisor import Supervisor

MODEL = """
import os, signal, time
from pathlib import Path
from torch import nn

calls = 0  # of the process: what a model counts itself is set back after every batch

class Mortal(nn.Module):
    def __init__(self, grave):
        super().__init__()
        self.head, self.grave = nn.Linear(12, 3), Path(grave)

    def forward(self, x):
        global calls
        calls += 1
        time.sleep(0.01)
        if calls == 45 and not self.grave.exists():
            self.grave.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.head(x)
"""


@pytest.fixture
def scratch(settings: Any) -> Scratch:
    return Scratch(settings().ledger.artifact_root)


@pytest.fixture
def supervise(ledger: Engine, settings: Any) -> Callable[..., None]:
    def run(job_id: str, command: Any, **changes: Any) -> None:
        chosen = settings(**changes)
        held = claim(ledger, job_id, "test", secrets.token_hex(8), chosen.ledger.lease_seconds)
        assert held is not None
        Supervisor(ledger, held, chosen, command).run()

    return run


def left(scratch: Scratch, job_id: str, fence: int) -> Path:
    """A file of a checkpoint that an attempt has written."""
    folder = scratch.attempt_folder(job_id, fence)
    (folder / MANIFEST).parent.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).touch()
    file = folder / "0.G.safetensors"
    file.touch()
    return file


def test_a_crashed_job_goes_on_in_its_next_attempt(
    ledger: Engine, submitted: Any, supervise: Any, scratch: Scratch, job: Callable[[str], Job], events: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "kronoscope_test_mortal.py").write_text(MODEL)

    def made(grave: Path) -> str:
        found: str = submitted(
            kind="factors",
            model={
                "source": "factory", "factory": "kronoscope_test_mortal:Mortal", "kwargs": {"grave": str(grave)},
            },
            data={"source": "synthetic", "shape": [12], "examples": 100, "classes": 3},
            collection={"batch_size": 4},
        )  # fmt: skip
        return found

    changes = {"allowed_factories": ("*",), "paths": (str(tmp_path),), "checkpoint_seconds": 0.001}
    dead = tmp_path / "dead"
    dead.touch()
    undisturbed, killed = made(dead), made(tmp_path / "grave")
    supervise(undisturbed, EXECUTION, **changes)
    supervise(killed, EXECUTION, **changes)
    assert (job(killed).state, job(killed).failures) == ("queued", 1)
    assert (scratch.attempt_folder(killed, 1) / MANIFEST).is_file()
    supervise(killed, EXECUTION, **changes)
    assert job(killed).state == job(undisturbed).state == "succeeded"
    assert scratch.jobs() == []
    said = [line.data["message"] for line in events(killed, "log")]
    assert any("collection resumed at batch" in line and "of 25" in line for line in said)
    first, second = (layer_rows(ledger, LOCAL_TENANT, each).items for each in (undisturbed, killed))
    assert [row.outcome["record"]["digest_G"] for row in first] == [row.outcome["record"]["digest_G"] for row in second]


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_a_job_goes_on_from_its_checkpoint_on_a_machine_that_shares_no_folder(
    ledger: Engine, submitted: Any, settings: Any, bucket: S3Settings, job: Callable[[str], Job], events: Any,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # a slow machine copies, and clears, more slowly
    monkeypatch.setattr(checkpoint_upload, "_LAST_COPY_SECONDS", 240)
    monkeypatch.setattr(retrying_object_store, "UPLOAD_SECONDS", 240)
    (tmp_path / "kronoscope_test_mortal.py").write_text(MODEL)
    job_id = submitted(
        kind="factors",
        keep=["factors"],
        model={
            "source": "factory", "factory": "kronoscope_test_mortal:Mortal", "kwargs": {"grave": str(tmp_path / "g")},
        },
        data={"source": "synthetic", "shape": [12], "examples": 100, "classes": 3},
        collection={"batch_size": 4},
    )  # fmt: skip

    def machine(name: str) -> None:
        chosen = settings(allowed_factories=("*",), paths=(str(tmp_path),), checkpoint_seconds=0.001)
        ledger_settings = LedgerSettings(
            **{**vars(chosen.ledger), "artifact_root": tmp_path / name, "bucket": bucket, "cache_bytes": 0}
        )
        held = claim(ledger, job_id, name, secrets.token_hex(8), 60)
        assert held is not None
        Supervisor(ledger, held, WorkerSettings(**{**vars(chosen), "ledger": ledger_settings}), EXECUTION).run()

    machine("first")
    assert (job(job_id).state, job(job_id).failures) == ("queued", 1)
    shutil.rmtree(tmp_path / "first")  # lost with its disk
    machine("second")
    assert job(job_id).state == "succeeded"
    said = [line.data["message"] for line in events(job_id, "log")]
    assert any("collection resumed at batch" in line and "of 25" in line for line in said)
    store = S3Objects(bucket)
    assert list(store.listing("scratch/")) == []
    folder = ArtifactFolder(tmp_path / "anywhere", store)
    kept = list_artifacts(ledger, LOCAL_TENANT, job_id)
    assert "factors/factors.index.json" in [each.name for each in kept]
    for artifact in kept:
        folder.verify(artifact)
    assert {each.key for each in folder.objects()} == {each.uri for each in kept}
    assert [path for path in (tmp_path / "second").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("last", "kept"),
    [(["finish"], False), (["fail", "usage"], False), (["fail", "fatal"], False), (["fail", "transient"], True),
     (["kill_self"], True)],
)  # fmt: skip
def test_kept_while_there_may_be_another_attempt(
    submitted: Any, supervise: Any, scripted: Any, scratch: Scratch, last: list[str], kept: bool
) -> None:
    job_id = submitted()
    file = left(scratch, job_id, 1)
    supervise(job_id, scripted(last))
    assert file.exists() == kept
    assert scratch.jobs() == ([job_id] if kept else [])


def test_the_child_is_told_its_place_and_the_earlier_ones(
    submitted: Any, supervise: Any, scripted: Any, scratch: Scratch, events: Any
) -> None:
    job_id = submitted()
    for _ in range(2):
        supervise(job_id, scripted(["fail", "transient"]))
    left(scratch, job_id, 1)
    left(scratch, job_id, 2)
    supervise(job_id, scripted(["echo_assignment"], ["finish"]), checkpoint_seconds=7)
    (line,) = events(job_id, "log")
    for expected in (f'"scratch": "{scratch.attempt_folder(job_id, 3)}"', '"checkpoint_seconds": 7'):
        assert expected in line.data["message"]
    places = ", ".join(f'"{scratch.attempt_folder(job_id, fence)}"' for fence in (2, 1))
    assert f'"earlier": [{places}]' in line.data["message"]


def test_a_job_that_ends_without_an_attempt_is_cleared_by_the_maintenance(
    ledger: Engine, settings: Any, submitted: Any, supervise: Any, scripted: Any, scratch: Scratch, eventually: Any
) -> None:
    ended, waiting = submitted(), submitted()
    for job_id in (ended, waiting):
        supervise(job_id, scripted(["fail", "transient"]))
        left(scratch, job_id, 1)
    assert sweep_scratch(ledger, scratch) == 0
    request_cancel(ledger, LOCAL_TENANT, ended)
    maintenance = WorkerMaintenance(ledger, settings().ledger)
    maintenance.start()
    try:
        eventually(lambda: scratch.jobs() == [waiting])
    finally:
        maintenance.stop()


def test_without_a_checkpoint_nothing_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "0.G.safetensors").touch()
    adopt_checkpoint(tmp_path / "2", [tmp_path / "1"])
    assert list(tmp_path.iterdir()) == []


def test_the_newest_checkpoint_is_taken_over(tmp_path: Path) -> None:
    for name in ("1", "2", "3"):
        (tmp_path / name / "checkpoint").mkdir(parents=True)
        (tmp_path / name / "checkpoint" / f"{name}.0.safetensors").write_text(name)
        (tmp_path / name / "checkpoint" / ".part-torn").touch()
        if name != "3":
            (tmp_path / name / MANIFEST).write_text(name)
    adopt_checkpoint(tmp_path / "4", [tmp_path / "3", tmp_path / "2", tmp_path / "1"])
    assert [each.name for each in tmp_path.iterdir()] == ["4"]
    assert sorted(each.name for each in (tmp_path / "4" / "checkpoint").iterdir()) == [
        "2.0.safetensors", "checkpoint.json",
    ]  # fmt: skip
    assert (tmp_path / "4" / MANIFEST).read_text() == "2"
