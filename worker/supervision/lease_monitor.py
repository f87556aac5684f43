"""The lease monitor beside a running child: heartbeats, cancellation, deadline, limits, and the grace of a stop.

Two threads, so that neither a long write nor a child that hangs can starve a heartbeat, and so that
the one that kills never waits for the network::

    lease   asks the database: renews the lease, looks for cancellation and another deadline
    clock   asks nothing: stops at a limit, kills after the grace, and once the lease was not renewed in time

The lease ends here by this machine's own clock, counted from before the question that renewed it, so
never later than in the database; the guardian has the same moment, for where this process stands still.
Why a child was stopped stands here; what becomes of the job then is the supervisor's.
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
from jobs.schema.query_limits import limit_queries
from worker.process.child_process import STOP_GRACE_SECONDS, Child, Hold
from worker.process.guardian import node_seconds
from worker.settings import WorkerSettings

StopReason = Literal["cancel", "misplaced", "deadline", "drain", "no_progress", "timeout"]

_LONGEST_WAIT_SECONDS = 3600.0
_FAILED_BEAT = 0.2
"""Share of the time between heartbeats after which one that the database did not answer is tried again."""

_MOST_MARGIN_SECONDS = 1.0
"""The lease ends for this process so much before the guardian kills, so that both call it a lost lease."""


class LeaseWatch:
    """Watches over one claim while its child runs."""

    def __init__(
        self,
        engine: Engine,
        claim: Claim,
        settings: WorkerSettings,
        log: FilteringBoundLogger,
        lock: int | None = None,
    ) -> None:
        self._lock_file = lock
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
        self._due_at: dict[StopReason, float] = {"deadline": math.inf, "timeout": math.inf, "no_progress": math.inf}
        self._deadline_at = claim.deadline_at
        self._settling = False
        self._ended = threading.Event()
        self._wakeup = threading.Event()
        self._lock = threading.Lock()
        self._due = threading.Event()
        self._beating = threading.Lock()
        self._held_at = node_seconds()
        self._threads = [
            threading.Thread(target=run, name=f"{name}-{claim.job_id}", daemon=True)
            for name, run in (("clock", self._keep_time), ("lease", self._keep_lease))
        ]

    def start(self, held_since: float | None = None) -> None:
        """Begin; the claim has just been made."""
        self._held_at = node_seconds() if held_since is None else held_since
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self._ended.set()
            self._wakeup.set()
            raise

    @property
    def held_until(self) -> float:
        """When the child must have ended, on the machine's clock (`node_seconds`)."""
        return self._held_at + self._settings.ledger.lease_seconds

    @property
    def hold(self) -> Hold:
        """The child's permission to run."""
        return Hold(until=self.held_until, lock=self._lock_file)

    @property
    def query_seconds(self) -> float:
        """How long the queries of one write may wait together: it is tried again while the lease holds."""
        return self._settings.ledger.lease_seconds / 2

    def is_lost(self) -> bool:
        """Return whether the job may be another's; once the lease has run out here, no answer renews it."""
        if not self.lost.is_set() and self._expires_in() <= 0:
            self._lose("it was not renewed in time: the database did not answer, or this process stood still")
        return self.lost.is_set()

    def guard(self, child: Child) -> None:
        """Name the child to stop; if a stop was asked for earlier, the child is stopped at once."""
        with self._lock:
            self._child = child
            child.extend(self.held_until)
            self.progressed()
            self._due_at["timeout"] = _from_now(self._settings.attempt_seconds)
            if self.lost.is_set():
                child.kill()
            elif self.reason is not None:
                self._terminate()

    def progressed(self) -> None:
        """The child has said something, or what it said has been written."""
        self._due_at["no_progress"] = _from_now(self._settings.no_progress_seconds)

    def stop(self, reason: StopReason) -> None:
        """Have the child stop at its next checkpoint, and kill it if it does not."""
        with self._lock:
            first = self.reason is None and not self._ended.is_set()
            if first:
                self.reason = reason
                self._stopped_at = time.monotonic()
                self._terminate()
        self._wakeup.set()
        if first:
            self._log.info("stopping", reason=reason)

    def left(self, seconds: float) -> float:
        """Return the time left after a stop, or after the winding up."""
        return self._stopped_at + seconds - time.monotonic()

    def wind_up(self) -> None:
        """All is written: whatever is still asked of anybody is waited for as after a stop."""
        self._stopped_at = min(self._stopped_at, time.monotonic())

    def settle(self) -> None:
        """Nothing is left to kill, and the job is about to leave this attempt: that it is gone then is not a loss."""
        with self._beating, self._lock:  # a heartbeat under way is still one of the holder's
            self._settling = True

    def end(self) -> None:
        """The attempt is over: the last heartbeat has been."""
        self._ended.set()
        self._wakeup.set()
        self._due.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()
            self._kill_at = time.monotonic() + STOP_GRACE_SECONDS

    def _expires_in(self) -> float:
        lease = self._settings.ledger.lease_seconds
        return self.held_until - min(_MOST_MARGIN_SECONDS, lease / 20) - node_seconds()

    def _lose(self, why: str) -> None:
        with self._lock:
            first = not self.lost.is_set()
            self.lost.set()
            if self._child is not None:
                self._child.kill()
        self._wakeup.set()
        self._due.set()
        if first:
            self._log.warning("lease lost", why=why)

    def _lose_unless_settling(self, why: str) -> None:
        """The last write itself finds out whether the job is still ours; seen from here it looks lost either way."""
        with self._lock:
            settling = self._settling
        if not settling:
            self._lose(why)

    def _keep_time(self) -> None:
        while not self._ended.is_set() and not self.is_lost():
            now = time.monotonic()
            for reason, at in self._due_at.items():
                if now >= at:
                    self._due_at[reason] = math.inf
                    self.stop(reason)
            if now >= self._kill_at and self._child is not None:
                self._kill_at = math.inf
                self._child.kill()
                self._log.warning("killing", after_seconds=STOP_GRACE_SECONDS)
            due = min(*self._due_at.values(), self._kill_at) - time.monotonic()
            self._wakeup.wait(max(0.0, min(due, self._expires_in(), _LONGEST_WAIT_SECONDS)))
            self._wakeup.clear()

    def _keep_lease(self) -> None:
        every = self._settings.ledger.heartbeat_seconds
        look_every = min(every, self._settings.cancel_seconds)
        next_beat, next_look = time.monotonic() + every, time.monotonic() + look_every
        with limit_queries(every):
            self._tell_deadline(self._deadline_at)
        while not self._ended.is_set() and not self.is_lost():
            now = time.monotonic()
            if now >= next_beat:
                # one that failed is tried again soon: the lease must not run out while the database is back already
                pause = every if self._beat() else every * _FAILED_BEAT
                next_beat, next_look = now + pause, now + look_every
            elif now >= next_look:
                self._look()
                next_look = now + look_every
            self._due.wait(max(0.0, min(next_beat, next_look) - time.monotonic()))
            self._due.clear()

    def _beat(self) -> bool:
        """Renew the lease; whether the database answered."""
        asked = node_seconds()  # the lease runs from before the question, not from after the answer
        try:
            with self._beating, limit_queries(self._settings.ledger.heartbeat_seconds):
                beat = last_heartbeat if self._settling else heartbeat
                cancel = beat(self._engine, self._claim, self._settings.ledger.lease_seconds)
        except LeaseLost as error:
            self._lose_unless_settling(str(error))
        except Exception as error:  # noqa: BLE001 - without this thread nothing would renew the lease
            unforeseen = not isinstance(error, LedgerUnavailable)
            silent = round(node_seconds() - self._held_at, 1)
            self._log.warning("heartbeat failed", silent_seconds=silent, exc_info=unforeseen)
            return False
        else:
            self._renew(asked)
            if cancel is not None:
                self.stop("cancel")
        return True

    def _renew(self, asked: float) -> None:
        with self._lock:
            if self.lost.is_set():
                return
            self._held_at = asked
            if self._child is not None:
                self._child.extend(self.held_until)
        self._wakeup.set()

    def _look(self) -> None:
        try:
            with limit_queries(self._settings.ledger.heartbeat_seconds):
                job = read_claimed(self._engine, self._claim)
        except Exception:  # noqa: BLE001 - the heartbeat judges silence, and logs a fault
            return
        if job is None or job.fence != self._claim.fence or job.ended:
            self._lose_unless_settling("the job is gone, or another attempt's")
        elif job.cancel_requested_at is not None:
            self.stop("cancel")
        elif job.deadline_at != self._deadline_at:
            self._deadline_at = job.deadline_at
            with limit_queries(self._settings.ledger.heartbeat_seconds):
                self._tell_deadline(job.deadline_at)

    def _tell_deadline(self, deadline_at: datetime | None) -> None:
        self._due_at["deadline"] = self._read_deadline(deadline_at)
        self._wakeup.set()

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
