"""A service as Compose has it: a real PostgreSQL, and workers with the user and the rights that it gives them."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from jobs.codec import parse_document
from jobs.records import LOCAL_TENANT, Job
from jobs.repository.results import layer_rows, list_artifacts
from jobs.repository.store import read_job
from jobs.repository.submission import submit
from tests.walls.interpreter import JOBS, WORKER, as_worker, environment


class Compose:
    """Folders that every user may come to, the ledger, and workers on both."""

    def __init__(self, place: Path, url: str, ledger: Engine, python: str) -> None:
        self.place = place
        self.ledger = ledger
        self._url = url
        self._python = python
        for name in ("artifacts", "models"):
            (place / name).mkdir()
            (place / name).chmod(0o775)
            os.chown(place / name, WORKER, WORKER)

    def factory(self, name: str, program: str) -> None:
        """Have workers allow ``name:model``, which the program defines."""
        (self.place / f"{name}.py").write_text(program)

    def start(self, *, walls: bool = True, folder: str = "artifacts", **variables: str) -> subprocess.Popen[str]:
        """Start a worker of two slots, which ends when nothing is left to do."""
        given = environment(self._python) | {
            "HOME": str(self.place),
            "KRONOSCOPE_DATABASE_URL": self._url,
            "KRONOSCOPE_ARTIFACTS": str(self.place / folder),
            "KRONOSCOPE_MODEL_STORE": str(self.place / "models"),
            "KRONOSCOPE_SLOTS": "2",
            "KRONOSCOPE_THREADS": "1",
            "KRONOSCOPE_ALLOW_FACTORIES": ",".join(f"{each.stem}:model" for each in self.place.glob("*.py")),
            "KRONOSCOPE_FACTORY_PATH": str(self.place),
        }
        command = [self._python, "-P", "-m", "worker.embedded", "--until-idle"]
        if walls:
            given["KRONOSCOPE_CHILD_USER"] = str(JOBS)
            command = as_worker(*command)
        return subprocess.Popen(
            command, env=given | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def done(self, worker: subprocess.Popen[str] | None = None, **options: Any) -> str:
        """Wait for a worker, or for a new one, to have nothing left to do; returns its log."""
        worker = worker or self.start(**options)
        try:
            log, _ = worker.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            worker.kill()
            raise AssertionError(worker.communicate()[0][-5_000:]) from None
        assert worker.returncode == 0, log[-5_000:]
        return log

    def submit(self, document: dict[str, Any]) -> str:
        """Submit a job of the local tenant; returns its id."""
        return submit(self.ledger, LOCAL_TENANT, parse_document(json.dumps(document).encode())).job.id

    def job(self, job_id: str) -> Job:
        """The job as it stands."""
        found = read_job(self.ledger, LOCAL_TENANT, job_id)
        assert found is not None
        return found

    def digests(self, job_id: str) -> dict[str, Any]:
        """Digests of rows and of files, but for those of measured times and bytes."""
        rows = layer_rows(self.ledger, LOCAL_TENANT, job_id).items
        files = list_artifacts(self.ledger, LOCAL_TENANT, job_id)
        found: dict[str, Any] = {f"{each.kind}/{each.ordinal}": each.sha256 for each in rows}
        return found | {each.name: each.sha256 for each in files if each.name != "memory_curve.json"}
