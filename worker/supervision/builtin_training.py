"""Training of builtin models by the worker: into the store, where jobs only read."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from sqlalchemy import Engine

from catalog.frames import LogLine
from catalog.requests.estimate import ESTIMATE
from jobs.queue.attempt_writes import write_log_line
from jobs.records import Claim
from worker.process.child_process import child_environment
from worker.settings import WorkerSettings
from worker.supervision.lease_monitor import LeaseWatch

_PACKAGED = Path(__file__).parents[1] / "execution" / "models" / "trained"
_TRAINING_SECONDS = 120.0
_POLL_SECONDS = 0.05


def train_builtin(engine: Engine, claim: Claim, settings: WorkerSettings, watch: LeaseWatch) -> None:
    """Train the builtin model of a job that cannot write to the store, by a process that runs our code alone.

    Where that does not succeed, the job trains the model for itself.
    """
    model = claim.document.get("model") or {}
    name, store = str(model.get("name")), settings.model_store
    apart = settings.child_namespaces or settings.confinement(claim.user_number).apart
    if not apart or claim.kinds == (ESTIMATE,) or model.get("source") != "builtin":
        return
    if any(any(folder.glob(f"{name}-*.json")) for folder in (_PACKAGED, store / "builtin")):
        return
    text = f"training the builtin model {name} for this service: once, for all jobs"
    write_log_line(engine, claim, LogLine(level="info", message=text))
    command = [sys.executable, "-P", "-m", "worker.execution.models.builtin", name, "--store", str(store)]
    until = time.monotonic() + _TRAINING_SECONDS
    with contextlib.suppress(OSError), _started(command) as process:
        while process.poll() is None:
            if watch.reason is not None or watch.lost.is_set() or time.monotonic() > until:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)


def _started(command: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 - our own module, and a name that the document's schema lists
        command, env=child_environment(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
