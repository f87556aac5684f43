"""Whether anything of a process group still runs.

The kernel keeps a dead process as a zombie until somebody reaps it, and orphans are reaped by
whatever is process 1, at its leisure; a zombie whose threads are gone holds no file, no memory and
no device, so it does not count.
"""

import contextlib
import os
import time
from pathlib import Path

_PROC = Path("/proc")
_POLL_SECONDS = 0.01


def wait_until_gone(group: int, seconds: float) -> bool:
    """Wait for the end of a group that was killed; whether it came within the time."""
    deadline = time.monotonic() + seconds
    while _runs(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)  # there is no event to wait for: its members are nobody's children here
    return True


def _runs(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    if not (_PROC / "self" / "stat").exists():
        return True
    return any(_counts(entry, group) for entry in _PROC.iterdir() if entry.name.isdigit())


def _counts(entry: Path, group: int) -> bool:
    """Whether one process is of the group and more than a zombie."""
    with contextlib.suppress(OSError):  # it ended while we looked
        state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        if int(its_group) == group:
            return state not in "ZX" or len(list((entry / "task").iterdir())) > 1
    return False
