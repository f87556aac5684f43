"""Leftovers of a job's user on a machine, once none of its processes runs: shared memory, queues, temporary files.

The places are open to every user, and nothing else removes what is in them. A thread of the service removes the user's
files as that user. It also gives back the rights to folders that the job has closed to the service.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

_QUEUES = Path("/proc/sysvipc")
_KINDS = ("shm", "sem", "msg")
_SECONDS = 20.0


def clear_leftovers(user: int, folders: Sequence[Path] = ()) -> None:
    """Remove what a user has left in the places that everybody may write to; what cannot be removed stays.

    Args:
        user: A user of jobs; while anything of it runs on this machine, as a later attempt may, nothing is removed.
        folders: The job's own folders, of which nothing is removed here.
    """
    if user == os.getuid() or _runs_anything(user):
        return
    # in a thread of its own, which ends: nothing else is ever done as the job's user
    clearing = threading.Thread(target=_clear_as, args=(user, folders), name=f"clear-{user}", daemon=True)
    try:
        clearing.start()
    except RuntimeError:
        return  # no thread is to be had
    clearing.join(_SECONDS)
    if any(_has_queues(kind, user) for kind in _KINDS):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            # only their owner removes them, and no thread can be it for that
            subprocess.run(["ipcrm", "--all"], user=user, capture_output=True, timeout=_SECONDS, check=False)  # noqa: S607


def _clear_as(user: int, folders: Sequence[Path]) -> None:
    with contextlib.suppress(OSError), acting_as(user):
        for folder in folders:
            _open_up(folder, 0o770)
        for place in ("/dev/shm", "/dev/mqueue", "/tmp", "/var/tmp", tempfile.gettempdir()):  # noqa: S108 - everybody's
            for path in _entries(Path(place)):
                with contextlib.suppress(OSError):
                    if path.lstat().st_uid == user:
                        _remove(path)


@contextlib.contextmanager
def acting_as(user: int) -> Iterator[None]:
    """Let this thread be another user to the file system, and no other thread.

    Args:
        user: The user.

    Raises:
        PermissionError: If this process may not.
    """
    libc = ctypes.CDLL(None)
    before = int(libc.setfsuid(user))
    try:
        # the call tells no error: what it returns is who one was
        if int(libc.setfsuid(user)) != user:
            raise PermissionError(f"this process may not act as user {user}")
        yield
    finally:
        libc.setfsuid(before)


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


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        _open_up(path, 0o700)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def _open_up(path: Path, mode: int) -> None:
    """Give back the rights that an owner has taken from its folders, from the uppermost down."""
    left = [path]
    while left:
        folder = left.pop()
        with contextlib.suppress(OSError):  # another's
            folder.chmod(folder.lstat().st_mode | mode)
        left += (each for each in _entries(folder) if each.is_dir() and not each.is_symlink())


def _has_queues(kind: str, user: int) -> bool:
    """Whether a user has shared memory, semaphores or queues of System V."""
    try:
        heading, *rows = (line.split() for line in (_QUEUES / kind).read_text().splitlines())
        return any(int(row[heading.index("uid")]) == user for row in rows)
    except (OSError, ValueError, IndexError):
        return False
