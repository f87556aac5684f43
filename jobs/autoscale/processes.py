"""Processes as machines that any command lends: a worker here, `ssh`, `docker run`, `sky launch`.

A machine lasts as long as its process. It has a session of its own and outlives this program; it is known by its
number and the moment it began, and where that was never written down, by the machine's id in its environment.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from jobs.autoscale.launcher import Lent, NewMachine
from jobs.errors import LauncherFailed

_VARIABLE = "KRONOSCOPE_MACHINE"
_PROCESSES = Path("/proc")
_BEGAN = 19
"""Position of a process's beginning among the fields of `/proc/PID/stat` after the command's name."""


class Processes:
    """The launcher `command`."""

    def __init__(self, logs: Path, scope: str | None = None) -> None:
        """Get ready."""
        self.scope = f"command on {scope or socket.gethostname()}"
        self._logs = logs
        self._children: set[int] = set()

    def start(self, machine: NewMachine) -> str:
        """Start a process."""
        place = self._logs / f"{machine.class_name}-{machine.id}.log"
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            pid = os.posix_spawn(
                "/bin/sh",
                ["/bin/sh", "-c", machine.script],
                {**os.environ, _VARIABLE: machine.id},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, str(place), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
            )
        except OSError as error:
            raise LauncherFailed(f"the command cannot be started, with its output in {place} ({error})") from error
        self._children.add(pid)
        return f"{pid} {_began(pid)}"

    def lent(self, known: Mapping[str, str | None]) -> dict[str, Lent]:
        """List the processes that have not ended."""
        self._children = {pid for pid in self._children if not _has_ended(pid)}
        found = {}
        lost = {machine_id for machine_id, handle in known.items() if handle is None}
        for machine_id, handle in known.items():
            if handle is not None and _lives(handle):
                found[machine_id] = Lent(handle=handle, stage="running")
        for machine_id, pid in _by_environment(lost):
            found.setdefault(machine_id, Lent(handle=f"{pid} {_began(pid)}", stage="running"))
        return found


def _has_ended(child: int) -> bool:
    """Whether a process that was started here has ended; the kernel then forgets it."""
    try:
        return os.waitpid(child, os.WNOHANG) != (0, 0)
    except ChildProcessError:  # it was forgotten already
        return True


def _lives(handle: str) -> bool:
    pid, _, began = handle.partition(" ")
    return pid.isdecimal() and _began(int(pid)) == began != ""


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty for one that has ended."""
    try:
        fields = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[_BEGAN]


def _by_environment(ids: set[str]) -> list[tuple[str, int]]:
    """The first process, by its number, that has each of the ids in its environment."""
    if not ids:
        return []
    found = []
    for place in sorted(_PROCESSES.iterdir(), key=lambda each: each.name.zfill(12)):
        if place.name.isdecimal():
            try:
                variables = (place / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # another user's, or gone
            name = next((each.partition("=")[2] for each in variables if each.startswith(f"{_VARIABLE}=")), "")
            if name in ids:
                found.append((name, int(place.name)))
    return found
