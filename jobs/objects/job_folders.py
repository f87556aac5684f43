"""Job folders: the rights of the folders that one job writes into, and no other job enters.

::

    root/<job>                    the service's; entered by the job's group
    root/<job>/<fence>            the service's; written by the job's group
    root/<job>/.waiting/<fence>   likewise

A job's group has the number of its user, and no other user is in it. The service comes to what a job has written with
that group's rights, which it borrows for the moment. Where jobs run as the service's user none of this is needed.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from catalog.file_rights import acting_as, remove_as_owner
from catalog.open_beneath import READ

_BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system's own."""
_ENTERED, _WRITTEN = 0o750, 0o770


def give(folder: Path, group: int, *, written: bool) -> None:
    """Give a folder of the service to the group of a job, with all that earlier attempts have left in it.

    The job may enter it, and write there only if ``written``. ``OSError`` if the folder is another's.
    """
    status = folder.stat()
    if status.st_gid != group:
        # what an earlier version has written belongs to other users and groups; a folder after what is in it, since
        # this process may come there by the group that it has now
        for each in sorted(folder.rglob("*"), reverse=True):
            with contextlib.suppress(OSError):
                _give_one(each, group)
        _give_one(folder, group)
    folder.chmod(_WRITTEN if written else _ENTERED)


def give_new(folder: Path, group: int) -> None:
    """Make a folder below one that was given to a job's group, for the job to write into."""
    folder.mkdir(exist_ok=True)
    give(folder, group, written=True)


def _give_one(path: Path, group: int) -> None:
    descriptor = os.open(path, READ | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        # an owner gives to a group that it has
        with acting_as(None if status.st_uid == os.geteuid() else status.st_uid, group):
            os.fchown(descriptor, -1, group)
            mode = stat.S_IMODE(status.st_mode)
            os.fchmod(descriptor, mode | (mode & stat.S_IRWXU) >> 3)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def within(folder: Path) -> Iterator[None]:
    """Let this thread read what a job has written, with a group or as the service's user; start no thread meanwhile."""
    with _acting_for(folder, as_user=False):
        yield


def clear(folder: Path) -> None:
    """Remove a folder of a job, if there is one, with folders that the job has closed; what cannot be removed stays."""
    group = _group(folder)
    if group is not None:
        with contextlib.suppress(PermissionError), acting_as(group, group):
            remove_as_owner(folder)
    remove_as_owner(folder)


def size(folder: Path) -> int:
    """Return the bytes that a folder of a job takes on the disk, 0 of one that is not there.

    Those of its blocks, and of all that is below it; a file with several names counts once.
    """
    with _acting_for(folder, as_user=True):
        blocks = {(status.st_dev, status.st_ino): status.st_blocks for status in statuses(folder)}
    return sum(blocks.values()) * _BLOCK_BYTES


def statuses(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of a folder and of all below it, as far as a path reaches; links are not followed."""
    left = [str(folder)]
    with contextlib.suppress(OSError):
        yield folder.lstat()
    while left:
        # without recursion, which a job can make too deep
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)


@contextlib.contextmanager
def _acting_for(folder: Path, *, as_user: bool) -> Iterator[None]:
    """Act by the group of a job's folder, on request as its user of the same number, where this process may."""
    group = _group(folder)
    with contextlib.ExitStack() as acting:
        if group is not None:
            with contextlib.suppress(PermissionError):  # what is then opened says so
                acting.enter_context(acting_as(group if as_user else None, group))
        yield


def _group(folder: Path) -> int | None:
    """The job's group that a folder was given to; None where there is no such folder, or it is the service's own."""
    try:
        group = folder.stat().st_gid
    except OSError:
        return None
    return None if group in (0, os.getegid(), *os.getgroups()) else group
