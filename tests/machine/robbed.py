"""Second attempts: what fails while the machine is taken away is tried once more, and told.

docs/decisions/0011 says why, and why not everywhere.
"""

import socket

import pytest

from tests.machine.stopwatch import Stopwatch

NEVER_TWICE = {"chaos", "engine", "catalog"}
"""Rooms of promises and of numbers: no machine is slow enough to excuse what fails there."""
ROBBED = 0.2
"""Share of a processor's time from which on it may be the machine that failed, and not what was tested."""


class Attempt:
    """The one under way."""

    def __init__(self) -> None:
        self.watch = Stopwatch()

    def robbed(self) -> bool:
        """Whether too much was taken from it."""
        return self.watch.share_taken() >= ROBBED


ATTEMPT = Attempt()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what may be tried again, and what may not."""
    for item in items:
        if NEVER_TWICE & set(item.path.parts):
            item.add_marker(pytest.mark.flaky(reruns=0), append=False)  # before a mark of its own, and before --reruns
        else:
            item.add_marker(pytest.mark.flaky(reruns=1, condition=ATTEMPT.robbed))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Send what a process asks the run before each test at once; held back for an answer, it took 40 ms."""
    database = getattr(session.config, "failures_db", None)
    if hasattr(session.config, "workerinput") and database is not None:
        database.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_runtest_logstart() -> None:
    """Each attempt has a stopwatch of its own."""
    ATTEMPT.watch = Stopwatch()
