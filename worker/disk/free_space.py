"""Free space on a disk: whether it is full, and whether there is enough for another job."""

import errno
import shutil
from pathlib import Path

DISK_FULL = "disk_full"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def describe_full_disk(error: OSError) -> str | None:
    """Describe a full disk or quota in a sentence with folder and free bytes; None where the error is another one."""
    if error.errno not in _FULL:
        return None
    place = existing(Path(str(error.filename2 or error.filename or ".")))
    return (
        f"the disk of {place} is full ({error.strerror}; {free_bytes(place):,} bytes are free there by now); "
        "make room there; a service tries the job again after a pause, and `kronoscope run` once it is called again"
    )


def existing(path: Path) -> Path:
    """Return the nearest folder that exists."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def free_bytes(folder: Path) -> int:
    """Return the bytes that a process without privileges may still write below a folder, which need not exist yet."""
    return shutil.disk_usage(existing(folder)).free


def free_share(folder: Path, size_bytes: int = 0) -> float:
    """Return the share of a disk that is free, or would be after a write; 1 where the disk does not tell its size."""
    usage = shutil.disk_usage(existing(folder))
    return max(0, usage.free - size_bytes) / usage.total if usage.total else 1.0
