"""File rights of a thread: the user and group by which it comes to files, whatever its process's are.

The kernel keeps both for each thread (setfsuid(2), setfsgid(2)). A worker that may become the users of its jobs
reads and removes what a job has written as that job, so no job has to share a group with it.
"""

import contextlib
import ctypes
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW
_UNMOVED_DEPTH = 8
"""Folders in each other out of which nothing can be moved: those that are another's, which gives few."""
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
    """Remove a folder, if there is one, with what this thread may remove, closed folders too; what is another's stays.

    Folders may lie in each other deeper than any path or recursion reaches: each is moved up to the top before it is
    emptied, so that a few are open at a time.
    """
    with contextlib.suppress(OSError):
        top = _open_as_owner(str(folder), None)
        try:
            _empty(top, _UNMOVED_DEPTH)
        finally:
            os.close(top)
        folder.rmdir()


def _empty(top: int, deeper: int) -> None:
    """Remove what lies in a folder, as long as any of it can be removed; what was moved up comes with the next look."""
    while any([_remove(name, top, deeper) for name in _names(top)]):  # noqa: C419 - each, not up to the first
        pass


def _remove(name: str, top: int, deeper: int) -> bool:
    """Remove a file, or a folder after its folders were moved up; whether that succeeded."""
    with contextlib.suppress(OSError):
        try:
            os.unlink(name, dir_fd=top)
        except (IsADirectoryError, PermissionError):  # it is a folder, or the one above cannot be written to
            emptied = _open_as_owner(name, top)
            try:
                cleared = [_remove_or_move_up(each, emptied, top) for each in _names(emptied)]
                if not all(cleared) and deeper:
                    _empty(emptied, deeper - 1)
            finally:
                os.close(emptied)
            os.rmdir(name, dir_fd=top)
        return True
    return False


def _remove_or_move_up(name: str, above: int, top: int) -> bool:
    with contextlib.suppress(OSError):
        try:
            os.unlink(name, dir_fd=above)
        except (IsADirectoryError, PermissionError):
            os.close(_open_as_owner(name, above))  # only what may be written to can be moved
            os.rename(name, uuid.uuid4().hex, src_dir_fd=above, dst_dir_fd=top)
        return True
    return False


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _open_as_owner(name: str, above: int | None) -> int:
    """Open a folder, after its owner has given himself all rights to it; a link is not followed."""
    with contextlib.suppress(OSError):  # another's
        status = os.stat(name, dir_fd=above, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(name, stat.S_IMODE(status.st_mode) | stat.S_IRWXU, dir_fd=above)
    return os.open(name, _FOLDER, dir_fd=above)
