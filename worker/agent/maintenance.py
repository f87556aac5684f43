"""Maintenance: reaper, relay and clean-up, which run in every worker process, so that no single one matters.

The clean-up has a thread of its own: a store that is silent for minutes must not hold up the reaper. So has the look
for workers of this machine that were killed: neither must a silent broker.
"""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from sqlalchemy import Engine

from jobs.errors import LedgerUnavailable
from jobs.metrics.counters import Reconciler, note_round
from jobs.objects.artifacts import ArtifactFolder, open_artifacts
from jobs.objects.cached_entries import CachedEntries, forget_unused, list_tenants, place_of
from jobs.objects.scratch import open_scratch, sweep_scratch
from jobs.queue.outbox import relay
from jobs.queue.reaper import end_overdue, reap_ended_worker, reap_expired
from jobs.retention.object_sweep import sweep_attempts, sweep_objects
from jobs.retention.retention import archive_ended, forget_estimates
from jobs.settings import LedgerSettings
from worker.agent.worker_locks import EndedWorkers
from worker.disk.cache_folder import CacheFolder, cache_of_tenant, tenants_caches


def sweep_caches(engine: Engine, artifact_root: Path, limit_bytes: int) -> int:
    """Sweep the cache of every tenant."""
    root = tenants_caches(artifact_root)
    if not root.is_dir():
        return 0
    place = place_of(root)
    forget_unused(engine)
    tenants = {cache_of_tenant(artifact_root, each): each for each in list_tenants(engine)}
    # without entries in the ledger there may be folders, and the other way round
    known = [each for each in tenants if each.is_dir()]
    named = [cache_of_tenant(artifact_root, each) for each in list_tenants(engine, place)]
    return sum(
        CacheFolder(folder, CachedEntries(engine, tenants[folder], place), limit_bytes).sweep()
        for folder in dict.fromkeys((*known, *named))
        if folder in tenants
    )


_ENDED_SECONDS = 1.0
"""Between two looks for dead workers of this machine, which ask the database only where there is one."""
_SCRATCH_SECONDS = 60
_FAULTS_SECONDS = 3600
"""How long a job that cannot be archived is passed over."""


class WorkerMaintenance:
    """Threads that reap the jobs of silent workers, relay wake-ups, and clear up after ended jobs."""

    def __init__(
        self,
        engine: Engine,
        settings: LedgerSettings,
        send_wakeup: Callable[[str], object] | None,
        broker_backlog: Callable[[], int] = lambda: 0,
        process_space: str = "",
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        """Get ready.

        Args:
            engine: The ledger.
            settings: How often.
            send_wakeup: Sends one wake-up to all workers. None: nothing is relayed, since a row marked as sent is not
                sent again for a while, and workers elsewhere that have a broker would miss it.
            broker_backlog: Returns how many wake-ups are at the broker, not yet received.
            process_space: The scope of process numbers that this process can see.
            wake: Has this process look into the queue.
        """
        self._engine = engine
        self._settings = settings
        self._process_space = process_space
        self._wake = wake
        self._send_wakeup = send_wakeup
        self._broker_backlog = broker_backlog
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._reconcile, name="reconcilers", daemon=True),
            threading.Thread(target=self._clear, name="clean-up", daemon=True),
            threading.Thread(target=self._take_back, name="ended workers", daemon=True),
        ]
        self._at_fault: set[str] = set()
        self._log = structlog.get_logger("kronoscope.worker")

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the rounds under way; a round that a store holds up dies with the process."""
        self._ended.set()
        until = time.monotonic() + 5
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _reconcile(self) -> None:
        next_reap = next_relay = time.monotonic()
        while not self._ended.is_set():
            now = time.monotonic()
            if now >= next_reap:
                next_reap = now + self._settings.reaper_seconds
                reaped = self._round("reaped", lambda: reap_expired(self._engine))
                if self._round("overdue", lambda: end_overdue(self._engine)) and reaped:
                    self._note("reaper")
            if now >= next_relay:
                next_relay = now + self._settings.relay_seconds
                if self._round("wake-ups sent", self._relay) and self._send_wakeup is not None:
                    self._note("relay")
            self._ended.wait(max(0.0, min(next_reap, next_relay) - time.monotonic()))

    def _take_back(self) -> None:
        ended = EndedWorkers(self._settings.artifact_root)

        def take_back(worker_id: str) -> int:
            taken = reap_ended_worker(self._engine, worker_id, self._process_space)
            if taken:
                self._wake()
            return taken

        while not self._ended.wait(_ENDED_SECONDS):
            self._round("taken back", lambda: ended.sweep(take_back))

    def _clear(self) -> None:
        next_clearing = forgotten = time.monotonic()
        # the workers of one night's restart need not all list the store at once
        next_sweep = time.monotonic() + random.uniform(0, self._settings.sweep_seconds)  # noqa: S311 - no secret
        scratch = open_scratch(self._settings)
        folder = open_artifacts(self._settings)
        grace = self._settings.grace_seconds
        while not self._ended.is_set():
            now = time.monotonic()
            if now >= forgotten + _FAULTS_SECONDS:
                forgotten = now
                self._at_fault.clear()
            if now >= next_clearing:
                next_clearing = now + _SCRATCH_SECONDS
                self._round("cleared", lambda: sweep_scratch(self._engine, scratch))
                self._round("archived", lambda: self._archive(folder))
                self._round("forgotten", self._forget)
                self._round("uncached", self._sweep_caches)
            if now >= next_sweep:
                next_sweep = now + self._settings.sweep_seconds
                self._round("objects removed", lambda: sweep_objects(self._engine, folder, grace))
                self._round("attempts removed", lambda: sweep_attempts(self._engine, folder, grace))
            self._ended.wait(max(0.0, min(next_clearing, next_sweep) - time.monotonic()))

    def _sweep_caches(self) -> int:
        return sweep_caches(self._engine, self._settings.artifact_root, self._settings.cache_bytes)

    def _archive(self, folder: ArtifactFolder) -> int:
        days = self._settings.retention_days
        if days is None:
            return 0
        dropped = self._settings.retention_files == "drop"
        return archive_ended(self._engine, folder, days, drop_files=dropped, at_fault=self._at_fault)

    def _forget(self) -> int:
        days = self._settings.retention_days
        return 0 if days is None else forget_estimates(self._engine, days)

    def _relay(self) -> int:
        if self._send_wakeup is None:
            return 0
        return relay(self._engine, self._send_wakeup, self._settings.unclaimed_seconds, self._broker_backlog)

    def _note(self, reconciler: Reconciler) -> None:
        def note() -> int:
            note_round(self._engine, reconciler)
            return 0

        self._round("noted", note)

    def _round(self, what: str, sweep: Callable[[], int]) -> bool:
        """One round, and whether it ended well; neither a silent database nor a silent broker ends the thread."""
        try:
            count = sweep()
        except LedgerUnavailable:
            self._log.warning("the database does not answer; swept again later", sweep=what)
        except Exception as error:  # noqa: BLE001 - brokers raise what they like; the database keeps every job meanwhile
            self._log.warning("sweeping failed; tried again later", sweep=what, error=type(error).__name__)
        else:
            if count:
                self._log.info(what, number=count)
            return True
        return False
