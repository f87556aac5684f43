"""A stopwatch that stands still while the hypervisor gives this machine's processors to others.

Tests wait for processes and bound how long something may take. On a shared machine most of the time may be taken
away for minutes, and seconds on the wall then say nothing of the product; the kernel counts what was taken
(`steal` in proc(5)), so that bounds can be those of a machine that is there.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_TICKS = os.sysconf("SC_CLK_TCK")
_STEAL = 8
"""Its place in a processor's line of `/proc/stat`."""


class Stopwatch:
    """Counts from its making on."""

    def __init__(self, stolen: Callable[[], list[float]] | None = None) -> None:
        self._stolen = stolen or stolen_seconds
        self._began = time.monotonic()
        self._before = self._stolen()

    def seconds(self) -> float:
        """Since it was made, less what was taken from the processor that most was taken from."""
        wall, taken = self._read()
        return max(0.0, wall - taken)

    def share_taken(self) -> float:
        """Of the time since it was made, what was taken from the processor that most was taken from: 0 to 1."""
        wall, taken = self._read()
        return min(1.0, taken / wall) if wall > 0 else 0.0

    def _read(self) -> tuple[float, float]:
        now, stolen = time.monotonic(), self._stolen()
        taken = max((after - before for before, after in zip(self._before, stolen, strict=False)), default=0.0)
        return now - self._began, taken


def stolen_seconds() -> list[float]:
    """Of each processor since the machine started; none where the kernel tells nothing."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines if line.startswith("cpu") and not line.startswith("cpu ")]
    return [int(each[_STEAL]) / _TICKS for each in fields if len(each) > _STEAL]


def until(question: Callable[[], T], seconds: float = 60, what: str | Callable[[], object] = "it is so") -> T:
    """The first true answer; other processes can only be asked again.

    The last question is asked when the time is up: who asks may itself have stood still since the one before. What
    takes more than a second is asked for less often: a question to a ledger takes as much of a processor as a part of
    what is waited for.
    """
    watch = Stopwatch()
    while True:
        passed = watch.seconds()
        answer = question()
        if answer:
            return answer
        if passed > seconds:
            raise AssertionError(f"not within {seconds:g} s: {what() if callable(what) else what}")
        time.sleep(0.02 if passed < 1 else 0.1)
