"""Locks by which workers of one machine tell which of them have ended, without asking the database or each other.

Each worker holds a lock on a file of its own below the artifacts, and every guardian that it starts holds the same
one. The kernel releases it when the last of them has ended, however they ended, in whichever container they ran. So a
lock that can be had means: that worker is dead, and so is everything that its guardians guarded. Then its leases
need not run out first. From another machine or without a common folder, the leases show it instead.

A file's name holds the boot of the kernel, since over a network a lock may be lost while its holder lives.

    .lock of this boot        free: its worker is dead. Its jobs are taken back, and later the file away
    .new of this boot         free for some time: its worker was killed before it had the name of a lock. Taken away
    either of another boot    free, and untouched for 30 days: taken away. Its holder touches it every hour
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from worker.devices import boot_id

_FOLDER = ".workers"
_FORGET_SECONDS = 15.0
"""How long a dead worker is looked at: a claim that it had sent may be committed after its end."""
_OLD_SECONDS = 30 * 86_400.0
_TOUCH_SECONDS = 3600.0


class WorkerLock:
    """The lock of one worker; made by ``hold``."""

    def __init__(self, artifact_root: Path, worker_id: str) -> None:
        self.descriptor: int | None = None
        """For guardians to hold; None where there is no lock."""
        self._path = artifact_root / _FOLDER / f"{boot_id() or '?'}.{worker_id}.lock"
        self._touched = 0.0

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
        self.descriptor, self._touched = descriptor, time.monotonic()

    def touch(self) -> None:
        """Show other machines, which may not see the lock, that it is held; called as often as one likes."""
        if self.descriptor is not None and time.monotonic() - self._touched >= _TOUCH_SECONDS:
            self._touched = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.descriptor)

    def release(self) -> None:
        """Take the file away, since nothing is left to show; a second call changes nothing."""
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
        """Have the jobs of every ended worker taken back, and forget it some time later."""
        taken = 0
        paths = sorted((*self._folder.glob("*.lock"), *self._folder.glob("*.new")))
        self._since = {path: since for path, since in self._since.items() if path in paths}
        for path in paths:
            boot, _, worker_id = path.stem.rpartition(".")
            if boot != self._boot:
                self._forget_old(path)
            elif path.suffix == ".lock":
                taken += self._look(path, worker_id, take_back)
            else:
                self._look(path, worker_id, lambda _: 0)
        return taken

    def _look(self, path: Path, worker_id: str, take_back: Callable[[str], int]) -> int:
        # a lock on its way to its name is not touched before it has had the time to get there
        if path.suffix == ".new" and not self._is_known(path):
            return 0
        with _taken(path) as is_free:
            if not is_free:
                self._since.pop(path, None)
                return 0
            taken = take_back(worker_id)
            if self._is_known(path):
                del self._since[path]
                path.unlink(missing_ok=True)
            return taken

    def _is_known(self, path: Path) -> bool:
        """Whether a file was looked at long enough."""
        return time.monotonic() - self._since.setdefault(path, time.monotonic()) > _FORGET_SECONDS

    def _forget_old(self, path: Path) -> None:
        if _age(path) > _OLD_SECONDS:
            with _taken(path) as is_free:
                if is_free:
                    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _taken(path: Path) -> Iterator[bool]:
    """Hold the lock of a file meanwhile; False where another does, or the file is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it was taken away meanwhile
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except OSError:  # it lives, or another looks at it just now
        is_free = False
    try:
        yield is_free
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
