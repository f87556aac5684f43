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

Standard library only, and modules of ours that are too: it is started once per job and must be cheap and unbreakable.

    python -P -m worker.process.guardian --lifeline FD [--until SECONDS] [--lock FD] [--report FD] [--confinement JSON]
        -- COMMAND...
"""

import argparse
import contextlib
import ctypes
import errno
import math
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from worker.process.confinement import Confinement
from worker.process.disk_monitor import DiskMonitor
from worker.process.node_clock import node_seconds
from worker.process.process_group import kill_descendants

NOT_STARTED = 71
"""The exit code where the command could not be started: sysexits.h's for what the system refused."""

MOMENT = struct.Struct("=d")
"""One message on the lifeline: a moment of the machine's clock (`node_seconds`)."""

_PR_SET_DUMPABLE = 4  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGES_BYTES = 512 * MOMENT.size
_LONGEST_WAIT_SECONDS = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that stands on the guardian's command line."""
    parser = argparse.ArgumentParser(prog="worker.process.guardian")
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--until", type=float, default=math.inf)
    parser.add_argument("--lock", type=int)
    parser.add_argument("--report", type=int)
    parser.add_argument("--confinement", type=Confinement.from_text, default=Confinement())
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if options.lock is not None:
        os.set_inheritable(options.lock, False)  # held until this process ends; the command could release it
    return guard(options.command, options.lifeline, options.confinement, options.until, options.report)


def guard(
    command: Sequence[str],
    lifeline: int,
    confinement: Confinement,
    until: float = math.inf,
    report: int | None = None,
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
        process, finish = _start(command, confinement, report)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{command[0]} cannot be started: {getattr(error, 'strerror', None) or error}\n")
        return NOT_STARTED
    while True:
        if terminate_asked:
            terminate_asked = False
            process.terminate()
        _reap_orphans(process.pid)
        code = process.poll()
        if code is not None:
            kill_descendants(os.getpid())
            finish()
            return code if code >= 0 else 128 - code
        readable, _, _ = select.select([lifeline, asked], [], [], _seconds_until(until))
        if asked in readable:
            os.read(asked, 512)
        if lifeline in readable:
            until = _read_moment(lifeline)
        if node_seconds() >= until:
            _end_group()


def _start(
    command: Sequence[str], confinement: Confinement, report: int | None
) -> tuple[subprocess.Popen[bytes], Callable[[], object]]:
    """The command's process, and what is to be called when it has ended."""
    monitor = None
    if confinement.disk is not None and report is not None:
        os.set_inheritable(report, False)
        monitor = DiskMonitor(confinement.disk, confinement.user, report, _end_group)
        confinement = replace(confinement, file_bytes=min(confinement.file_bytes, monitor.file_bytes()))
    # the parent's own command line, no shell
    process = subprocess.Popen(command, close_fds=False, **confinement.popen_arguments())  # noqa: S603
    if monitor is None:
        return process, lambda: None
    try:
        monitor.start()
    except RuntimeError as error:  # no thread is to be had
        kill_descendants(os.getpid())
        raise OSError(errno.EAGAIN, f"nobody can look at its disk ({error})") from error
    return process, monitor.finish


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
