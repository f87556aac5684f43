"""The guardian: starts one command and never lets it outlive the process that asked for it.

It leads its own session; the command and everything the command starts are in its process
group. The parent holds the other end of the *lifeline*, a pipe on which nothing is ever
written: however the parent dies, the kernel closes its end, the guardian reads end-of-file and
kills the whole group. (PR_SET_PDEATHSIG is no answer: it fires when the starting *thread* ends.)

What the command starts in a session of its own is in no group of ours; the guardian is the
*subreaper* of all of it, so that it can be found below the guardian and ends with the rest.

The command runs within limits (``worker.process.confinement``), and cannot look into the guardian's memory.

Standard library only, and modules of ours that are too: it is started once per job and must be cheap and unbreakable.

    python -P -m worker.process.guardian --lifeline FD [--confinement JSON] -- COMMAND...
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

from worker.process.confinement import Confinement
from worker.process.process_group import kill_descendants

NOT_STARTED = 71
"""The exit code where the command could not be started: sysexits.h's for what the system refused."""

_PR_SET_DUMPABLE = 4  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that stands on the guardian's command line.

    Args:
        arguments: The command line without the program's name; None for that of the process.

    Returns:
        The command's exit code, 128 + n if signal n ended it, 71 if it could not be started.
    """
    parser = argparse.ArgumentParser(prog="worker.process.guardian")
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--confinement", type=Confinement.from_text, default=Confinement())
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    return guard(options.command, options.lifeline, options.confinement)


def guard(command: Sequence[str], lifeline: int, confinement: Confinement) -> int:
    """Start a command, forward SIGTERM to it, and kill its group when the lifeline ends.

    Args:
        command: The program and its arguments.
        lifeline: A descriptor that closes when the parent is gone.
        confinement: What the command is held to.

    Returns:
        The command's exit code, 128 + n if signal n ended it, 71 if it could not be started.
    """
    if os.getpgrp() != os.getpid():
        os.setpgrp()  # killing the group must never reach whoever started us
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
        # the parent's own command line, no shell
        process = subprocess.Popen(command, close_fds=False, **confinement.popen_arguments())  # noqa: S603
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
            return code if code >= 0 else 128 - code
        readable, _, _ = select.select([lifeline, asked], [], [])
        if asked in readable:
            os.read(asked, 512)
        if lifeline in readable and not os.read(lifeline, 1):
            kill_descendants(os.getpid())
            os.killpg(os.getpgrp(), signal.SIGKILL)


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
