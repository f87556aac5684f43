"""The lifetime of a worker: it ends with nothing left to do, or in time before its machine is taken away.

It ends as if its operator had asked for it, by SIGTERM: running jobs go back into the queue, their
attempts uncounted, and the exit code is 0.
"""

import os
import signal
import threading
import time
from typing import Annotated

import structlog

from catalog.record import record
from jobs.environment import Duration, EnvironmentSettings, Flag, Variables
from jobs.errors import SettingsInvalid
from worker.process.child_process import STOP_GRACE_SECONDS

DRAIN_SECONDS = STOP_GRACE_SECONDS + 7
"""How long jobs may take to stop before the process ends without waiting for them."""

ENDING_SECONDS = DRAIN_SECONDS + 5
"""From the signal to the end of the process, at most."""

_HANDLER_POLL_SECONDS = 0.05


@record
class Lifetime:
    """When one worker ends by itself."""

    until_idle: bool = False
    """End once nothing is queued that this worker could take, and nothing runs here."""
    seconds: float | None = None
    """Begin to end after this long; null lives on."""


class LifetimeSettings(EnvironmentSettings):
    """The operator's choice of a worker's lifetime."""

    until_idle: Flag = False
    """1: a worker ends, with exit code 0, when it runs no job and can take none."""
    wall: Duration | None = None
    """Time from a worker's start until its machine is taken away: `4h`."""
    drain_before: Duration | None = None
    """How long before that, or without it before `SLURM_JOB_END_TIME`, its jobs are handed back: `10m`."""
    slurm_end: Annotated[str | None, Variables(("SLURM_JOB_END_TIME",))] = None
    """Set by Slurm: the end of its job, in seconds since 1970."""

    def lifetime(self, now: float) -> Lifetime:
        """Return the lifetime of a worker that starts now."""
        if self.drain_before is None and self.wall is None:
            return Lifetime(until_idle=self.until_idle)
        left = self.wall if self.wall is not None else self._slurm_seconds(now)
        before = self.drain_before or 0
        working = left - before - ENDING_SECONDS
        if working <= 0:
            raise SettingsInvalid(
                f"the wall time is {left:.0f} s away; with KRONOSCOPE_DRAIN_BEFORE at {before:g} s and "
                f"{ENDING_SECONDS:g} s to hand jobs back nothing is left to work in; lengthen the one or shorten the "
                "other"
            )
        return Lifetime(until_idle=self.until_idle, seconds=working)

    def _slurm_seconds(self, now: float) -> float:
        text = self.slurm_end
        if not text:
            raise SettingsInvalid(
                "KRONOSCOPE_DRAIN_BEFORE is set, but when the wall time ends is not known; set KRONOSCOPE_WALL, "
                "such as 4h from now on (Slurm sets SLURM_JOB_END_TIME, which is not set either)"
            )
        if not text.isascii() or not text.isdigit():
            raise SettingsInvalid(
                "SLURM_JOB_END_TIME is not a number of seconds since 1970; set KRONOSCOPE_WALL instead"
            )
        return int(text) - now


def end_by_itself(lifetime: Lifetime, idle: threading.Event, began: float) -> None:
    """Start to wait for the reason to end; the lifetime counts from ``began``, of the monotonic clock."""
    seconds = lifetime.seconds

    def wait() -> None:
        is_idle = idle.wait(None if seconds is None else max(0.0, began + seconds - time.monotonic()))
        log = structlog.get_logger("kronoscope.worker")
        log.info("worker ends by itself", why="nothing left to do" if is_idle else "the wall time comes near")
        while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # Celery listens a moment after it took up its work
            time.sleep(_HANDLER_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    if lifetime.until_idle or seconds is not None:
        threading.Thread(target=wait, name="ending", daemon=True).start()
