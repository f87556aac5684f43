"""Leftovers of a job's user on a machine, once none of its processes runs: shared memory, queues, temporary files.

The places are open to every user, and nothing else removes what is in them. A thread of the service removes the user's
files as that user.
"""

import contextlib
import os
import subprocess
import tempfile
import threading
from pathlib import Path

from catalog.file_rights import acting_as, remove_as_owner

_QUEUES = Path("/proc/sysvipc")
_KINDS = ("shm", "sem", "msg")
_SECONDS = 20.0


def clear_leftovers(user: int) -> None:
    """Remove what a user has left in the places that everybody may write to; what cannot be removed stays."""
    if user == os.getuid() or _runs_anything(user):
        return
    # in a thread of its own, which ends: nothing else is ever done as the job's user
    clearing = threading.Thread(target=_clear_as, args=(user,), name=f"clear-{user}", daemon=True)
    try:
        clearing.start()
    except RuntimeError:
        return  # no thread is to be had
    clearing.join(_SECONDS)
    if any(_has_queues(kind, user) for kind in _KINDS):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            # only their owner removes them, and no thread can be it for that
            subprocess.run(
                ["ipcrm", "--all"],  # noqa: S607 - the system's
                user=user,
                group=user,
                extra_groups=[],
                capture_output=True,
                timeout=_SECONDS,
                check=False,
            )


def _clear_as(user: int) -> None:
    with contextlib.suppress(OSError), acting_as(user, user):
        for place in ("/dev/shm", "/dev/mqueue", "/tmp", "/var/tmp", tempfile.gettempdir()):  # noqa: S108 - everybody's
            for path in _entries(Path(place)):
                with contextlib.suppress(OSError):
                    if path.lstat().st_uid == user:
                        remove_as_owner(path)
                        path.unlink(missing_ok=True)


def _runs_anything(user: int) -> bool:
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):  # it ended while we looked
            lines = status.read_text(errors="replace").splitlines()
            state = next(line.split()[1] for line in lines if line.startswith("State:"))
            users = next(line.split()[1:] for line in lines if line.startswith("Uid:"))
            if state not in "ZX" and str(user) in users:
                return True
    return False


def _entries(place: Path) -> list[Path]:
    try:
        return list(place.iterdir())
    except OSError:
        return []


def _has_queues(kind: str, user: int) -> bool:
    """Whether a user has shared memory, semaphores or queues of System V."""
    try:
        heading, *rows = (line.split() for line in (_QUEUES / kind).read_text().splitlines())
        return any(int(row[heading.index("uid")]) == user for row in rows)
    except (OSError, ValueError, IndexError):
        return False
