"""Locks by which workers of one machine tell which of them have ended, without asking the database or each other.

Each worker holds a lock on a file of its own below the artifacts, and every guardian that it starts holds the same
one. The kernel releases it when the last of them has ended, however they ended, in whichever container they ran. So a
lock that can be had means: that worker is dead, and so is everything that its guardians guarded. Then nobody need wait
for its leases to run out. What cannot be told so, from another machine or without a common folder, the leases tell.

A file's name holds the boot of the kernel, since over a network a lock may be lost while its holder lives.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from worker.devices.discover import boot_id

_FOLDER = ".workers"
_FORGET_SECONDS = 15.0
"""How long a dead worker is looked at: a claim that it had sent may be committed after its end."""
_OLD_SECONDS = 30 * 86_400.0


class WorkerLock:
    """The lock of one worker; made by ``hold``."""

    def __init__(self, artifact_root: Path, worker_id: str) -> None:
        self.descriptor: int | None = None
        """For guardians to hold; None where there is no lock."""
        self._path = artifact_root / _FOLDER / f"{boot_id() or '?'}.{worker_id}.lock"

    def hold(self) -> None:
        """Take the lock; where the folder keeps none, others wait for this worker's leases to run out."""
        made = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            _complain(error)
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made.rename(self._path)  # seen by others only with its lock
        except OSError as error:
            os.close(descriptor)
            _complain(error)
            return
        self.descriptor = descriptor

    def release(self) -> None:
        """Take the file away, since nothing is left to be told; a second call changes nothing."""
        if self.descriptor is not None:
            descriptor, self.descriptor = self.descriptor, None
            self._path.unlink(missing_ok=True)
            os.close(descriptor)


class EndedWorkers:
    """Finds workers of this machine that have ended without a word."""

    def __init__(self, artifact_root: Path) -> None:
        self._folder = artifact_root / _FOLDER
        self._boot = boot_id() or "?"
        self._since: dict[Path, float] = {}

    def sweep(self, take_back: Callable[[str], int]) -> int:
        """Have the jobs of every ended worker taken back, and forget it some time later.

        Args:
            take_back: Takes the jobs of the worker with that id, and returns how many it took.

        Returns:
            The number of jobs taken.
        """
        taken = 0
        for path in sorted(self._folder.glob("*.lock")):
            boot, _, worker_id = path.stem.rpartition(".")
            if boot == self._boot:
                taken += self._look(path, worker_id, take_back)
            elif _age(path) > _OLD_SECONDS:
                path.unlink(missing_ok=True)
        return taken

    def _look(self, path: Path, worker_id: str, take_back: Callable[[str], int]) -> int:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it was taken away meanwhile
            return 0
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # it lives, or another looks at it just now
            return 0
        else:
            taken = take_back(worker_id)
            if time.monotonic() - self._since.setdefault(path, time.monotonic()) > _FORGET_SECONDS:
                del self._since[path]
                path.unlink(missing_ok=True)
            return taken
        finally:
            os.close(descriptor)


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _complain(error: OSError) -> None:
    structlog.get_logger("kronoscope.worker").warning(
        "the artifacts' folder keeps no lock; the jobs of this worker wait for its leases if it is killed",
        why=str(error.strerror or error),
    )
