"""Maintenance in every API process: wake-ups of workers, jobs of silent workers, last uses of keys.

Several processes may do so at once; the ledger makes that harmless.
"""

import structlog
from sqlalchemy import Engine

from jobs.objects.artifacts import open_artifacts
from jobs.objects.uploads import sweep_uploads
from jobs.queue.reaper import reap
from jobs.queue.wakeups import WakeupSender
from jobs.rounds import Rounds
from jobs.settings import LedgerSettings
from jobs.tenancy.key_uses import KeyUses


class Maintenance:
    """The thread that runs the reaper and writes uses of keys, and beside it the one that sends wake-ups."""

    def __init__(self, engine: Engine, settings: LedgerSettings, wakeups: WakeupSender | None) -> None:
        """Set up the threads without starting them; the sender of wakeups is None without a broker."""
        self._engine = engine
        self._settings = settings
        self._wakeups = wakeups
        self.key_uses = KeyUses()
        """The uses of keys that are not written yet."""
        table = [
            ("reaped or overdue", settings.reaper_seconds, lambda: reap(engine)),
            ("note of keys", settings.reaper_seconds, self._write_uses),
            ("uploads removed", settings.sweep_seconds, self._sweep_uploads),
        ]
        self._rounds = Rounds(
            "maintenance", table, structlog.get_logger("kronoscope.api.maintenance"), self._write_last
        )

    def start(self) -> None:
        """Start the threads."""
        self._rounds.start()
        if self._wakeups is not None:
            self._wakeups.start()

    def stop(self) -> None:
        """End the threads after their current rounds, within twelve seconds."""
        self._rounds.stop(10)
        if self._wakeups is not None:
            self._wakeups.stop(2)

    def _write_uses(self) -> None:
        self.key_uses.write(self._engine)

    def _write_last(self) -> None:
        if not self._rounds.failing:  # a database that is away would hold up the end
            self.key_uses.write(self._engine, every=True)

    def _sweep_uploads(self) -> int:
        # what is staged is on this machine, where no worker may be
        return sweep_uploads(self._engine, open_artifacts(self._settings), self._settings.retention_days)
