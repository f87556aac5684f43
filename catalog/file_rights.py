"""File rights of a thread: as which user and group it comes to files, whoever its process is.

The kernel keeps both for each thread (setfsuid(2), setfsgid(2)). A worker that may become the users of its jobs
reads and removes what a job has written as that job, so no job has to share a group with it.
"""

import contextlib
import ctypes
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

_UNCHANGED = -1
"""The number with which both calls change nothing, and tell what is."""


@contextlib.contextmanager
def acting_as(user: int | None = None, group: int | None = None) -> Iterator[None]:
    """Let this thread be another user and group to the file system, and no other thread.

    A thread that is started meanwhile is the same for ever: start none.

    Args:
        user: The user; None: as before.
        group: The group, beside those that the process has; None: as before.

    Raises:
        PermissionError: If this process may not.
    """
    libc = ctypes.CDLL(None)
    with contextlib.ExitStack() as undone:
        # the group first: who has become another user may not choose it any more
        for change, number in ((libc.setfsgid, group), (libc.setfsuid, user)):
            if number is not None:
                undone.callback(change, int(change(number)))
                # the calls tell no error
                if int(change(_UNCHANGED)) != number:
                    raise PermissionError(f"this process may not come to files as user {user} and group {group}")
        yield


def remove_as_owner(folder: Path) -> None:
    """Remove a folder of this thread's user with folders that were closed; what is another's stays.

    Args:
        folder: The folder; one that is not there is no error.
    """
    left = [folder]
    while left:
        each = left.pop()
        with contextlib.suppress(OSError):
            status = each.lstat()
            if not stat.S_ISDIR(status.st_mode):
                continue
            with contextlib.suppress(OSError):  # another's
                each.chmod(status.st_mode | stat.S_IRWXU)
            left += each.iterdir()
    shutil.rmtree(folder, ignore_errors=True)
