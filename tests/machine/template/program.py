"""Program of this project, as a forked process runs it: what a new interpreter would set up is set up here.

    python -P -m MODULE ARGUMENTS…
    python -P -c CODE ARGUMENTS…

A forked process shares with the one that it was forked from the modules that are imported and nothing else: signals,
descriptors, environment, folder, command line and generators of random numbers are its own.
"""

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import random
import runpy
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import threadpoolctl

from tests.machine.template.imports import MODULES

COMMAND_LINE_BYTES = 8192
"""Bytes that a template's own command line leaves for those of the programs that are forked from it."""
_PR_SET_DUMPABLE = 4  # linux/prctl.h
_KRONOSCOPE = "from kronoscope.cli import main; main()"
_SCRIPT = str(Path(sys.executable).with_name("kronoscope"))
FOREGROUND = (
    "import json, sys; from worker.foreground.__main__ import main; "
    "sys.exit(main(sys.argv[2:], json.loads(sys.argv[1])))"
)
"""Code that runs a job in the foreground by a child whose command is its first argument."""
_ARGUMENTS = slice(45, 47)
"""Position of the command line's first and last byte among the fields of `/proc/PID/stat` after the command's name."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to run."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    descriptors: tuple[int, ...]
    """Numbers that its descriptors have, in the order in which they are sent; the first three are 0, 1 and 2."""
    parent: int
    session: bool
    """Whether it leads a session of its own."""
    umask: int = -1

    def encode(self) -> bytes:
        """Return the message that asks for it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Program":
        """Read a message."""
        values: dict[str, Any] = json.loads(message)
        lists = {name: tuple(values[name]) for name in ("command", "descriptors")}
        return cls(**(values | lists))


def is_ours(command: Sequence[str]) -> bool:
    """Return whether a template can run a command: one of this project's programs by this interpreter.

    A guardian is one where what it guards is, since nothing is won by forking it alone.
    """
    if len(command) < 4 or tuple(command[:2]) != (sys.executable, "-P") or command[2] not in {"-c", "-m"}:
        return False
    if command[3] == "worker.process.guardian":
        return "--" in command and is_ours(command[command.index("--") + 1 :])
    return command[3] in MODULES if command[2] == "-m" else command[3] in {_KRONOSCOPE, FOREGROUND}


def as_program(command: Sequence[str]) -> list[str]:
    """Return a command with the installed script of this project written as the program that it runs."""
    if command and command[0] == _SCRIPT:
        return [sys.executable, "-P", "-c", _KRONOSCOPE, *command[1:]]
    return list(command)


def module_of(command: Sequence[str]) -> str | None:
    """Return the module that a command runs; None where it runs code."""
    return command[3] if command[2] == "-m" else None


def take_descriptors(received: Sequence[int], numbers: Sequence[int], kept: int | None = None) -> int | None:
    """Give descriptors their numbers, and close all others.

    Args:
        received: Descriptors, in the order of their numbers.
        numbers: The numbers that they are to have.
        kept: A descriptor that stays open and is not inherited.

    Returns:
        The number of `kept` now.
    """
    above = 1 + max(0, *received, *numbers, kept or 0)
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in received]
    left = None if kept is None else fcntl.fcntl(kept, fcntl.F_DUPFD_CLOEXEC, above)
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in (*moved, left):
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(path.name))
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)
    return left


def close_descriptors(kept: Sequence[int] | None = None) -> None:
    """Close what a new program would not inherit: all that is marked so, or all but what is named."""
    for path in list(Path("/proc/self/fd").iterdir()):
        number = int(path.name)
        with contextlib.suppress(OSError):
            if number > 2 and (not os.get_inheritable(number) or (kept is not None and number not in kept)):
                os.close(number)


def reset_signals() -> None:
    """Let every signal do what it does to a process that has just begun."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> NoReturn:
    """Run a program in this process, which was forked for it, to its end."""
    code = 1
    try:
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        _begin_anew(command)
        code = _run_to_end(command)
    finally:
        os._exit(code & 0xFF)


def _begin_anew(command: Sequence[str]) -> None:
    """Set what a new interpreter begins with."""
    reset_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    show_command(command)
    time.tzset()
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    # a path that comes from the environment stands before those of the installation
    added = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [*added, *(each for each in sys.path if each not in added)]
    importlib.invalidate_caches()
    _filter_warnings(os.environ.get("PYTHONWARNINGS", ""))
    sys.orig_argv = list(command)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    by_line = os.isatty(1) or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=by_line)  # type: ignore[union-attr]
    _set_threads(command)


def _set_threads(command: Sequence[str]) -> None:
    """Give numpy's library its threads, which it counts when it is loaded, where the program computes."""
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "1")
    if threads != "1" and module_of(command) == "worker.execution":
        threadpoolctl.ThreadpoolController().select(internal_api="openblas").limit(limits=int(threads))


def _filter_warnings(options: str) -> None:
    """Set the filters of an environment where an interpreter sets them: above its own, below those of imports."""
    if not options:
        return
    sys.warnoptions[:] = options.split(",")
    own = next(
        (number for number, each in enumerate(warnings.filters) if each[:3] == ("default", None, DeprecationWarning)),
        len(warnings.filters),
    )
    set_by_imports, interpreters = list(warnings.filters[:own]), list(warnings.filters[own:])
    warnings.resetwarnings()
    warnings._processoptions(sys.warnoptions)
    warnings.filters[:] = [*set_by_imports, *warnings.filters, *interpreters]
    warnings._filters_mutated()


def show_command(command: Sequence[str]) -> None:
    """Write a command line over that of the process, for those who look into `/proc`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = map(int, fields[_ARGUMENTS])
    if last - first < COMMAND_LINE_BYTES:
        return  # this process leaves no room for it
    text = b"\0".join(os.fsencode(each) for each in command)[: last - first - 1]
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, text, len(text))


def _run_to_end(command: Sequence[str]) -> int:
    """Run a program as the interpreter does, and return its exit code."""
    code = 0
    try:
        _run_main(command)
    except SystemExit as end:
        code = _code_of(end.code)
    except KeyboardInterrupt as error:
        _print(error)
        code = -signal.SIGINT
    except BaseException as error:  # noqa: BLE001 - whatever it is, an interpreter prints it and ends
        _print(error)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _run_main(command: Sequence[str]) -> None:
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    sys.modules["__main__"] = main
    kind, *rest = command[2:]
    if kind == "-m":
        for name in (rest[0], f"{rest[0]}.__main__"):
            # the template has imported it; a package stays, a module that is run has no other name than __main__
            if name in sys.modules and not hasattr(sys.modules[name], "__path__"):
                del sys.modules[name]
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])
    else:
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)


def _code_of(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return 1


def _print(error: BaseException) -> None:
    trace = error.__traceback__
    # the frames above are this module's
    for _ in range(2):
        trace = trace and trace.tb_next
    sys.excepthook(type(error), error, trace)
