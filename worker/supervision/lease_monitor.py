"""The clock beside a running child: heartbeats, cancellation, deadline, limits, and the grace of a stop.

It runs in a thread of its own, so that neither a long write nor a child that hangs can starve a
heartbeat. Why a child was stopped stands here; what becomes of the job then is the supervisor's.
"""

import math
import threading
import time
from datetime import datetime
from typing import Literal

from sqlalchemy import Engine, select
from structlog.typing import FilteringBoundLogger

from jobs.errors import LeaseLost, LedgerUnavailable
from jobs.queue.claims import heartbeat, last_heartbeat
from jobs.records import Claim
from jobs.repository.store import read_claimed
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading
from worker.process.child_process import STOP_GRACE_SECONDS, Child
from worker.settings import WorkerSettings

StopReason = Literal["cancel", "misplaced", "deadline", "drain", "no_progress", "timeout"]

_FAILED_BEAT = 0.2
"""Of the time between two heartbeats: how soon one that the database did not answer is tried again."""


class LeaseWatch:
    """Watches over one claim while its child runs."""

    def __init__(self, engine: Engine, claim: Claim, settings: WorkerSettings, log: FilteringBoundLogger) -> None:
        self.reason: StopReason | None = None
        self.lost = threading.Event()
        """Set once the job may be another's: nothing is written any more."""
        self._engine = engine
        self._claim = claim
        self._settings = settings
        self._log = log
        self._child: Child | None = None
        self._stopped_at = math.inf
        self._kill_at = math.inf
        self._silent_at = self._too_long_at = math.inf
        self._deadline_at = claim.deadline_at
        self._deadline = math.inf
        self._settling = False
        self._ended = threading.Event()
        self._wakeup = threading.Event()
        self._lock = threading.Lock()
        self._beating = threading.Lock()
        self._held_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"lease-{claim.job_id}", daemon=True)

    def start(self) -> None:
        """Begin; the claim has just been made."""
        self._thread.start()

    def guard(self, child: Child) -> None:
        """Name the child to stop; if a stop was asked for earlier, the child is stopped at once.

        Args:
            child: The child.
        """
        with self._lock:
            self._child = child
            self.progressed()
            self._too_long_at = _from_now(self._settings.attempt_seconds)
            if self.lost.is_set():
                child.kill()
            elif self.reason is not None:
                self._terminate()

    def progressed(self) -> None:
        """The child has said something, or what it said has been written."""
        self._silent_at = _from_now(self._settings.no_progress_seconds)

    def stop(self, reason: StopReason) -> None:
        """Have the child stop at its next checkpoint, and kill it if it does not.

        Args:
            reason: The reason; only the first one counts.
        """
        with self._lock:
            if self.reason is None and not self._ended.is_set():
                self.reason = reason
                self._stopped_at = time.monotonic()
                self._log.info("stopping", reason=reason)
                self._terminate()
        self._wakeup.set()

    def left(self, seconds: float) -> float:
        """Return the time left after a stop, or after the winding up.

        Args:
            seconds: Seconds counted from then.

        Returns:
            Seconds left, negative when they have passed; infinite where neither has happened.
        """
        return self._stopped_at + seconds - time.monotonic()

    def wind_up(self) -> None:
        """All is written: whatever is still asked of anybody is waited for as after a stop."""
        self._stopped_at = min(self._stopped_at, time.monotonic())

    def settle(self) -> None:
        """Nothing is left to kill, and the job is about to leave this attempt: that it is gone then is no loss."""
        with self._beating, self._lock:  # a heartbeat under way is still one of the holder's
            self._settling = True

    def end(self) -> None:
        """The attempt is over: the last heartbeat has been."""
        self._ended.set()
        self._wakeup.set()
        self._thread.join()

    def _terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()
            self._kill_at = time.monotonic() + STOP_GRACE_SECONDS

    def _lose(self, why: str) -> None:
        self._log.warning("lease lost", why=why)
        with self._lock:
            self.lost.set()
            if self._child is not None:
                self._child.kill()

    def _lose_unless_settling(self, why: str) -> None:
        """The last write itself finds out whether the job is still ours; seen from here it looks lost either way."""
        with self._lock:
            settling = self._settling
        if not settling:
            self._lose(why)

    def _run(self) -> None:
        every = self._settings.ledger.heartbeat_seconds
        look_every = min(every, self._settings.cancel_seconds)
        self._deadline = self._read_deadline(self._deadline_at)
        next_beat, next_look = self._held_at + every, self._held_at + look_every
        while not self._ended.is_set() and not self.lost.is_set():
            now = time.monotonic()
            if now >= next_beat:
                # one that failed is tried again soon: the lease must not run out while the database is back already
                pause = every if self._beat() else every * _FAILED_BEAT
                next_beat, next_look = now + pause, now + look_every
            elif now >= next_look:
                self._look()
                next_look = now + look_every
            if now >= self._deadline:
                self._deadline = math.inf
                self.stop("deadline")
            if now >= self._too_long_at:
                self._too_long_at = math.inf
                self.stop("timeout")
            if now >= self._silent_at:
                self._silent_at = math.inf
                self.stop("no_progress")
            if now >= self._kill_at and self._child is not None:
                self._kill_at = math.inf
                self._log.warning("killing", after_seconds=STOP_GRACE_SECONDS)
                self._child.kill()
            due = min(next_beat, next_look, self._deadline, self._too_long_at, self._silent_at, self._kill_at)
            self._wakeup.wait(max(0.0, due - time.monotonic()))
            self._wakeup.clear()

    def _beat(self) -> bool:
        """Renew the lease; whether the database answered."""
        asked = time.monotonic()  # the lease runs from before the question, not from after the answer
        try:
            with self._beating:
                beat = last_heartbeat if self._settling else heartbeat
                cancel = beat(self._engine, self._claim, self._settings.ledger.lease_seconds)
        except LeaseLost as error:
            self._lose_unless_settling(str(error))
        except Exception as error:  # noqa: BLE001 - without this thread nothing would beat, stop or kill
            silent = time.monotonic() - self._held_at
            unforeseen = not isinstance(error, LedgerUnavailable)
            self._log.warning("heartbeat failed", silent_seconds=round(silent, 1), exc_info=unforeseen)
            if silent > self._settings.ledger.lease_seconds:
                self._lose("the database did not answer for the length of the lease")
            return False
        else:
            self._held_at = asked
            if cancel is not None:
                self.stop("cancel")
        return True

    def _look(self) -> None:
        try:
            job = read_claimed(self._engine, self._claim)
        except Exception:  # noqa: BLE001 - the heartbeat is what judges silence, and tells of a fault
            return
        if job is None or job.fence != self._claim.fence or job.ended:
            self._lose_unless_settling("the job is gone, or another attempt's")
        elif job.cancel_requested_at is not None:
            self.stop("cancel")
        elif job.deadline_at != self._deadline_at:
            self._deadline_at = job.deadline_at
            self._deadline = self._read_deadline(job.deadline_at)

    def _read_deadline(self, deadline_at: datetime | None) -> float:
        """On this process's monotonic clock, from the difference of two moments of the database's."""
        if deadline_at is None:
            return math.inf
        try:
            with reading(self._engine) as connection:
                now = connection.execute(select(ledger_now())).scalar_one()
        except Exception:  # noqa: BLE001 - the next look asks again
            self._deadline_at = None
            return math.inf
        left: float = (deadline_at - now).total_seconds()
        return time.monotonic() + left


def _from_now(seconds: float) -> float:
    """That much later on this process's clock; never, where it is 0."""
    return time.monotonic() + seconds if seconds else math.inf
