"""The spare child of a worker: started before its job is known, and used once.

It has imported what jobs need (``worker.execution.spare``) and holds nothing of any job: no file, no right, no device.
Its guardian and its pipes are those of any child; what a job brings with it comes later, in two files that the child
can only read: the assignment, and the *order* with the job's limits and environment.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from worker.process.child_process import Child, Hold
from worker.process.confinement import Confinement

SPARE = (sys.executable, "-P", "-m", "worker.execution.spare")


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    """A child that waits, and the files that it will read."""

    child: Child
    assignment: IO[bytes]
    order: IO[bytes]

    def close(self) -> None:
        self.child.close()
        self.close_files()

    def close_files(self) -> None:
        for file in (self.assignment, self.order):
            with contextlib.suppress(OSError):  # what could not be written is not needed
                file.close()


class SpareChild:
    """The place of the child that waits for the next job; there is one in it, or none."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Begin without one; it imports in this environment, and a job that needs another gets a new program."""
        self._environment = environment
        self._lock = threading.Lock()
        self._waiting: _Waiting | None = None
        self._closed = False

    def prepare(self, lock: int | None) -> None:
        """Start one that waits, unless one does or no process is to be had; its guardian holds on to the ``lock``."""
        with self._lock:
            if self._closed or (self._waiting is not None and not self._waiting.child.has_ended()):
                return
            if self._waiting is not None:
                self._waiting.close()
            self._waiting = None
            with contextlib.suppress(OSError):
                self._waiting = self._start(lock)

    def take(
        self, assignment: Mapping[str, Any], environment: Mapping[str, str], confinement: Confinement, hold: Hold
    ) -> Child | None:
        """Have the one that waits begin a job, as `Child.start` would; None where none waits, and nothing was begun."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        names = sorted({*environment, *self._environment})
        changed = {
            each: environment.get(each) for each in names if environment.get(each) != self._environment.get(each)
        }
        order = {"confinement": confinement.as_text(), "environment": dict(environment), "changed": changed}
        try:
            for file, content in ((waiting.assignment, assignment), (waiting.order, order)):
                file.write(json.dumps(content, allow_nan=False).encode())
                file.flush()
        except OSError:
            waiting.close()
            return None
        if waiting.child.has_ended():
            waiting.close()
            return None
        waiting.close_files()
        waiting.child.begin(confinement.user, hold.until)
        return waiting.child

    def close(self) -> None:
        """End the one that waits, and start no more."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.close()

    @property
    def pid(self) -> int | None:
        """Process id of the guardian of the one that waits."""
        with self._lock:
            return None if self._waiting is None else self._waiting.child.pid

    def _start(self, lock: int | None) -> _Waiting:
        with contextlib.ExitStack() as files:
            (assignment, given), (order, ordered) = (_file(files) for _ in range(2))
            passed = (ordered.fileno(), *(() if lock is None else (lock,)))
            arguments = ["--order", str(ordered.fileno()), *(() if lock is None else ("--lock", str(lock)))]
            child = Child.launch(given, subprocess.PIPE, self._environment, SPARE, arguments, passed)
            files.pop_all()
        given.close()
        ordered.close()
        return _Waiting(child=child, assignment=assignment, order=order)


def _file(files: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """A file without a name: to be written, and opened anew to be read only."""
    with tempfile.NamedTemporaryFile() as named:
        place = Path(named.name)
        return files.enter_context(place.open("wb")), files.enter_context(place.open("rb"))
