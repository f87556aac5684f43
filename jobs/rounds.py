"""Rounds: functions that one thread calls again and again, each at its own interval, whatever they raise.

A failing round is logged once for each kind of error, and again when it works; neither a silent database nor a broker
ends the thread or holds back the other rounds for longer than its own call takes.
"""

import threading
import time
from collections.abc import Callable, Sequence

from structlog.typing import FilteringBoundLogger

from jobs.errors import LedgerError

Round = tuple[str, float, Callable[[], object]]
"""A name for the log, the seconds between two calls, and the function; a number that it returns is logged."""


class Rounds:
    """A thread and its table of rounds; those that are due together are called in the order of the table."""

    def __init__(
        self, name: str, table: Sequence[Round], log: FilteringBoundLogger, last: Callable[[], object] | None = None
    ) -> None:
        """Set up the thread without starting it; it ends with a call of ``last``."""
        self.failing: dict[str, type[Exception]] = {}
        """The rounds whose last call failed, and what it raised."""
        self._table, self._log, self._last = table, log, last
        self._due: dict[str, float] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, which calls all rounds at once that are not postponed."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End after the call under way; one that takes longer than ``seconds`` dies with the process."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(max(0.0, seconds))

    def postpone(self, name: str, seconds: float) -> None:
        """Have a round be called after so many seconds, instead of when it would be; 0: now."""
        with self._lock:
            self._due[name] = time.monotonic() + seconds
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.clear()
            if self._stopping.is_set():  # looked at after the event was cleared, which may have been for this
                break
            for name, seconds, function in self._table:
                if not self._stopping.is_set() and time.monotonic() >= self._due.get(name, 0.0):
                    # one that is asked for anew meanwhile comes at once, any other after a pause
                    due = self._due[name] = time.monotonic() + seconds
                    self._call(name, function)
                    with self._lock:
                        if self._due[name] == due:
                            self._due[name] = time.monotonic() + seconds
            self._wake.wait(max(0.0, min(self._due.values(), default=0.0) - time.monotonic()))
        if self._last is not None:
            self._call(f"{self._thread.name}: its last", self._last)

    def _call(self, name: str, function: Callable[[], object]) -> None:
        try:
            number = function()
        except Exception as error:  # noqa: BLE001 - the thread outlives whatever stores, brokers and drivers raise
            if self.failing.get(name) is not type(error):
                unforeseen = not isinstance(error, LedgerError)
                said = "a round fails" if self._stopping.is_set() else "a round fails; it is tried again"
                self._log.warning(said, round=name, why=str(error), exc_info=unforeseen)
            self.failing[name] = type(error)
        else:
            if self.failing.pop(name, None):
                self._log.warning("a round works again", round=name)
            if number:
                self._log.info(name, number=number)
