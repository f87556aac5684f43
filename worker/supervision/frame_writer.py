"""The frame writer: a child's frames become rows of the ledger, one fenced transaction each.

A database, or a store of artifacts, that does not answer is asked again for as long as the lease
holds (every write of both may be repeated); once the lease is lost nothing more is written.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from sqlalchemy import Engine
from structlog.typing import FilteringBoundLogger

from catalog.frame_bounds import FrameBeyond, Text
from catalog.frames import (
    ArtifactWritten,
    CacheAnswer,
    CacheAsked,
    CacheFilled,
    Frame,
    LayerDone,
    LogLine,
    Planned,
    Progress,
    Started,
    Summarised,
)
from catalog.requests.cached_factors import FILLED
from jobs.errors import ArtifactDamaged, DiskTooSmall, LeaseLost, LedgerUnavailable, StoreUnavailable
from jobs.objects import job_folders
from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.cached_entries import CachedEntries, place_of
from jobs.queue import attempt_writes
from jobs.queue.piece_progress import report_piece
from jobs.records import Claim
from jobs.schema.query_limits import limit_queries
from jobs.tenancy.quotas import require_room_for
from worker.disk.cache_folder import CacheFolder, Filling, cache_of_tenant, tenants_caches
from worker.process.log_lines import LogFormatter
from worker.settings import WorkerSettings
from worker.supervision.child_launch import cache_bytes_of, computing_threads
from worker.supervision.job_progress import ProgressView
from worker.supervision.lease_monitor import LeaseWatch
from worker.supervision.retrying_object_store import Interrupted

T = TypeVar("T")
_FIRST_RETRY_SECONDS = 0.2
_LONGEST_RETRY_SECONDS = 5.0
_MAX_LOG_LINES = 1_000
_LOGGED = Text(most=8_000)
_MOST = {
    Started: 16,
    Planned: 64,
    LayerDone: 200_000,
    ArtifactWritten: 200_000,
    Summarised: 256,
    CacheAsked: 16,
    CacheFilled: 16,
}
"""Frames of one type in an attempt: each becomes a row, or a write of the job's."""
_MOST_STAGES = 10_000
"""Changes of the stage in progress frames, each of which is written at once."""


class Misplaced(Exception):
    """The job needs more than was leased for it, and another device could hold it."""


def _disk_bytes(plan: Mapping[str, Any]) -> int | None:
    size = plan.get("disk_peak_bytes")
    return size if isinstance(size, int) else None


class LedgerSink:
    """Writes one attempt's frames."""

    def __init__(
        self,
        engine: Engine,
        claim: Claim,
        settings: WorkerSettings,
        folder: ArtifactFolder,
        watch: LeaseWatch,
        log: FilteringBoundLogger,
    ) -> None:
        self._engine = engine
        self._claim = claim
        self._settings = settings
        self._folder = folder
        self._watch = watch
        self._log = log
        self._progress = ProgressView(
            claim.kinds,
            claim.completed,
            collects=claim.document.get("factors") is None
            and claim.document.get("model") is not None
            and (claim.piece or {}).get("round") != "score",
            work=None if claim.piece is None else claim.piece["round"],
            percent=claim.percent,
            kept=claim.kept,
        )
        self._progress.take_plan(claim.plan or {})
        self.planned_disk_bytes = _disk_bytes(claim.plan or {})
        """Bytes on the disk at a time, by the job's plan; None as long as there is no plan."""
        self._formatter = LogFormatter(claim.document)
        self._log_lines = 0
        self._taken: Counter[type[Frame]] = Counter()
        self._stage, self._stages = "", 0
        self._seq: int | None = None
        """The number of the attempt's last event that is known to stand; that it has started is the first."""

    def take(self, frame: Frame, answer: Callable[[CacheAnswer], None]) -> None:
        """Write one frame, and log what is to be said of it."""
        self._require_expected(frame)
        if isinstance(frame, (CacheAsked, CacheFilled)):
            self._use_cache(frame, answer)
            return
        self._keep(frame)
        if isinstance(frame, LogLine) and self._log_lines > _MAX_LOG_LINES:
            return
        layer = {"layer": frame.layer} if isinstance(frame, LayerDone) else {}
        for line in self._formatter.lines(frame):
            getattr(self._log, line.level)(line.message, **layer)
            if isinstance(frame, Summarised):
                self._keep(line)

    def _require_expected(self, frame: Frame) -> None:
        self._taken[type(frame)] += 1
        most = _MOST.get(type(frame))
        if most is not None and self._taken[type(frame)] > most:
            raise FrameBeyond(f"more than {most:,} frames `{frame.frame}`")
        if isinstance(frame, (LayerDone, Summarised)) and frame.kind not in self._claim.kinds:
            raise FrameBeyond(f"a frame `{frame.frame}` of `{frame.kind}`, which the job does not ask for")
        if isinstance(frame, Progress) and frame.stage != self._stage:
            self._stage, self._stages = frame.stage, self._stages + 1
            if self._stages > _MOST_STAGES:
                raise FrameBeyond(f"progress through more than {_MOST_STAGES:,} stages")

    def _use_cache(self, frame: CacheAsked | CacheFilled, answer: Callable[[CacheAnswer], None]) -> None:
        """Serve the cache of the tenant; what another has collected is neither found nor noticed."""
        limit_bytes = cache_bytes_of(self._claim, self._settings)
        if limit_bytes == 0:
            raise FrameBeyond(f"a frame `{frame.frame}`, where no job of its document has cached factors")
        root, tenant = self._folder.root, self._claim.tenant_id
        rows = CachedEntries(self._engine, tenant, place_of(tenants_caches(root)))
        cache = CacheFolder(cache_of_tenant(root, tenant), rows, limit_bytes)
        if isinstance(frame, CacheAsked):
            answer(self.write(lambda: self._cached(cache, frame.key)))
            return
        why = self.write(lambda: self._fill(cache, frame))
        # what the child has left counts among the bytes of its attempt
        job_folders.clear(self._folder.attempt_dir(self._claim.job_id, self._claim.fence) / FILLED)
        if why is not None:
            line = LogLine(level="warning", message=f"factors are not cached: {why}")
            self._keep(line)
            self._log.warning(line.message)

    def _cached(self, cache: CacheFolder, key: str) -> CacheAnswer:
        """Verify the entry that a child asks for, and lay it out."""
        try:
            user = self._settings.confinement(self._claim.user_number).user
            return cache.answer(key, self._folder.new_view(self._claim.job_id, self._claim.fence, user))
        except OSError as error:
            why = error.strerror or error
            return CacheAnswer(job=None, warning=f"cached factors cannot be used here: {why}; collected again")

    def _fill(self, cache: CacheFolder, filled: CacheFilled) -> str | None:
        """Publish what a child has left; it is its claim, and serves jobs of its tenant alone."""
        claim, folder = self._claim, self._folder
        filling = Filling(
            key=filled.key,
            job=claim.job_id,
            files=filled.files,
            open=lambda name: folder.staged(claim.job_id, claim.fence, f"{FILLED}/{name}"),
            replace=claim.document.get("cache") == "refresh",
        )
        try:
            return cache.take(filling)
        except (ArtifactDamaged, OSError) as error:
            return str(error)

    def write(self, write: Callable[[], T]) -> T:
        """Write, and repeat a write that was not answered after ever longer pauses, which differ between workers."""
        pause = _FIRST_RETRY_SECONDS
        while True:
            if self._watch.lost.is_set():
                raise LeaseLost(self._claim.job_id, self._claim.fence)
            try:
                with limit_queries(self._watch.query_seconds):
                    return write()
            except (LedgerUnavailable, StoreUnavailable) as error:
                what = "database" if isinstance(error, LedgerUnavailable) else "store of artifacts"
                if self._watch.reason is not None and isinstance(error, StoreUnavailable):
                    raise Interrupted from error
                self._log.warning(
                    f"the {what} does not answer; the write is repeated",
                    why=str(error),
                    pause_seconds=round(pause, 1),
                )
                self._watch.lost.wait(pause * random.uniform(0.5, 1))  # noqa: S311 - spreads load, guards nothing
                pause = min(2 * pause, _LONGEST_RETRY_SECONDS)

    def _keep(self, frame: Frame) -> None:
        """Write a frame that is not the last one, which the supervisor takes itself."""
        engine, claim = self._engine, self._claim
        match frame:
            case Started():
                # content that names the attempt tells it from events of those before
                self._seq = self.write(lambda: attempt_writes.write_started(engine, claim, frame, self._seq or 0))
                self._report(begins=True)
            case Progress():
                self._show(self._progress.take(frame))
            case Planned():
                self._plan(frame.plan)
            case LayerDone():
                self._progress.take_layer(frame)
                if self.write(lambda: attempt_writes.write_layer(engine, claim, frame)) == "differs":
                    self._log.warning("another digest stands for this layer already", layer=frame.layer)
            case ArtifactWritten():
                kept = (claim.tenant_id, frame.sha256, frame.size_bytes, self._settings.ledger.stored_bytes)
                self.write(lambda: require_room_for(engine, *kept))
                place = (claim.tenant_id, claim.job_id, claim.fence, frame.name)
                uri = self.write(lambda: self._folder.publish(*place, sha256=frame.sha256, size_bytes=frame.size_bytes))
                self.write(lambda: attempt_writes.write_artifact(engine, claim, frame, uri))
            case Summarised():
                self._show(self._progress.rest())
                self._seq = self.write(lambda: attempt_writes.write_summary(engine, claim, frame, self._seq))
            case LogLine():
                self._write_line(frame)
            case _:
                raise TypeError(f"a {type(frame).__name__} frame is not a row; the supervisor takes last frames itself")

    def _write_line(self, frame: LogLine) -> None:
        """Write a line of the job's history; a child that talks without end is cut off."""
        self._log_lines += 1
        if self._log_lines <= _MAX_LOG_LINES and frame.level != "debug":
            line = replace(frame, message=_LOGGED.cut(frame.message))
            self._seq = self.write(lambda: attempt_writes.write_log_line(self._engine, self._claim, line, self._seq))

    def _show(self, view: Mapping[str, Any] | None) -> None:
        """Write the progress, unless there is nothing to write now."""
        if view is not None:
            self.write(lambda: attempt_writes.write_progress(self._engine, self._claim, view))
            self._report()

    def _report(self, *, begins: bool = False) -> None:
        """Have a parent show how far its pieces are; what fails is not repeated, as the next report says more."""
        if self._claim.parent_id is not None:
            with contextlib.suppress(LedgerUnavailable), limit_queries(self._watch.query_seconds):
                report_piece(self._engine, self._claim, begins=begins)

    def _plan(self, plan: Mapping[str, Any]) -> None:
        # threads stand in the plan: both decide the digests, and later attempts follow both
        planned = Planned(plan={**plan, "threads": self._threads(plan)})
        self._progress.take_plan(plan)
        self.planned_disk_bytes = _disk_bytes(plan)
        if not self.write(lambda: attempt_writes.write_plan(self._engine, self._claim, planned, self._seq)):
            raise Misplaced
        most = self._settings.child_disk_bytes
        if most is not None and (self.planned_disk_bytes or 0) >= most:
            raise DiskTooSmall(self.planned_disk_bytes or 0, most)

    def _threads(self, plan: Mapping[str, Any]) -> int:
        """Return the threads that the child says it computes with, as far as it may choose them."""
        own, (most, may_choose) = plan.get("threads"), computing_threads(self._claim, self._settings)
        if not may_choose or not isinstance(own, int) or isinstance(own, bool):
            return most
        return own if 1 <= own <= most else most
