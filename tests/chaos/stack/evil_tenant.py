"""A second tenant on the stack, whose jobs attack those of the first, under workers with the rights of Compose."""

import contextlib
import itertools
import os
import secrets
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Engine, text

from jobs.tenancy.api_keys import create_key
from tests.api.server import KEY_SECRET
from tests.chaos.stack.stack import WORKER as COMMAND
from tests.chaos.stack.stack import Stack
from tests.walls.interpreter import PACKAGES, ROOT, WORKER, as_worker, environment, everybodys_python, is_open

NAME = "evil"
FIRST_USER = 40_100
"""Of the jobs' users: those of other tests that run beside this one are below."""
_OPEN_JOBS = 2
_ENDED = text("SELECT jobs.state FROM jobs JOIN tenants ON tenants.id = jobs.tenant_id WHERE tenants.name = 'evil'")


def can_be_held() -> bool:
    """Whether this process may start workers with those rights, on a project that every user may read."""
    return os.getuid() == 0 and is_open(ROOT) and is_open(PACKAGES)


def raise_walls(stack: Stack) -> None:
    """Have the stack's workers, which are not started yet, run as those of Compose do."""
    for place in (stack.folder, *stack.folder.parents):
        if str(place).startswith("/tmp/"):
            place.chmod(0o755)
    for name in ("artifacts", "store", "gates"):
        (stack.folder / name).mkdir(exist_ok=True)
        os.chown(stack.folder / name, WORKER, WORKER)
    python = everybodys_python(stack.folder)
    for each in stack.workers:
        paths = os.pathsep.join((each.environment["PYTHONPATH"], str(PACKAGES)))
        given = environment(python) | {"PYTHONPATH": paths, "KRONOSCOPE_CHILD_USER": str(FIRST_USER)}
        each.run_with(as_worker(python, *COMMAND[1:]), {**given, "HOME": str(stack.folder)})


class EvilTenant:
    """Keeps some jobs open, each with another attack, until told that it is enough."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._enough = threading.Event()
        self._key = create_key(stack.engine, KEY_SECRET, NAME)
        self._thread = threading.Thread(target=self._run, name="evil tenant", daemon=True)
        self._thread.start()

    def enough(self) -> None:
        """Submit no more."""
        self._enough.set()
        self._thread.join()

    def _run(self) -> None:
        headers = {"authorization": f"Bearer {self._key}"}
        for number in itertools.count():
            while not self._enough.wait(0.5) and self._open() >= _OPEN_JOBS:
                pass
            if self._enough.is_set():
                return
            with contextlib.suppress(httpx.HTTPError), self._stack.client() as client:
                sent = headers | {"idempotency-key": secrets.token_hex()}
                client.post("/v1/jobs", json=evil_document(number, self._stack.artifacts), headers=sent)

    def _open(self) -> int:
        with contextlib.suppress(Exception):  # the database is being killed, and who asks is nobody's concern
            ended = ended_jobs(self._stack.engine)
            return ended["queued"] + ended["running"] + ended["cancelling"]
        return _OPEN_JOBS


def evil_document(number: int, root: Path) -> dict[str, Any]:
    """A small job with one of the attacks."""
    return {
        "kind": "factors",
        "model": {
            "source": "factory",
            "factory": "kronoscope_evil:make",
            "kwargs": {"number": number, "root": str(root)},
        },
        "data": {"source": "synthetic", "shape": [12], "examples": 40, "classes": 5, "seed": number},
        "task": {"type": "classification"},
        "collection": {"batch_size": 4},
    }


def ended_jobs(engine: Engine) -> Counter[str]:
    """How many of its jobs are in which state."""
    with engine.connect() as connection:
        return Counter(str(each) for each in connection.execute(_ENDED).scalars())
