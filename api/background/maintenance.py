"""The background thread of every API process: it rings doorbells and takes jobs from silent workers.

Several processes may do so at once; the ledger makes that harmless. The thread outlives every
failure of database and broker: it says so once, and again when they are back.
"""

import logging
import threading
import time

from celery import Celery
from sqlalchemy import Engine

from jobs.metrics.counters import note_round
from jobs.queue.broker_backlog import LyingDoorbells
from jobs.queue.outbox import relay
from jobs.queue.reaper import end_overdue, reap_expired
from jobs.settings import LedgerSettings

_log = logging.getLogger("kronoscope.api.caretaker")

_RING = "worker.tasks.ring"
"""By name: nobody imports the worker."""
_BROKER_SECONDS = 3


class Doorbell:
    """Tells the workers over Redis that a job waits; its message is the job's id and nothing else."""

    def __init__(self, redis_url: str) -> None:
        self.lying = LyingDoorbells(redis_url)
        self._celery = Celery("kronoscope", broker=redis_url, set_as_current=False)
        self._celery.conf.update(
            task_ignore_result=True,
            task_serializer="json",
            accept_content=["json"],
            broker_transport_options={
                "socket_connect_timeout": _BROKER_SECONDS,
                "socket_timeout": _BROKER_SECONDS,
                "max_retries": 0,
            },
        )

    def ring(self, job_id: str) -> None:
        """Send one doorbell, at once or not at all: the relay comes again."""
        self._celery.send_task(_RING, args=[job_id], retry=False, ignore_result=True)

    def close(self) -> None:
        """Give the connections back."""
        self._celery.close()
        self.lying.close()


class Caretaker:
    """Relay and reaper, each at its own pace."""

    def __init__(self, engine: Engine, settings: LedgerSettings, doorbell: Doorbell | None) -> None:
        self._engine = engine
        self._settings = settings
        self._doorbell = doorbell
        self._wake = threading.Event()
        self._stopping = False
        self._failing: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="caretaker", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, after the round that is under way."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=10)
        if self._doorbell is not None:
            self._doorbell.close()

    def wake(self) -> None:
        """Relay now: a job was just submitted."""
        if self._doorbell is not None:
            self._wake.set()

    @property
    def broker_failing(self) -> bool:
        """Whether the last round could not ring."""
        return "relay" in self._failing

    def _run(self) -> None:
        next_relay = next_reap = time.monotonic()
        while not self._stopping:
            if self._doorbell is not None and (self._wake.is_set() or time.monotonic() >= next_relay):
                self._wake.clear()
                self._attempt("relay")
                next_relay = time.monotonic() + self._settings.relay_seconds
            if time.monotonic() >= next_reap:
                self._attempt("reaper")
                next_reap = time.monotonic() + self._settings.reaper_seconds
            due = next_reap if self._doorbell is None else min(next_reap, next_relay)
            self._wake.wait(max(0.05, due - time.monotonic()))

    def _attempt(self, name: str) -> None:
        try:
            if name == "relay":
                self._relay()
                note_round(self._engine, "relay")
            else:
                taken = reap_expired(self._engine)
                if taken:
                    _log.warning("took %d job%s from silent workers", taken, "" if taken == 1 else "s")
                overdue = end_overdue(self._engine)
                note_round(self._engine, "reaper")
                if overdue:
                    _log.warning("ended %d queued job%s at the deadline", overdue, "" if overdue == 1 else "s")
        except Exception as error:  # noqa: BLE001 - the thread must outlive whatever the broker's client raises
            if name not in self._failing:
                _log.warning("the %s fails (%s); it is tried again", name, type(error).__name__, exc_info=error)
            self._failing.add(name)
        else:
            if name in self._failing:
                _log.warning("the %s works again", name)
            self._failing.discard(name)

    def _relay(self) -> None:
        if self._doorbell is not None:
            relay(self._engine, self._doorbell.ring, self._settings.unclaimed_seconds, self._doorbell.lying)
