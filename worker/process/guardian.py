"""The guardian: starts one command and never lets it outlive the process that asked for it.

It leads its own session; the command and everything the command starts are in its process
group. The parent holds the other end of the *lifeline*, a pipe: however the parent dies, the
kernel closes its end, the guardian reads end-of-file and kills the whole group.
(PR_SET_PDEATHSIG is not an answer: it fires when the starting *thread* ends.)

Where the parent holds a lease it also writes until when, at each renewal. The guardian kills the
group at that moment of the machine's own clock, whether the parent is frozen, hangs in a query
or is starved: a process that waits that long may use the device.

What the command starts in a session of its own is in no group of ours; the guardian is the
*subreaper* of all of it, so that it can be found below the guardian and ends with the rest.

The command runs within limits (``worker.process.confinement``), and cannot look into the guardian's memory. What it
has on the disk is looked at while it runs; beyond its limit the group is killed, and the parent reads why.

With ``--order`` the command is started before its job is known, and without limits. The first moment on the lifeline
says that the order, a file, has been written. From then on the disk is looked at, and the command reads in the order
the limits of the process that it forks for the job (``worker.execution.spare``). One that ends before was never begun.

Standard library only, and modules of ours that are too: it is started once per job and must be cheap and unbreakable.

    python -P -m worker.process.guardian --lifeline FD [--until SECONDS] [--lock FD] [--report FD]
        [--confinement JSON | --order FD] -- COMMAND...
"""

import argparse
import contextlib
import ctypes
import errno
import json
import math
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from worker.process.confinement import Confinement
from worker.process.disk_monitor import DiskMonitor
from worker.process.process_group import kill_descendants

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # counts suspension, and is the same in every process
NOT_STARTED = 71
"""The exit code where the command could not be started: sysexits.h's for what the system refused."""
MOMENT = struct.Struct("=d")
"""One message on the lifeline: a moment of the machine's clock (`node_seconds`)."""
_PR_SET_DUMPABLE = 4  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGES_BYTES = 512 * MOMENT.size
_LONGEST_WAIT_SECONDS = 3600.0


def node_seconds() -> float:
    """Return the seconds since this machine started; only differences of two of its own readings mean anything."""
    return time.clock_gettime(_CLOCK)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that stands on the guardian's command line."""
    parser = argparse.ArgumentParser(prog="worker.process.guardian")
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--until", type=float, default=math.inf)
    parser.add_argument("--lock", type=int)
    parser.add_argument("--report", type=int)
    parser.add_argument("--confinement", type=Confinement.from_text, default=Confinement())
    parser.add_argument("--order", type=int)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if options.lock is not None:
        os.set_inheritable(options.lock, False)  # held until this process ends; the command could release it
    return guard(
        options.command, options.lifeline, options.confinement, options.until, options.report, order=options.order
    )


def guard(
    command: Sequence[str],
    lifeline: int,
    confinement: Confinement,
    until: float = math.inf,
    report: int | None = None,
    order: int | None = None,
) -> int:
    """Start a command, forward SIGTERM to it, and kill its group when the lifeline or the time ends."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()  # killing the group must never reach the process that started us
    _adopt_orphans()
    _hide_memory()
    asked, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    terminate_asked = False

    def note(number: int, _frame: object) -> None:
        nonlocal terminate_asked
        terminate_asked = terminate_asked or number == signal.SIGTERM

    # handlers stand before the command does, so that no signal falls between; they only wake the loop below
    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGCHLD, note)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    # the lifeline is ours alone; the frame pipe, made inheritable by our parent, goes on to the command
    os.set_inheritable(lifeline, False)
    try:
        started = _Started(command, confinement, report) if order is None else _Waiting(command, order, report)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{command[0]} cannot be started: {getattr(error, 'strerror', None) or error}\n")
        return NOT_STARTED
    while True:
        if terminate_asked:
            terminate_asked = False
            started.process.terminate()
        _reap_orphans(started.process.pid)
        code = started.code()
        if code is not None:
            kill_descendants(os.getpid())
            started.finish()
            return code if code >= 0 else 128 - code
        readable, _, _ = select.select([lifeline, asked], [], [], _seconds_until(until))
        if asked in readable:
            os.read(asked, 512)
        if lifeline in readable:
            until = _read_moment(lifeline)
            started.begin(until)
        if node_seconds() >= until:
            _end_group()


def read_order(order: int) -> dict[str, Any]:
    """Read the order of a job, whatever was read of its file before.

    It has the text of `confinement`, the whole `environment`, and what of it is `changed` beside that of the process.
    """
    content: dict[str, Any] = json.loads(os.pread(order, os.fstat(order).st_size, 0))
    return content


class _Started:
    """The command's process, and the look at what it has on the disk."""

    def __init__(self, command: Sequence[str], confinement: Confinement, report: int | None) -> None:
        confinement = self._limit_disk(confinement, report)
        # the parent's own command line, no shell
        self.process = subprocess.Popen(command, close_fds=False, **confinement.popen_arguments())  # noqa: S603
        self._watch_disk()

    def code(self) -> int | None:
        """The command's exit code, as `Popen.poll` returns it."""
        return self.process.poll()

    def begin(self, until: float) -> None:
        """Note that the time to run was extended."""

    def finish(self) -> None:
        """Look at the disk once more, now that the command has ended."""
        if self._monitor is not None:
            self._monitor.finish()

    def _limit_disk(self, confinement: Confinement, report: int | None) -> Confinement:
        self._monitor: DiskMonitor | None = None
        if confinement.disk is None or report is None:
            return confinement
        os.set_inheritable(report, False)
        self._monitor = DiskMonitor(confinement.disk, confinement.user, report, _end_group)
        return replace(confinement, file_bytes=min(confinement.file_bytes, self._monitor.file_bytes()))

    def _watch_disk(self) -> None:
        try:
            if self._monitor is not None:
                self._monitor.start()
        except RuntimeError as error:  # no thread is to be had
            kill_descendants(os.getpid())
            raise OSError(errno.EAGAIN, f"nobody can look at its disk ({error})") from error


class _Waiting(_Started):
    """A process that was started before its job is known, and begins it once its order is written."""

    def __init__(self, command: Sequence[str], order: int, report: int | None) -> None:
        self._order: int | None = order
        self._report = report
        self._monitor: DiskMonitor | None = None
        if report is not None:
            os.set_inheritable(report, False)
        read, self._go = os.pipe()
        os.set_inheritable(read, True)
        # the parent's own command line, no shell; limits come with the order
        command = [*command, "--go", str(read), "--order", str(order)]
        self.process = subprocess.Popen(command, close_fds=False)  # noqa: S603
        os.close(read)  # a process that has ended is noticed when it is written to

    def code(self) -> int | None:
        code = self.process.poll()
        return NOT_STARTED if code is not None and self._order is not None else code

    def begin(self, until: float) -> None:
        if self._order is None or not math.isfinite(until):
            return
        try:
            confinement = Confinement.from_text(read_order(self._order)["confinement"])
            confinement = self._limit_disk(confinement, self._report)
            self._watch_disk()
            os.write(self._go, f"{confinement.file_bytes}\n".encode())
        except (OSError, ValueError, KeyError) as error:
            sys.stderr.write(f"the job cannot be begun: {error}\n")
            kill_descendants(os.getpid())
            sys.exit(NOT_STARTED)
        os.close(self._go)
        self._order = None


def _end_group() -> None:
    kill_descendants(os.getpid())
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _read_moment(lifeline: int) -> float:
    """Return the last moment that was written; the past, where no writer is left."""
    messages = os.read(lifeline, _MESSAGES_BYTES)  # each was written at once, so none comes in pieces
    if not messages:
        return -math.inf
    moment: float = MOMENT.unpack(messages[-MOMENT.size :])[0]
    return moment


def _seconds_until(moment: float) -> float:
    return min(max(0.0, moment - node_seconds()), _LONGEST_WAIT_SECONDS)


def _adopt_orphans() -> None:
    """Become the parent of what the command's children leave behind; Linux alone can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _hide_memory() -> None:
    """As `catalog.private_memory` does for services; importing `catalog` takes three times as long as all of this."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _reap_orphans(command: int) -> None:
    """Take the exit codes of adopted processes; the command's own is left for its Popen."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == command:
                return
            os.waitpid(ended.si_pid, 0)


if __name__ == "__main__":
    sys.exit(main())
