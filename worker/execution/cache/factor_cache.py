"""The factor cache of a child: ask the parent for an entry by its key, or leave one of the factors that were collected.

The parent has verified what it lays out, where no job can write. What is left is written into the attempt's own
folder, and becomes an entry when the parent has copied it. Neither looking nor leaving ever fails a job.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from catalog.frame_bounds import CACHED_FILES
from catalog.frames import CacheAnswer, CacheAsked, CacheFilled
from catalog.requests.cached_factors import CachedFile
from engine.artifacts import Artifacts
from engine.distributed.group import Ranks
from worker.disk.cache_folder import LEAST_FREE_SHARE
from worker.disk.free_space import free_share
from worker.execution.files.artifact_files import ArtifactFiles
from worker.execution.frame_pipe import FramePipe
from worker.execution.ranks.rank_part import NoFiles


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """The use that one job makes of its tenant's cache."""

    key: str
    """The key of its collection, as `factor_key` returns it."""
    view: Path
    """The folder in which the parent lays out the files of an entry."""
    filled: Path
    """The folder of the attempt for the files of an entry to be."""
    refresh: bool
    """Whether the factors are collected in any case, and replace those of an earlier entry."""
    ask: Callable[[str], CacheAnswer]
    """Asks the parent for the entry of a key; every rank gets the same answer."""
    tell: Callable[[CacheFilled], None]
    """Tells the parent what was left for it."""
    fills: bool = True
    """Whether what is collected becomes an entry: of several ranks, which hold the same factors, one leaves it."""
    agree: Callable[[bool], bool] = bool
    """Returns whether every rank has found the entry: one that collects waits for all others."""


class FactorCache:
    """The entry of one collection among a tenant's cached factors, to be found or to be left."""

    def __init__(
        self,
        use: CacheUse,
        *,
        limit_bytes: int,
        unchanged: Callable[[], bool],
        log: Callable[[str, str], None],
    ) -> None:
        """Set up the cache; nothing is asked yet."""
        self._use = use
        self._limit_bytes = limit_bytes
        self._unchanged = unchanged
        self._log = log
        self._shelf: _Shelf | None = None

    def find(self) -> tuple[Artifacts, str] | None:
        """Ask for the entry of the key."""
        if self._use.refresh:
            return None
        answer = self._use.ask(self._use.key)
        if answer.warning is not None:
            self._log("warning", answer.warning)
        is_there = answer.job is not None and self._use.view.is_dir()
        if not self._use.agree(is_there) or not is_there:
            return None
        found = f"{answer.job}, key {self._use.key}"
        self._log("info", f"factors from the cache of job {found}: nothing is collected")
        return ArtifactFiles(self._use.view, None), found

    def shelf(self) -> Artifacts:
        """Return the folder for factors that are being collected; ``keep`` leaves it to the parent."""
        if not self._use.fills:
            return NoFiles()
        if self._shelf is None:
            self._shelf = _Shelf(self._use.filled, self._limit_bytes, self._log)
        return self._shelf

    def keep(self) -> None:
        """Leave what was written as the entry of the key, if all of it was, and the data came as the key says."""
        shelf = self._shelf
        if shelf is None or shelf.failed:
            return
        why = None
        if not self._unchanged():
            why = "the data are others in each pass"
        elif len(shelf.files) > CACHED_FILES:
            why = f"an entry has at most {CACHED_FILES:,} files"
        if why is not None:
            self._log("info", f"factors are not cached: {why}")
            self.close()
            return
        # no longer this process's to remove
        self._shelf = None
        self._use.tell(CacheFilled(key=self._use.key, files=tuple(shelf.files.values())))

    def close(self) -> None:
        """Remove what was written and is not in use: of a job that stops or fails, nothing stays."""
        shelf, self._shelf = self._shelf, None
        if shelf is not None:
            shelf.close()


def ask_parent(pipe: FramePipe, ranks: Ranks, checkpoint: Callable[[], None]) -> Callable[[str], CacheAnswer]:
    """Return what asks the parent for an entry: of several ranks rank 0 does, and tells the others."""

    def ask(key: str) -> CacheAnswer:
        own = pipe.ask(CacheAsked(key=key), checkpoint) if ranks.rank == 0 else None
        told = ranks.gather((key, own), "answers of the cache")
        answer: CacheAnswer = told[0][1]
        # ranks with a part of the model each have keys of their own, and no entry
        return answer if all(each == key for each, _ in told) else CacheAnswer(job=None)

    return ask


class _Shelf(ArtifactFiles):
    """Files of an entry to be; the first that cannot be written ends it."""

    def __init__(self, place: Path, limit_bytes: int, log: Callable[[str, str], None]) -> None:
        self.files: dict[str, CachedFile] = {}
        self.failed = False
        self._place = place
        self._limit_bytes = limit_bytes
        self._log = log
        super().__init__(place, self._note)

    def close(self) -> None:
        """Remove what stands there."""
        shutil.rmtree(self._place, ignore_errors=True)

    def _note(self, name: str, sha256: str, size_bytes: int, media_type: str) -> None:
        del media_type
        self.files[name] = CachedFile(name=name, sha256=sha256, size_bytes=size_bytes)

    def _write(self, name: str, parts: Iterable[bytes], media_type: str) -> None:
        if self.failed:
            return
        if free_share(self._place) < LEAST_FREE_SHARE:
            self._give_up(f"less than {LEAST_FREE_SHARE:.0%} of the disk is free, which results may need")
            return
        try:
            super()._write(name, parts, media_type)
        except OSError as error:
            self._give_up(f"the cache refused a write: {error.strerror or error}")
            return
        if sum(each.size_bytes for each in self.files.values()) > self._limit_bytes:
            self._give_up(f"they take more than the cache's {self._limit_bytes:,} bytes")

    def _give_up(self, why: str) -> None:
        self.failed = True
        self._log("warning", f"factors are not cached: {why}")
        self.close()
