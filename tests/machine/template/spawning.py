"""Spawning of this project's programs by forks, in the place of what `subprocess.Popen` does.

A process that was given a `Spawner` forks programs that a template can run; whatever else is started, or started in
another way than ours, is started as ever. Popen's object is the same, and so is the process: a child of the one that
asked, with the same descriptors, environment, folder and limits.
"""

import contextlib
import ctypes
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from tests.machine.template.imports import (
    ASKS,
    COMMANDS_THAT_START,
    COMPUTES_NOTHING,
    FORKS,
    MODULES,
    read_at_import,
)
from tests.machine.template.program import (
    Program,
    as_program,
    close_descriptors,
    is_ours,
    module_of,
    reset_signals,
    run,
    show_command,
    take_descriptors,
)

REPLY_SECONDS = 300
_MESSAGE_BYTES = 100_000
_NOT_FORKED = b"0"
"""The answer where the machine gives no process; the program is started as ever."""
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
_STARTED_BY_POPEN = subprocess.Popen._execute_child
_PARAMETERS = inspect.signature(_STARTED_BY_POPEN)


class Spawner(Protocol):
    """A way to start a program."""

    def spawn(self, command: Sequence[str], given: Any) -> int | None:
        """Start a program, and return its process; None where it cannot be started in this way."""


def install(spawner: Spawner | None) -> None:
    """Start programs in this process by a spawner from now on; None: as ever."""
    if spawner is None:
        subprocess.Popen._execute_child = _STARTED_BY_POPEN
        return

    def execute_child(self: Any, *arguments: Any) -> None:
        given = SimpleNamespace(**_PARAMETERS.bind(self, *arguments).arguments)
        command = _words(given.args)
        if given.shell or given.executable is not None or not is_ours(command):
            _STARTED_BY_POPEN(self, *arguments)
            return
        pid = spawner.spawn(command, given)
        if pid is None:
            _STARTED_BY_POPEN(self, *arguments)
            return
        self.pid = pid
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(getattr(given, name) for name in ends))

    subprocess.Popen._execute_child = execute_child


def spawner_of(command: Sequence[str], link: socket.socket | None) -> Spawner | None:
    """Return how a program starts others."""
    module = module_of(command)
    if module is not None and MODULES[module] == FORKS:
        return Forking()
    return None if link is None else Asking(link, read_at_import(os.environ))


def asks(command: Sequence[str]) -> bool:
    """Return whether a program needs a template of its own."""
    module = module_of(command)
    return bool(COMMANDS_THAT_START & set(command[4:])) if module is None else MODULES[module] == ASKS


def _words(arguments: Any) -> list[str]:
    words = [] if isinstance(arguments, str | bytes | os.PathLike) else [os.fsdecode(each) for each in arguments]
    return as_program(words)


class Asking:
    """Spawns by a template, a process below this one: what it forks becomes this process's child."""

    def __init__(self, link: socket.socket, variables: Mapping[str, str]) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._variables = variables

    def spawn(self, command: Sequence[str], given: Any) -> int | None:
        """Ask for a program."""
        environment = (
            dict(os.environ) if given.env is None else {os.fsdecode(k): os.fsdecode(v) for k, v in given.env.items()}
        )
        usual = (given.preexec_fn, given.uid, given.gid, given.gids) == (None, None, None, None)
        if not usual or not given.close_fds or given.process_group not in (None, -1):
            return None
        if module_of(command) not in COMPUTES_NOTHING and read_at_import(environment) != self._variables:
            return None
        pairs = [(given.p2cread, 0), (given.c2pwrite, 1), (given.errwrite, 2)]
        stdio = [number if end == -1 else end for end, number in pairs]
        program = Program(
            command=tuple(command),
            environment=environment,
            folder=str(Path.cwd() if given.cwd is None else Path(os.fsdecode(given.cwd)).absolute()),
            descriptors=(0, 1, 2, *given.pass_fds),
            parent=os.getpid(),
            session=bool(given.start_new_session),
            umask=given.umask,
        )
        message = program.encode()
        if len(message) > _MESSAGE_BYTES or not Path(program.folder).is_dir():
            return None
        with self._lock:
            # for this moment what the template leaves behind becomes a child of this process
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._link, [message], [*stdio, *given.pass_fds])
                reply = self._link.recv(64)
            finally:
                _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not reply:
            raise RuntimeError("the template has ended, and only a test's end should end it")
        return int(reply) or None


class Forking:
    """Spawns by forks of this process: the guardian's way, whose child is held to limits before it begins."""

    def spawn(self, command: Sequence[str], given: Any) -> int | None:
        """Fork a program."""
        ends = (given.p2cread, given.c2pwrite, given.errwrite)
        if ends != (-1, -1, -1) or given.cwd is not None:
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become(command, given, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as report:
            failed = report.read()
        if failed:
            os.waitpid(pid, 0)
            raise subprocess.SubprocessError(failed.decode())
        return pid

    def _become(self, command: Sequence[str], given: Any, report: int) -> None:
        install(None)
        reset_signals()
        try:
            _prepare(given)
        except BaseException:  # noqa: BLE001 - the parent is told, whatever it is
            os.write(report, b"Exception occurred in preexec_fn.")
            os._exit(255)
        close_descriptors(given.pass_fds if given.close_fds else None)
        environment = None if given.env is None else {os.fsdecode(k): os.fsdecode(v) for k, v in given.env.items()}
        install(spawner_of(command, None))
        run(command, environment)


def _prepare(given: Any) -> None:
    """Do what is done between fork and exec, in the order of `subprocess`."""
    if given.umask >= 0:
        os.umask(given.umask)
    if given.start_new_session:
        os.setsid()
    if given.gids is not None:
        os.setgroups(given.gids)
    if given.gid is not None:
        os.setregid(given.gid, given.gid)
    if given.uid is not None:
        os.setreuid(given.uid, given.uid)
    if given.preexec_fn is not None:
        given.preexec_fn()


def serve(link: socket.socket) -> None:
    """Fork what is asked for over a link, until nobody is left who could ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        message, received, _, _ = socket.recv_fds(link, 2 * _MESSAGE_BYTES, 64)
        if not message:
            return
        program = Program.decode(message)
        try:
            middle = os.fork()
        except OSError:
            link.send(_NOT_FORKED)
        else:
            if middle == 0:
                _fork_orphan(link, program, received)
            os.waitpid(middle, 0)
        for each in received:
            os.close(each)


def _fork_orphan(link: socket.socket, program: Program, received: Sequence[int]) -> None:
    """Leave a process behind whose parent is gone, which makes it a child of the one that asked; end."""
    try:
        if os.fork() == 0:
            _await_parent(program.parent)
            if program.session:
                os.setsid()
            reset_signals()
            show_command(program.command)
            link.send(str(os.getpid()).encode())
            _enter(link, program, received)
    except BaseException:  # noqa: BLE001 - nobody is left to handle it
        traceback.print_exc()
        with contextlib.suppress(OSError):
            link.send(_NOT_FORKED)
    os._exit(0)


def _await_parent(parent: int) -> None:
    """Wait for the end of the process in the middle; whoever asked may have ended meanwhile."""
    first = os.getppid()
    while os.getppid() == first != parent:
        time.sleep(0.0002)
    if os.getppid() != parent:
        os._exit(0)


def _enter(link: socket.socket, program: Program, received: Sequence[int]) -> None:
    """Become the program."""
    own = None
    if asks(program.command):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            _serve_program(theirs)
        own = ours.detach()
    number = take_descriptors(received, program.descriptors, own)
    os.chdir(program.folder)
    if program.umask >= 0:
        os.umask(program.umask)
    os.environ.clear()
    os.environ.update(program.environment)
    asked = None if number is None else socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=number)
    install(spawner_of(program.command, asked))
    run(program.command)


def _serve_program(theirs: socket.socket) -> None:
    """Serve one program as its template, forked from it before it began."""
    with contextlib.suppress(OSError):
        number = take_descriptors([os.open(os.devnull, os.O_RDWR)] * 3, (0, 1, 2), theirs.detach())
        serve(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=number))
    os._exit(0)
