"""Maintenance: reaper and clean-up, which run in every worker process, so that no single one matters.

The clean-up has a thread of its own: a store that is silent for minutes must not hold up the reaper. So has the look
for workers of this machine that were killed.
"""

import functools
import random
import time
from pathlib import Path

import structlog
from sqlalchemy import Engine
from structlog.typing import FilteringBoundLogger

from jobs.objects.artifacts import open_artifacts
from jobs.objects.cached_entries import CachedEntries, forget_unused, list_tenants, place_of
from jobs.objects.scratch import open_scratch, sweep_scratch
from jobs.queue.reaper import reap, reap_ended_worker
from jobs.retention.object_sweep import sweep_attempts, sweep_objects
from jobs.retention.retention import archive_ended, forget_estimates
from jobs.rounds import Round, Rounds
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
_CLEAR_SECONDS = 60
_FAULTS_SECONDS = 3600
"""How long a job that cannot be archived is passed over."""


class WorkerMaintenance:
    """Threads that reap the jobs of silent workers, clear up after ended jobs, and send wake-ups."""

    def __init__(
        self, engine: Engine, settings: LedgerSettings, process_space: str = "", wakeups: Rounds | None = None
    ) -> None:
        """Get ready; ``process_space`` is the scope of process numbers seen here, ``wakeups`` None without a broker."""
        log = structlog.get_logger("kronoscope.worker")
        ended = EndedWorkers(settings.artifact_root)
        take_back = functools.partial(reap_ended_worker, engine, process_space=process_space)
        self._rounds = (
            Rounds("reaper", [("reaped or overdue", settings.reaper_seconds, lambda: reap(engine))], log),
            _clean_up(engine, settings, log),
            Rounds("ended workers", [("taken back", _ENDED_SECONDS, lambda: ended.sweep(take_back))], log),
            *(() if wakeups is None else (wakeups,)),
        )

    def start(self) -> None:
        """Begin."""
        for rounds in self._rounds:
            rounds.start()

    def stop(self) -> None:
        """End after the rounds under way; a round that a store holds up dies with the process."""
        until = time.monotonic() + 5
        for rounds in self._rounds:
            rounds.stop(0)
        for rounds in self._rounds:
            rounds.stop(until - time.monotonic())


def _clean_up(engine: Engine, settings: LedgerSettings, log: FilteringBoundLogger) -> Rounds:
    root, grace, days = settings.artifact_root, settings.grace_seconds, settings.retention_days
    scratch, folder = open_scratch(settings), open_artifacts(settings)
    dropped = settings.retention_files == "drop"
    at_fault: set[str] = set()
    table: list[Round] = [
        ("faults forgotten", _FAULTS_SECONDS, at_fault.clear),
        ("cleared", _CLEAR_SECONDS, lambda: sweep_scratch(engine, scratch)),
        ("uncached", _CLEAR_SECONDS, lambda: sweep_caches(engine, root, settings.cache_bytes)),
        ("objects removed", settings.sweep_seconds, lambda: sweep_objects(engine, folder, grace)),
        ("attempts removed", settings.sweep_seconds, lambda: sweep_attempts(engine, folder, grace)),
    ]
    if days is not None:
        archive = functools.partial(archive_ended, engine, folder, days, drop_files=dropped, at_fault=at_fault)
        table += [
            ("archived", _CLEAR_SECONDS, archive),
            ("forgotten", _CLEAR_SECONDS, lambda: forget_estimates(engine, days)),
        ]
    rounds = Rounds("clean-up", table, log)
    # the workers of one night's restart need not all list the store at once
    first = random.uniform(0, settings.sweep_seconds)  # noqa: S311 - no secret
    for name in ("objects removed", "attempts removed"):
        rounds.postpone(name, first)
    return rounds
