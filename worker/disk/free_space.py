"""Room on a disk: how a full one is told, and whether there is enough for another job."""

import errno
import shutil
from pathlib import Path

DISK_FULL = "disk_full"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def describe_full_disk(error: OSError) -> str | None:
    """A sentence with the folder and the bytes where a disk, or its quota, is full; None for every other error."""
    if error.errno not in _FULL:
        return None
    place = existing(Path(str(error.filename2 or error.filename or ".")))
    return (
        f"the disk of {place} is full ({error.strerror}; {free_bytes(place):,} bytes are free there by now); "
        "make room there, the job is tried again after a pause"
    )


def existing(path: Path) -> Path:
    """The folder that a path lies in, or the first above it that is there."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def free_bytes(folder: Path) -> int:
    """What may still be written there."""
    return shutil.disk_usage(existing(folder)).free
