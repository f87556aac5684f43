"""Real processes to kill, and ways to see them gone."""

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from sqlalchemy import Engine

from jobs.codec import parse_document
from jobs.records import LOCAL_TENANT, Event, Job
from jobs.repository.results import events_after
from jobs.repository.store import read_job
from jobs.repository.submission import submit
from jobs.service_log import configure_logging
from jobs.settings import LedgerSettings
from tests.chaos.stack.processes import gone
from tests.conftest import POSTGRESQL_FIRST, Dialect
from tests.machine.stopwatch import until
from worker.settings import WorkerSettings

PATIENCE_SECONDS = 240
"""For what comes about within seconds on a machine that is there; a busy one may take many times as long."""

SCRIPTED_CHILD = Path(__file__).parent / "scripted_child.py"


@pytest.fixture(params=POSTGRESQL_FIRST)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """PostgreSQL; SQLite as well, of which a landing has a part."""
    chosen: Dialect = request.param
    return chosen


@pytest.fixture(scope="session")
def scripted() -> Callable[..., list[str]]:
    """``scripted(["log", "hello"], ["finish"])``: the command of a child that does just that."""

    def command(*steps: Sequence[object]) -> list[str]:
        return [sys.executable, "-S", "-P", str(SCRIPTED_CHILD), json.dumps(steps)]

    return command


@pytest.fixture(scope="session")
def ended() -> Callable[..., bool]:
    """``ended([pids])``: whether every process ends; ``ended([pids], 0)``: whether it has."""

    def ask(pids: Sequence[int], seconds: float = PATIENCE_SECONDS) -> bool:
        return gone(pids, seconds)

    return ask


@pytest.fixture(scope="session")
def eventually() -> Callable[..., object]:
    """``eventually(question)``: the first true answer; processes elsewhere can only be asked."""

    def ask(question: Callable[[], object]) -> object:
        return until(question, PATIENCE_SECONDS, str(question))

    return ask


@pytest.fixture
def settings(ledger_url: str, tmp_path: Path) -> Callable[..., WorkerSettings]:
    """``settings(slots=2)``: a worker's settings with a heartbeat fast enough to watch."""

    def make(lease_seconds: float = 20, **changes: Any) -> WorkerSettings:
        ledger = LedgerSettings(
            database_url=ledger_url,
            artifact_root=tmp_path / "artifacts",
            heartbeat_seconds=min(0.5, lease_seconds / 10),
            lease_seconds=lease_seconds,
            reaper_seconds=0.2,
        )
        given = {"threads": 1, "poll_seconds": 0.1, "cancel_seconds": 0.1, "model_store": tmp_path / "store"}
        given |= {"shared_without_walls": True} | changes
        return WorkerSettings(ledger=ledger, **given)

    return make


@pytest.fixture
def submitted(ledger: Engine) -> Callable[..., str]:
    """``submitted()``: the id of a new job."""

    def make(**changes: Any) -> str:
        body = {
            "kind": "capacity",
            "model": {"source": "builtin", "name": "digits_mlp"},
            "data": {"source": "builtin", "name": "digits"},
            "task": {"type": "classification"},
        }
        return submit(ledger, LOCAL_TENANT, parse_document(json.dumps(body | changes).encode())).job.id

    return make


@pytest.fixture
def job(ledger: Engine) -> Callable[[str], Job]:
    """``job(id)``: the job as it stands."""

    def read(job_id: str) -> Job:
        found = read_job(ledger, LOCAL_TENANT, job_id)
        assert found is not None
        return found

    return read


class Gated:
    """A job that goes on for minutes until its gate is opened, and then ends in a moment.

    It soon reaches a checkpoint, and then more and more slowly, so that a hundred batches are enough for minutes.
    """

    _MODEL = """
import time
from itertools import count
from pathlib import Path
from torch import nn


class Model(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.head, self.folder, self.calls = nn.Linear(12, 3), Path(folder), count()

    def forward(self, x):
        (self.folder / "begun").touch()
        if len(x) == 4 and not (self.folder / "open").exists():  # a batch, and no single example of a check
            time.sleep(0.3 + 0.06 * next(self.calls))
        return self.head(x)
"""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "kronoscope_test_gated.py").write_text(self._MODEL)
        name = "kronoscope_test_gated:Model"
        self.document = {
            "model": {"source": "factory", "factory": name, "kwargs": {"folder": str(folder)}},
            "data": {"source": "synthetic", "shape": [12], "examples": 400, "classes": 3},
            "collection": {"batch_size": 4},
        }
        self.environment = {"KRONOSCOPE_ALLOW_FACTORIES": name, "KRONOSCOPE_FACTORY_PATH": str(folder)}

    def begun(self) -> bool:
        """Whether any attempt has come to compute."""
        return (self._folder / "begun").exists()

    def open(self) -> None:
        """Let attempts come to their end."""
        (self._folder / "open").touch()


@pytest.fixture
def gated(tmp_path: Path) -> Gated:
    """What to submit, and what a worker's environment must hold for it."""
    folder = tmp_path / "gated"
    folder.mkdir()
    return Gated(folder)


@pytest.fixture
def events(ledger: Engine) -> Callable[..., list[Event]]:
    """``events(id, "crash")``: the job's events of one type."""

    def read(job_id: str, kind: str) -> list[Event]:
        return [each for each in events_after(ledger, LOCAL_TENANT, job_id) if each.type == kind]

    return read


@pytest.fixture
def log_lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """``log_lines()``: what was logged so far, every line of it parsed."""
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    configure_logging("DEBUG", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logging.captureWarnings(capture=False)
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()
