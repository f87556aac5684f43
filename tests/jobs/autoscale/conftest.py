"""A queue of jobs with known needs, and classes of machines that are processes of this one."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from jobs.autoscale.autoscaler import Autoscaler
from jobs.autoscale.classes import read_classes
from jobs.autoscale.processes import Processes
from jobs.codec import parse_document
from jobs.records import LOCAL_TENANT
from jobs.repository.submission import submit
from jobs.schema.database import reading, writing
from jobs.schema.tables import jobs, machines

BODY = {
    "kind": "capacity",
    "model": {"source": "factory", "factory": "kronoscope_quick:make"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}
GIB = 2**30


@pytest.fixture
def waiting(ledger: Engine) -> Callable[..., list[str]]:
    """``waiting(3, needs_bytes=GIB)``: the ids of new jobs whose row says so."""

    def make(count: int, **values: Any) -> list[str]:
        document = parse_document(json.dumps(BODY).encode())
        ids = [submit(ledger, LOCAL_TENANT, document).job.id for _ in range(count)]
        if values:
            with writing(ledger) as connection:
                connection.execute(update(jobs).where(jobs.c.id.in_(ids)).values(values))
        return ids

    return make


@pytest.fixture
def classes_file(tmp_path: Path) -> Callable[..., Path]:
    """``classes_file("exec {{ worker }}", small=dict(…))``: a file of classes of made-up GPUs."""

    def make(template: str, **classes: Any) -> Path:
        place = tmp_path / "classes.toml"
        worker = f"{sys.executable} -P {Path(__file__).with_name('quick_worker.py')}"
        lines = [f'worker = "{worker}"', f'logs = "{tmp_path / "logs"}"']
        for name, fields in classes.items():
            known = {"name": name, "device": "fake", "cooldown": "0s", "factories": ["*"], "template": template}
            lines += ["[[class]]", *(f"{field} = {json.dumps(value)}" for field, value in (known | fields).items())]
        place.write_text("\n".join(lines))
        return place

    return make


@pytest.fixture
def autoscaler(ledger: Engine, ledger_url: str, tmp_path: Path, monkeypatch: Any) -> Iterator[Callable[..., Any]]:
    """``autoscaler(classes_file(…))``: one whose machines are processes of this one, which end with the test."""
    settings = {
        "DATABASE_URL": ledger_url, "ARTIFACTS": str(tmp_path / "artifacts"), "MODEL_STORE": str(tmp_path / "models"),
        "ALLOW_FACTORIES": "*", "HEARTBEAT_SECONDS": "0.5", "LEASE_SECONDS": "20", "POLL_SECONDS": "0.2",
        "RELAY_SECONDS": "0.5", "REAPER_SECONDS": "0.5",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(f"KRONOSCOPE_{name}", value)

    def make(place: Path, most_running: int = 0) -> Autoscaler:
        file = read_classes(place, "command")
        return Autoscaler(ledger, Processes(Path(file.logs)), file, most_running)

    yield make
    with reading(ledger) as connection:
        handles = connection.execute(select(machines.c.handle).where(machines.c.handle.is_not(None))).scalars().all()
    for pid, began in (each.split(" ") for each in handles):
        with contextlib.suppress(ChildProcessError, ProcessLookupError):  # it has ended, and its end was noticed
            if began and os.waitpid(int(pid), os.WNOHANG) == (0, 0):
                os.killpg(int(pid), signal.SIGKILL)
                os.waitpid(int(pid), 0)
