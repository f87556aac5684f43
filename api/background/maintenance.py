"""Maintenance in every API process: one thread for wake-ups to workers, jobs of silent workers, last uses of keys.

Several processes may do so at once; the ledger makes that harmless. The thread outlives every failure of the database
and of the broker: it logs the first one, and again when they are back.
"""

import logging
import threading
import time

from celery import Celery
from sqlalchemy import Engine

from jobs.metrics.counters import note_round
from jobs.objects.artifacts import open_artifacts
from jobs.objects.uploads import sweep_uploads
from jobs.queue.broker_backlog import BrokerBacklog
from jobs.queue.outbox import relay
from jobs.queue.reaper import end_overdue, reap_expired
from jobs.settings import LedgerSettings
from jobs.tenancy.key_uses import KeyUses

_log = logging.getLogger("kronoscope.api.maintenance")

_WAKEUP_TASK = "worker.tasks.ring"
"""The name of the Celery task; no other package imports the worker."""
_BROKER_SECONDS = 3


class WakeupSender:
    """The sender of wake-ups: a message over Redis that a job waits, with the job's id and nothing else."""

    def __init__(self, redis_url: str) -> None:
        """Set up the sender; it connects with the first wake-up.

        Args:
            redis_url: Address of the broker, with its password.
        """
        self.backlog = BrokerBacklog(redis_url)
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

    def send(self, job_id: str) -> None:
        """Send one wake-up without trying again: the relay repeats what workers do not answer.

        Args:
            job_id: The job that waits.

        Raises:
            Exception: Any error of Celery or Redis where the broker does not answer.
        """
        self._celery.send_task(_WAKEUP_TASK, args=[job_id], retry=False, ignore_result=True)

    def close(self) -> None:
        """Close the connections to the broker."""
        self._celery.close()
        self.backlog.close()


class Maintenance:
    """The thread that runs relay and reaper, each at an interval of its own, and writes uses of keys."""

    def __init__(self, engine: Engine, settings: LedgerSettings, wakeups: WakeupSender | None) -> None:
        """Set up the thread without starting it.

        Args:
            engine: The ledger's database.
            settings: The intervals, in seconds.
            wakeups: The sender; None if there is no broker: then only the reaper runs.
        """
        self._engine = engine
        self._settings = settings
        self._wakeups = wakeups
        self.key_uses = KeyUses()
        """The uses of keys that are not written yet."""
        self._wake = threading.Event()
        self._stopping = False
        self._failing: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current round, within ten seconds."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=10)
        if self._wakeups is not None:
            self._wakeups.close()

    def wake(self) -> None:
        """Run the relay now, as a job was just submitted."""
        if self._wakeups is not None:
            self._wake.set()

    @property
    def broker_failing(self) -> bool:
        """Whether the last round of the relay failed."""
        return "relay" in self._failing

    def _run(self) -> None:
        next_relay = next_reap = next_sweep = time.monotonic()
        while not self._stopping:
            if self._wakeups is not None and (self._wake.is_set() or time.monotonic() >= next_relay):
                self._wake.clear()
                self._attempt("relay")
                next_relay = time.monotonic() + self._settings.relay_seconds
            if time.monotonic() >= next_reap:
                self._attempt("reaper")
                self._attempt("note of keys")
                next_reap = time.monotonic() + self._settings.reaper_seconds
            if time.monotonic() >= next_sweep:
                self._attempt("sweep of uploads")
                next_sweep = time.monotonic() + self._settings.sweep_seconds
            due = next_reap if self._wakeups is None else min(next_reap, next_relay)
            self._wake.wait(max(0.05, due - time.monotonic()))
        if not self._failing:  # a database that is away would hold up the end
            self._attempt("note of keys")

    def _attempt(self, name: str) -> None:
        try:
            if name == "relay":
                self._relay()
                note_round(self._engine, "relay")
            elif name == "sweep of uploads":
                # what is staged is on this machine, where no worker may be
                sweep_uploads(self._engine, open_artifacts(self._settings), self._settings.retention_days)
            elif name == "note of keys":
                self.key_uses.write(self._engine, every=self._stopping)
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
        if self._wakeups is not None:
            relay(self._engine, self._wakeups.send, self._settings.unclaimed_seconds, self._wakeups.backlog)
