"""The lock of a service's folder: one embedded service at a time works on it, and a second one learns of the first.

The first process and those that it starts hold the lock together; the kernel releases it when the last of them has
ended, however they ended. The locked file holds the address and the first process's number. Where that process has
ended, the others are about to, and the next start waits for them.
"""

import fcntl
import json
import os
import time
from pathlib import Path

_FILE = "service.lock"
_POLL_SECONDS = 0.1
LEAVE_SECONDS = 12.0
"""Longer than the processes of a service take to end after its first one."""


class FolderInUse(Exception):
    """A service that works on the folder; the message has its address."""


class ServiceLock:
    """The lock of one folder, held from its construction on."""

    def __init__(self, folder: Path) -> None:
        """Take the lock; ``FolderInUse`` if another service works there, ``OSError`` if the folder keeps no locks."""
        self._path = folder / _FILE
        self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        """For the processes of the service to hold as well."""
        try:
            self._take(time.monotonic() + LEAVE_SECONDS)
            self.write(None)
        except BaseException:
            os.close(self.descriptor)
            raise

    def write(self, address: str | None) -> None:
        """Write the service's address for those that find the folder locked."""
        text = json.dumps({"address": address, "process": os.getpid()})
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text.encode(), 0)

    def close(self) -> None:
        """Release the lock, unless a process of the service still holds it."""
        os.close(self.descriptor)

    def _take(self, until: float) -> None:
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                address, process = self._holder()
                if (process is None or _lives(process)) or time.monotonic() > until:
                    raise FolderInUse(_sentence(self._path.parent, address, process)) from None
                time.sleep(_POLL_SECONDS)
            else:
                return

    def _holder(self) -> tuple[str | None, int | None]:
        """The address and the first process of the service that holds the lock, as far as it has written them."""
        try:
            content = json.loads(os.pread(self.descriptor, 4096, 0))
            return content["address"], int(content["process"])
        except (OSError, ValueError, KeyError, TypeError):
            return None, None


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _sentence(folder: Path, address: str | None, process: int | None) -> str:
    service = "another service that is starting" if address is None else f"the service at {address}"
    number = "" if process is None else f" (process {process})"
    return f"{folder} is in use by {service}{number}; use that one, end it, or give another folder with --data-dir"
