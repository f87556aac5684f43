"""Client of a template: the process that runs tests, which starts its template when the first program is asked for.

Tests marked `real_programs` start every program as it is started in service.
"""

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest

from tests.machine.template.imports import read_at_import
from tests.machine.template.program import COMMAND_LINE_BYTES
from tests.machine.template.spawning import REPLY_SECONDS, Asking, install

MARK = "real_programs"
REAL_ROOMS = {"chaos", "docker", "gpu", "slurm", "walls"}
"""Rooms whose tests are about processes themselves: those that are killed, confined, or run elsewhere."""


def is_usable() -> bool:
    """Return whether a template can be had: where numpy's library starts a thread for each core, it cannot fork."""
    return sys.platform == "linux" and os.environ.get("OMP_NUM_THREADS") == "1"


def add_options(parser: pytest.Parser) -> None:
    """Register the option."""
    text = "start every program as it is started in service, none from the template"
    parser.getgroup("template").addoption("--real-programs", action="store_true", help=text)


def wants_real(item: pytest.Item) -> bool:
    """Return whether a test wants programs that are started as in service."""
    if item.config.getoption("--real-programs"):
        return True
    return item.get_closest_marker(MARK) is not None or bool(REAL_ROOMS & set(item.path.parts))


class Template:
    """The template of this process."""

    def __init__(self) -> None:
        self.environment = (
            os.environ | read_at_import(os.environ) | {"OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
        )
        self.allowed = is_usable()
        self._asking: Asking | None = None
        self._lock = threading.Lock()
        """Threads of a test may be the first to ask, several at once."""
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None

    def spawn(self, command: Sequence[str], given: Any) -> int | None:
        """Start a program by the template."""
        with self._lock:
            if self._process is None:
                self._start()
        return None if self._asking is None else self._asking.spawn(command, given)

    def close(self) -> None:
        """End the template."""
        if self._link is not None and self._process is not None:
            self._link.close()
            with self._process:
                self._process.kill()

    def _start(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(REPLY_SECONDS)
        command = [sys.executable, "-P", "-m", "tests.machine.template", str(theirs.fileno()), "x" * COMMAND_LINE_BYTES]
        self._process = subprocess.Popen(
            command,
            # streams ask once whether they are files
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        if self._link.recv(64) != b"ready":
            raise RuntimeError("the template of the tests did not start; the traceback stands above")
        self._asking = Asking(self._link, read_at_import(self.environment))


TEMPLATE = Template()
atexit.register(TEMPLATE.close)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fork the programs that a test and its fixtures start, but where it is marked otherwise."""
    TEMPLATE.allowed = is_usable() and not item.config.getoption("--real-programs")
    install(TEMPLATE if TEMPLATE.allowed and not wants_real(item) else None)
    try:
        return (yield)
    finally:
        install(None)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Fork, in a test of real programs, those that are not its subject: the run that nothing disturbs."""
    install(TEMPLATE if TEMPLATE.allowed else None)
    try:
        yield
    finally:
        install(None)
