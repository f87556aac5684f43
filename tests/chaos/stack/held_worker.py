"""The worker's Celery application, which for the tests waits at named points for as long as a file stands there.

    celery -A tests.chaos.stack.held_worker worker …       in place of `-A worker.app`

The points, below the folder CHAOS_GATES: ``claim`` (a job was chosen, nothing is written) and ``settle`` (every
row is written and the computing process is gone; the job's end is not written), which is also ``settle-<job>`` for one
job. ``tests.chaos.removals`` adds ``wakeup``, to API and workers (work is queued, the broker was not told). With
CHAOS_IDLE this worker takes no job and only sweeps; with CHAOS_QUICK its jobs are computed by ``quick_child.py``.
"""

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import worker.agent.agent
import worker.app
import worker.service
import worker.supervision.supervisor
from worker.app import app

__all__ = ["app"]

_GATES = Path(os.environ["CHAOS_GATES"])


def at(point: str) -> None:
    """Wait here, if somebody wants that; `.seen` files carry our process id."""
    hold = _GATES / f"{point}.hold"
    if hold.exists():
        (_GATES / f"{point}.{os.getpid()}.seen").touch()
        while hold.exists():
            time.sleep(0.01)


def _held(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def waits(*arguments: Any, **named: Any) -> Any:
        at(point)
        return function(*arguments, **named)

    return waits


worker.agent.agent.claim = _held("claim", worker.agent.agent.claim)  # type: ignore[attr-defined]
_endings = worker.supervision.supervisor.attempt_endings  # type: ignore[attr-defined]
_finish = _held("settle", _endings.finish)


def _finish_held(engine: Any, claim: Any, *arguments: Any) -> Any:
    at(f"settle-{claim.job_id}")
    return _finish(engine, claim, *arguments)


_endings.finish = _finish_held
if os.environ.get("CHAOS_IDLE"):
    worker.agent.agent.Agent.take = lambda _: False  # type: ignore[method-assign]
if os.environ.get("CHAOS_QUICK"):
    child = [sys.executable, "-P", str(Path(__file__).with_name("quick_child.py"))]
    worker.service.Agent = functools.partial(worker.agent.agent.Agent, command=child)  # type: ignore[attr-defined]
