"""A process group, and all processes below one: which of them still run, and their end.

The kernel keeps a dead process as a zombie until it is reaped, and orphans are reaped by
whatever is process 1, at its leisure; a zombie whose threads are gone holds no file, no memory and
no device, so it does not count.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_CHUNK_BYTES = 65_536
_LEFT_OVER_BYTES = 2**20  # as much as a pipe holds
_PROC = Path("/proc")
_POLL_SECONDS = 0.01
_LONGEST_STEP_SECONDS = 0.1


def wait_until_gone(group: int, seconds: float) -> bool:
    """Wait for the end of a process group that was killed."""
    left = seconds
    while _runs(group):
        if left <= 0:
            return False
        before = time.monotonic()
        time.sleep(_POLL_SECONDS)  # there is no event to wait for: its members are not children of this process
        left -= min(time.monotonic() - before, _LONGEST_STEP_SECONDS)
    return True


def began(pid: int) -> int | None:
    """Return when a process began, in clock ticks since the machine's start; None where there is no such process.

    It tells the process from a later one of the same number.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    return None


def group_lives(leader: int, leader_began: int | None) -> bool:
    """Return whether anything runs of the group that a process led, which began at that moment (`began`)."""
    now = began(leader)
    if now is not None and leader_began is not None and now != leader_began:
        return False  # another process has the number, so no member of the group was left
    return _runs(leader)


def kill_descendants(root: int) -> None:
    """Kill every process below one, also those that left its process group; it goes on itself.

    Repeated until a look finds nothing new, since what is about to die may still start something.
    """
    killed: set[int] = set()
    while found := descendants(root) - killed:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def descendants(root: int) -> set[int]:
    """Return the numbers of the processes below one in this namespace, as far as they can be seen."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):  # no /proc, no list: the group is what can be killed there
        for entry in _PROC.iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it ended while we looked
                    parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                    children.setdefault(parent, []).append(int(entry.name))
    below: set[int] = set()
    left = [root]
    while left:
        found = children.get(left.pop(), [])
        below.update(found)
        left += found
    return below


def _runs(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    if not (_PROC / "self" / "stat").exists():
        return True
    try:
        return any(_counts(entry, group) for entry in _PROC.iterdir() if entry.name.isdigit())
    except OSError:
        return True  # as far as anybody can tell


def _counts(entry: Path, group: int) -> bool:
    """Whether one process is of the group and more than a zombie."""
    with contextlib.suppress(OSError):  # it ended while we looked
        state, _, its_group = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
        if int(its_group) == group:
            return state not in "ZX" or len(list((entry / "task").iterdir())) > 1
    return False


def lines(descriptor: int, gone: int, limit: int) -> Iterator[bytes]:
    """Yield each line of a pipe that a process writes to, with its end, until that process's group is gone.

    A pipe reads end-of-file only once no process has it open for writing, and what a child leaves behind in a session
    of its own may have it open for days. Of a longer line ``limit`` bytes come; the last may have been cut short.
    """
    pending = bytearray()
    searched = 0
    for chunk in _chunks(descriptor, gone):
        pending += chunk
        while pending:
            end = pending.find(b"\n", searched, limit) + 1
            if not end and len(pending) < limit:
                searched = len(pending)
                break
            piece = bytes(pending[: end or limit])
            del pending[: len(piece)]
            searched = 0
            yield piece
    if pending:
        yield bytes(pending)


def _chunks(descriptor: int, gone: int) -> Iterator[bytes]:
    while True:
        readable, _, _ = select.select([descriptor, gone], [], [])
        if gone in readable:
            os.set_blocking(descriptor, False)
            with contextlib.suppress(BlockingIOError):
                yield os.read(descriptor, _LEFT_OVER_BYTES)
            return
        chunk = os.read(descriptor, _CHUNK_BYTES)
        if not chunk:
            return
        yield chunk
