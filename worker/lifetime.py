"""When a worker ends by itself: with nothing left to do, or in time before its machine is taken away.

It ends as if its operator had asked for it, by SIGTERM: running jobs go back into the queue, their
attempts uncounted, and the exit code is 0.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping

import structlog

from catalog.record import record
from jobs.errors import SettingsInvalid
from jobs.settings import duration
from worker.process.child_process import STOP_GRACE_SECONDS

DRAIN_SECONDS = STOP_GRACE_SECONDS + 7
"""How long jobs may take to stop before the process ends without waiting for them."""

ENDING_SECONDS = DRAIN_SECONDS + 5
"""From the signal to the end of the process, at most."""

_HANDLER_POLL_SECONDS = 0.05


@record
class Lifetime:
    """The operator's choice."""

    until_idle: bool = False
    """End once nothing is queued that this worker could take, and nothing runs here."""
    seconds: float | None = None
    """Begin to end after this long; null lives on."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], now: float) -> "Lifetime":
        """Read the settings.

        The machine is taken away KRONOSCOPE_WALL from ``now`` (seconds since 1970) on, or else when Slurm says so in
        SLURM_JOB_END_TIME. KRONOSCOPE_DRAIN_BEFORE is how long before that the process has ended.

        Raises:
            SettingsInvalid: If one makes no sense, or leaves no time to work in.
        """
        return cls(until_idle=_flag(environ, "KRONOSCOPE_UNTIL_IDLE"), seconds=_working_seconds(environ, now))


class Ending:
    """A thread that waits for the reason to end."""

    def __init__(self, lifetime: Lifetime, idle: threading.Event, began: float) -> None:
        """Get ready; the lifetime counts from ``began``, of the monotonic clock."""
        self._lifetime = lifetime
        self._began = began
        self._idle = idle
        self._log = structlog.get_logger("kronoscope.worker")

    def start(self) -> None:
        """Begin to wait, where there is anything to wait for."""
        if self._lifetime.until_idle or self._lifetime.seconds is not None:
            threading.Thread(target=self._run, name="ending", daemon=True).start()

    def _run(self) -> None:
        seconds = self._lifetime.seconds
        idle = self._idle.wait(None if seconds is None else max(0.0, self._began + seconds - time.monotonic()))
        self._log.info("worker ends by itself", why="nothing left to do" if idle else "the wall time comes near")
        while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # Celery listens a moment after it took up its work
            time.sleep(_HANDLER_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)


def _working_seconds(environ: Mapping[str, str], now: float) -> float | None:
    before, wall = duration(environ, "KRONOSCOPE_DRAIN_BEFORE"), duration(environ, "KRONOSCOPE_WALL")
    if before is None and wall is None:
        return None
    left = wall if wall is not None else _slurm_seconds(environ, now)
    working = left - (before or 0) - ENDING_SECONDS
    if working <= 0:
        raise SettingsInvalid(
            f"the wall time is {left:.0f} s away; with KRONOSCOPE_DRAIN_BEFORE at {before or 0:g} s and "
            f"{ENDING_SECONDS:g} s to hand jobs back nothing is left to work in; lengthen the one or shorten the other"
        )
    return working


def _slurm_seconds(environ: Mapping[str, str], now: float) -> float:
    text = environ.get("SLURM_JOB_END_TIME")
    if not text:
        raise SettingsInvalid(
            "KRONOSCOPE_DRAIN_BEFORE is set, but when the wall time ends is not known; set KRONOSCOPE_WALL, "
            "such as 4h from now on (Slurm tells it by SLURM_JOB_END_TIME, which is not set either)"
        )
    if not text.isascii() or not text.isdigit():
        raise SettingsInvalid("SLURM_JOB_END_TIME is no number of seconds since 1970; set KRONOSCOPE_WALL instead")
    return int(text) - now


def _flag(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name) or "0"
    if text not in ("0", "1"):
        raise SettingsInvalid(f"{name} is neither 0 nor 1; take one of them")
    return text == "1"
