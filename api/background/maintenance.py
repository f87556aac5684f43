"""Maintenance in every API process: one thread for wake-ups to workers, jobs of silent workers, last uses of keys.

Several processes may do so at once; the ledger makes that harmless.
"""

import structlog
from celery import Celery
from sqlalchemy import Engine

from jobs.metrics.counters import note_round
from jobs.objects.artifacts import open_artifacts
from jobs.objects.uploads import sweep_uploads
from jobs.queue.broker_backlog import BrokerBacklog
from jobs.queue.outbox import relay
from jobs.queue.reaper import reap
from jobs.rounds import Round, Rounds
from jobs.settings import LedgerSettings
from jobs.tenancy.key_uses import KeyUses

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
    """The thread that runs relay and reaper, and writes uses of keys."""

    def __init__(self, engine: Engine, settings: LedgerSettings, wakeups: WakeupSender | None) -> None:
        """Set up the thread without starting it.

        Args:
            engine: The ledger's database.
            settings: The intervals, in seconds.
            wakeups: The sender; None if there is no broker: then nothing is relayed.
        """
        self._engine = engine
        self._settings = settings
        self._wakeups = wakeups
        self.key_uses = KeyUses()
        """The uses of keys that are not written yet."""
        table: list[Round] = [
            ("reaped or overdue", settings.reaper_seconds, lambda: reap(engine)),
            ("note of keys", settings.reaper_seconds, self._write_uses),
            ("uploads removed", settings.sweep_seconds, self._sweep_uploads),
        ]
        if wakeups is not None:
            table.insert(0, ("relay", settings.relay_seconds, self._relay))
        self._rounds = Rounds(
            "maintenance", table, structlog.get_logger("kronoscope.api.maintenance"), self._write_last
        )

    def start(self) -> None:
        """Start the thread."""
        self._rounds.start()

    def stop(self) -> None:
        """End the thread after its current round, within ten seconds."""
        self._rounds.stop(10)
        if self._wakeups is not None:
            self._wakeups.close()

    def wake(self) -> None:
        """Run the relay now, as a job was just submitted."""
        if self._wakeups is not None:
            self._rounds.postpone("relay", 0)

    def _relay(self) -> None:
        if self._wakeups is not None:
            relay(self._engine, self._wakeups.send, self._settings.unclaimed_seconds, self._wakeups.backlog)
            note_round(self._engine, "relay")

    def _write_uses(self) -> None:
        self.key_uses.write(self._engine)

    def _write_last(self) -> None:
        if not self._rounds.failing:  # a database that is away would hold up the end
            self.key_uses.write(self._engine, every=True)

    def _sweep_uploads(self) -> int:
        # what is staged is on this machine, where no worker may be
        return sweep_uploads(self._engine, open_artifacts(self._settings), self._settings.retention_days)
