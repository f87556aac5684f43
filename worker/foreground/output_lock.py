"""The lock of an output folder: one foreground run at a time writes into it.

The kernel holds the lock as long as the run's process lives, so that a killed run leaves none. The locked file is
removed by the run that held it. A folder without locks, as on some network file systems, is used without one.
"""

import contextlib
import fcntl
import os
from pathlib import Path

_FILE = ".kronoscope-run.lock"


class OutputInUse(Exception):
    """Another run writes into the folder."""


class OutputLock:
    """The lock of one folder, held from its construction until `release`."""

    def __init__(self, folder: Path) -> None:
        """Take the lock of a folder that exists; ``OutputInUse`` if another run has it."""
        self._path = folder / _FILE
        self._descriptor = self._take()

    def release(self) -> None:
        """Remove the file and release the lock; a second time does nothing."""
        if self._descriptor is None:
            return
        # removed while it is locked: afterwards it may be another run's
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = None

    def _take(self) -> int | None:
        """Return the locked file's descriptor; None where the folder keeps no locks."""
        while True:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except OSError:
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise OutputInUse from None
            except OSError:
                os.close(descriptor)
                with contextlib.suppress(OSError):
                    self._path.unlink()
                return None
            if self._is_current(descriptor):
                return descriptor
            # the run that held it has ended meanwhile and removed the file
            os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        """Return whether the file of a descriptor is still the one that has the name."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False
