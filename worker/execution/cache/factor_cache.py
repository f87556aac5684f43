"""The factor cache of a child: find an entry by its key, or fill one with the factors that were collected.

What is found is linked into the job's own scratch folder and its digests are computed before anything is read from
it; what does not agree is removed, and collected again, while an entry that merely cannot be had here and now is left
to other jobs. Neither looking nor filling ever fails a job.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.workspace import Artifacts
from worker.disk import cache_folder
from worker.execution.files.artifact_files import ArtifactFiles
from worker.execution.files.open_files import OpenFolder
from worker.execution.ranks.rank_part import NoFiles
from worker.execution.refusal import Refusal

_FORMAT = "kronoscope-cached-factors/1"
_MAX_ENTRY_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_LEAST_FREE_SHARE = 0.05
"""Of a disk, below which nothing is cached."""
_DAMAGE = (errno.EIO, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOTDIR)
"""What reading says where a disk has lost bytes, or something stands where a file of an entry was."""


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """The use that one job makes of its tenant's cache."""

    key: str
    """The key of its collection, as `factor_key` returns it."""
    job: str
    """The name by which the log of a later job tells where its factors come from."""
    own: Path
    """The job's own folder, for links to the files of an entry."""
    refresh: bool
    """Whether the factors are collected in any case, and replace those of an earlier entry."""
    fills: bool = True
    """Whether what is collected becomes an entry: of several ranks, which hold the same factors, one leaves it."""
    agree: Callable[[bool], bool] = bool
    """Returns whether every rank has found the entry: one that collects waits for all others."""


class FactorCache:
    """The entry of one collection in a tenant's folder of cached factors, to be found or to be filled."""

    def __init__(
        self,
        folder: Path,
        use: CacheUse,
        *,
        limit_bytes: int,
        unchanged: Callable[[], bool],
        log: Callable[[str, str], None],
    ) -> None:
        """Set up the cache; nothing is read yet.

        Args:
            folder: The tenant's folder of cached factors.
            use: Key, job and policy.
            limit_bytes: Bytes that all entries of the folder may take together.
            unchanged: Returns whether every pass yielded the data that the key was computed from.
            log: Receives level and message.
        """
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._key = use.key
        self._job = use.job
        self._own = use.own
        self._refresh = use.refresh
        self._fills = use.fills
        self._agree = use.agree
        self._unchanged = unchanged
        self._log = log
        self._shelf: _Shelf | None = None

    def find(self) -> tuple[Artifacts, str] | None:
        """Find the entry of the key, and verify every file of it.

        Returns:
            The cached factors, and a phrase that names the job that collected them and the key; None if there is no
            entry, if it is damaged, or if it cannot be read here.
        """
        if self._refresh:
            return None
        source = self._verified()
        if not self._agree(source is not None) or source is None:
            return None
        with contextlib.suppress(OSError):
            os.utime(self._folder / self._key / cache_folder.ENTRY)
        found = f"{source}, key {self._key}"
        self._log("info", f"factors from the cache of job {found}: nothing is collected")
        return ArtifactFiles(self._own, None), found

    def _verified(self) -> str | None:
        """Link the entry into the job's own folder, and verify it; return the job that left it, None without one."""
        entry = self._folder / self._key
        shutil.rmtree(self._own, ignore_errors=True)
        try:
            return self._linked(entry)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, Refusal) as error:
            shutil.rmtree(self._own, ignore_errors=True)
            if isinstance(error, FileNotFoundError) and not (entry / cache_folder.ENTRY).exists():
                return None
            if isinstance(error, OSError) and error.errno not in _DAMAGE:
                self._log("warning", f"cached factors cannot be used here: {error.strerror or error}; collected again")
                return None
            self._log("warning", f"cached factors are damaged, and collected again: {error}")
            cache_folder.discard(entry)
            return None

    def _linked(self, entry: Path) -> str:
        listing = OpenFolder(entry, Path(os.path.realpath(self._folder)), "/cache").file(cache_folder.ENTRY)
        if listing is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), cache_folder.ENTRY)
        with listing.open() as file:
            value = json.loads(file.read(_MAX_ENTRY_BYTES))
        if value["format"] != _FORMAT or value["key"] != self._key:
            raise ValueError("the entry is of another format or key")
        for name, (sha256, size) in value["files"].items():
            source, target = entry / name, self._own / name
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{name!r} is not the name of a file in it")
            if source.is_symlink():
                # a link to a link is one, and leads anywhere
                raise ValueError(f"{name} is a link")
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except FileNotFoundError:
                # the whole entry may have been taken away while it was being read
                if source.exists() or not (entry / cache_folder.ENTRY).is_file():
                    raise
                raise ValueError(f"{name} is missing") from None
            except OSError:
                # a file system without links
                shutil.copyfile(source, target)
            if not stat.S_ISREG(target.lstat().st_mode) or target.stat().st_size != size or _sha256(target) != sha256:
                raise ValueError(f"{name} is not what was written")
        return str(value["job"])

    def shelf(self) -> Artifacts:
        """Return the folder for factors that are being collected; ``keep`` makes it an entry.

        Returns:
            The artifacts to write to; what cannot be written is dropped with a warning, and where another rank leaves
            the entry, everything is dropped.
        """
        if not self._fills:
            return NoFiles()
        if self._shelf is None:
            self._shelf = _Shelf(cache_folder.part(self._folder), self._limit_bytes, self._log)
        return self._shelf

    def keep(self) -> None:
        """Make what was written the entry of the key, if all of it was, and the data came as the key says."""
        shelf = self._shelf
        if shelf is None:
            return
        try:
            if shelf.failed:
                return
            if not self._unchanged():
                self._log("info", "factors are not cached: the data are others in each pass")
                return
            files = dict(shelf.files)
            shelf.save_json(cache_folder.ENTRY, {"format": _FORMAT, "key": self._key, "job": self._job, "files": files})
            if not shelf.failed:
                cache_folder.publish(shelf.place, self._folder, self._key, replace=self._refresh)
                cache_folder.sweep(self._folder, self._limit_bytes)
        except OSError as error:
            self._log("warning", f"factors are not cached: {error.strerror or error}")
        finally:
            self.close()

    def close(self) -> None:
        """Let go of what was written and is no entry: of a job that stops or fails, nothing stays."""
        shelf, self._shelf = self._shelf, None
        if shelf is not None:
            shelf.close()


class _Shelf(ArtifactFiles):
    """Files of an entry to be; the first that cannot be written ends it."""

    def __init__(self, place: Path, limit_bytes: int, log: Callable[[str, str], None]) -> None:
        self.place = place
        self.files: dict[str, tuple[str, int]] = {}
        self.failed = False
        self._limit_bytes = limit_bytes
        self._log = log
        self._lock: int | None = None
        super().__init__(place, self._note)

    def close(self) -> None:
        """Remove what still stands there."""
        shutil.rmtree(self.place, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _note(self, name: str, sha256: str, size_bytes: int, media_type: str) -> None:
        del media_type
        self.files[name] = (sha256, size_bytes)

    def _write(self, name: str, parts: Iterable[bytes], media_type: str) -> None:
        if self.failed:
            return
        if _free_share(self.place) < _LEAST_FREE_SHARE:
            self._give_up(f"less than {_LEAST_FREE_SHARE:.0%} of the disk is free, which results may need")
            return
        try:
            if self._lock is None:
                self._lock = cache_folder.claim(self.place)
            super()._write(name, parts, media_type)
        except OSError as error:
            self._give_up(f"the cache refused a write: {error.strerror or error}")
            return
        if sum(size for _, size in self.files.values()) > self._limit_bytes:
            self._give_up(f"they take more than the cache's {self._limit_bytes:,} bytes")

    def _give_up(self, why: str) -> None:
        self.failed = True
        self._log("warning", f"factors are not cached: {why}")
        shutil.rmtree(self.place, ignore_errors=True)


def _free_share(place: Path) -> float:
    """Of the disk that ``place``, or the folder it will be in, stands on."""
    there = next(each for each in (place, *place.parents) if each.is_dir())
    usage = shutil.disk_usage(there)
    return usage.free / usage.total if usage.total else 1.0


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()
