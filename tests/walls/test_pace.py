"""The machine's pace comes from a process of the worker: a job reads it, and leaves no word of its own there."""

import os
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import torch

from jobs.settings import LedgerSettings
from worker.agent.pace_measurement import PaceMeasurement
from worker.execution.device_calibration import Calibration
from worker.process.child_process import Child
from worker.process.confinement import Confinement
from worker.service import share_folders
from worker.settings import WorkerSettings

FIRST = 20_000


def chosen_at(root: Path, user: int | None) -> WorkerSettings:
    ledger = LedgerSettings(database_url="sqlite://", artifact_root=root / "artifacts")
    return WorkerSettings(ledger=ledger, child_user=user, threads=1, model_store=root / "store")


def measure(settings: WorkerSettings) -> None:
    measurement = PaceMeasurement(settings)
    measurement.start()
    measurement.join(120)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may start processes of other users")
def test_the_worker_measures_once_and_a_job_reads_what_it_cannot_change(reachable: Path) -> None:
    chosen = chosen_at(reachable, FIRST)
    store = chosen.model_store
    before = os.umask(0o022)
    try:
        share_folders(chosen.ledger.artifact_root, store)
        measure(chosen)
    finally:
        os.umask(before)
    (kept,) = (store / "pace").iterdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(chosen.computing_threads())
    try:
        # by the key that a job of this worker computes
        found = Calibration(store=store, device=torch.device("cpu"), scratch=reachable, log=lambda *_: None).read()
    finally:
        torch.set_num_threads(threads)
    assert found is not None
    content, measured_at = kept.read_bytes(), kept.stat().st_mtime_ns
    program = f"""
exec 2>/dev/null
head -c 1 {kept} >/dev/null && echo read
echo x >> {kept} && echo written
rm -f {kept} && echo removed
mv {store}/pace {store}/other && echo moved
echo x > {store}/pace/0000000000000000.json && echo added
echo tried
"""
    command = ["/bin/bash", "-c", program]
    with closing(Child.start({}, subprocess.PIPE, {"PATH": os.defpath}, command, Confinement(user=FIRST))) as child:
        assert [line.strip() for line in child.output(1_000)] == [b"read", b"tried"]
    assert kept.read_bytes() == content
    measure(chosen)
    assert [(each.name, each.stat().st_mtime_ns) for each in (store / "pace").iterdir()] == [(kept.name, measured_at)]


def test_where_jobs_are_the_workers_user_they_measure_for_themselves(tmp_path: Path) -> None:
    chosen = chosen_at(tmp_path, None)
    measurement = PaceMeasurement(chosen)
    measurement.start()
    measurement.stop()
    assert not (chosen.model_store / "pace").exists()
    assert not chosen.ledger.artifact_root.exists()


def test_a_worker_that_ends_measures_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **_: started.append(arguments))
    measurement = PaceMeasurement(chosen_at(tmp_path, FIRST))
    measurement.stop()
    measurement.start()
    measurement.join(30)
    assert started == []
