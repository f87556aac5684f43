"""The cache folder of one tenant: entries of cached factors, as the parent of a job serves and fills them.

::

    <folder>/<id>/<file>     read-only files of the service; an entry from the moment that a row names its id

The rows hold the digests, and stand where no job can write: in the ledger (`jobs.objects.cached_entries`), or for runs
in the foreground beside the folder (`worker.foreground.cache_rows`). A folder without a row is nothing, and neither is
a row without its folder: both are removed. Filling a folder takes a lock on it, which the kernel takes back from
a process that is gone.

What a job is given are second names of the files, in a folder that it may enter and not write; what it leaves is
copied, and the digests are those of the copies.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from catalog.frames import CacheAnswer
from catalog.open_beneath import READ
from catalog.requests.cached_factors import CachedEntry, CachedFile
from worker.disk.free_space import free_share

LEAST_FREE_SHARE = 0.05
"""Free share of a disk below which nothing is cached."""
_NAME = re.compile(r"[0-9a-f]{32}")
_OURS = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}|\.(part|trash)-.*")
"""Names of entries, of those of earlier versions, and of what is being filled or removed."""
_TRASH = ".trash-"
_CHUNK_BYTES = 2**20
_MODE = 0o444
_LEFT_SECONDS = 60.0
"""Age at which an unlocked folder is left of a killed process, and not just about to be locked."""
_STALE_SECONDS = 86_400.0
"""No entry is being filled for so long: after it, one is removed on a file system without locks too."""
_DAMAGE = (errno.EIO, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors of reading where a disk has lost bytes, or something else stands in a file's place."""


class EntryRows(Protocol):
    """The rows of the entries of one folder."""

    def find(self, key: str) -> CachedEntry | None:
        """Return the entry of a key, and note its use; ValueError if its row is damaged."""

    def add(self, entry: CachedEntry, *, replace: bool) -> bool:
        """Make an entry that of its key; return whether it is: of two, the first stays unless it is replaced."""

    def remove(self, key: str, entry_id: str | None) -> None:
        """Remove the row of a key, if it is of this entry; of any with None."""

    def all(self) -> list[CachedEntry]:
        """Return all entries, the longest unused last."""


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Files that a job has left to become an entry."""

    key: str
    job: str
    files: Sequence[CachedFile]
    open: Callable[[str], BinaryIO]
    """Opens a file by its name, and follows no link."""
    replace: bool
    """Whether an entry that is there already gives way."""


def cache_of_tenant(artifact_root: Path, tenant_id: str) -> Path:
    """Return the folder of one tenant's entries, which need not exist; a digest of the tenant alone is in its path."""
    return tenants_caches(artifact_root) / hashlib.sha256(tenant_id.encode()).hexdigest()[:32]


def tenants_caches(artifact_root: Path) -> Path:
    """Return the folder that holds the caches of all tenants, which need not exist."""
    return artifact_root / ".factor-cache"


class CacheFolder:
    """A tenant's entries."""

    def __init__(self, folder: Path, rows: EntryRows, limit_bytes: int) -> None:
        """Set up the cache of a tenant's folder, which need not exist yet; all entries take ``limit_bytes`` at most."""
        self.folder = folder
        self._rows = rows
        self._limit_bytes = limit_bytes

    def answer(self, key: str, view: Path) -> CacheAnswer:
        """Verify the entry of a key, and lay it out in a folder that a job may enter, in which nothing is yet.

        The answer names no job where there is no entry, and where it is damaged or cannot be read here.
        """
        answer = self._answer(key, view)
        if answer.job is None:
            for each in _listing(view):
                _clear(each)
        return answer

    def take(self, filling: Filling) -> str | None:
        """Copy what a job has left, and make it the entry of its key; of two that leave one at once the first wins.

        Return why it is not kept; None where it is, or an entry is there already.
        """
        size = sum(each.size_bytes for each in filling.files)
        if size > self._limit_bytes:
            return f"they take more than the cache's {self._limit_bytes:,} bytes"
        if free_share(self.folder, size) < LEAST_FREE_SHARE:
            return f"less than {LEAST_FREE_SHARE:.0%} of the disk would be free, which results may need"
        entry = CachedEntry(id=uuid.uuid4().hex, key=filling.key, job=filling.job, files=tuple(filling.files))
        try:
            self._fill(entry, filling)
        except (OSError, ValueError) as error:
            return str(getattr(error, "strerror", None) or error)
        self.sweep()
        return None

    def sweep(self) -> int:
        """Remove the longest unused entries beyond the limit, and what lacks a row or a folder; return how many.

        What is being filled counts. A job that reads an entry has its own names of the files, so that nothing is taken
        from under it.
        """
        places = {each.name: each for each in _listing(self.folder) if _OURS.fullmatch(each.name)}
        left = {name for name, each in places.items() if _is_left(each)}
        # after the folders: a process that fills one adds its row before it lets go of it
        entries = self._rows.all()
        named = {each.id for each in entries}
        removed, total = 0, 0
        for name, each in places.items():
            if name in left and name not in named:
                _clear(each)
                removed += 1
            elif name not in named:
                total += _size(each)
        for entry in entries:
            is_there = _NAME.fullmatch(entry.id) is not None and self._place(entry).is_dir()
            total += sum(each.size_bytes for each in entry.files) if is_there else 0
            if not is_there or total > self._limit_bytes:
                self._remove(entry)
                removed += 1
        return removed

    def _answer(self, key: str, view: Path) -> CacheAnswer:
        entry = None
        try:
            entry = self._rows.find(key)
            if entry is None:
                return CacheAnswer(job=None)
            for each in entry.files:
                _lay_out(self._place(entry), view, each)
        except ValueError as error:
            return self._damaged(key, entry, str(error))
        except OSError as error:
            if error.errno in _DAMAGE:
                return self._damaged(key, entry, str(error.strerror))
            why = error.strerror or error
            return CacheAnswer(job=None, warning=f"cached factors cannot be used here: {why}; collected again")
        return CacheAnswer(job=entry.job)

    def _fill(self, entry: CachedEntry, filling: Filling) -> None:
        """Copy the files into the entry's folder, and name it; nothing stays where it does not become the entry."""
        place, lock, added = self._place(entry), None, False
        before = self._rows.find(entry.key) if filling.replace else None
        try:
            lock = _claim(place)
            for each in entry.files:
                _copy(filling.open, each, place)
            added = self._rows.add(entry, replace=filling.replace)
        finally:
            if not added:
                discard(place)
            if lock is not None:
                os.close(lock)
        if before is not None and added:
            self._remove(before)

    def _damaged(self, key: str, entry: CachedEntry | None, why: str) -> CacheAnswer:
        if entry is None:
            self._rows.remove(key, None)
        elif not self._place(entry).is_dir():
            # taken away as a whole, before or while it was being read
            self._rows.remove(key, entry.id)
            return CacheAnswer(job=None)
        else:
            self._remove(entry)
        return CacheAnswer(job=None, warning=f"cached factors are damaged, and collected again: {why}")

    def _remove(self, entry: CachedEntry) -> None:
        """Remove an entry: its row, after which the folder is nothing, and the folder."""
        self._rows.remove(entry.key, entry.id)
        if _NAME.fullmatch(entry.id):
            discard(self._place(entry))

    def _place(self, entry: CachedEntry) -> Path:
        return self.folder / entry.id


def discard(place: Path) -> None:
    """Remove the folder of an entry: out of sight at once, then file by file."""
    trash = place.parent / f"{_TRASH}{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):
        place.rename(trash)
    _clear(trash)


def _lay_out(place: Path, view: Path, file: CachedFile) -> None:
    """Give a file of an entry a name in a job's view of it, and verify what has it."""
    source, target = place / file.name, view / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise ValueError(f"{file.name} is missing") from None
    except OSError:
        # a file system without links
        if not stat.S_ISREG(source.lstat().st_mode):
            raise ValueError(f"{file.name} is not a plain file") from None
        shutil.copyfile(source, target, follow_symlinks=False)
        target.chmod(_MODE)
    status = target.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{file.name} is not a plain file")
    if status.st_size != file.size_bytes or _sha256(target) != file.sha256:
        raise ValueError(f"{file.name} is not what was written")


def _copy(open_file: Callable[[str], BinaryIO], file: CachedFile, place: Path) -> None:
    """Copy a file that a job has left, and require that it has left what it said."""
    target = place / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with open_file(file.name) as source, target.open("xb") as copy:
        # it may grow while it is read
        while size <= file.size_bytes and (part := source.read(_CHUNK_BYTES)):
            copy.write(part)
            digest.update(part)
            size += len(part)
        copy.flush()
        os.fchmod(copy.fileno(), _MODE)
        os.fsync(copy.fileno())
    if size != file.size_bytes or digest.hexdigest() != file.sha256:
        raise ValueError(f"{file.name} is not what was announced")


def _claim(place: Path) -> int:
    """Make the folder of an entry to be, and lock it until the descriptor is closed."""
    place.mkdir(parents=True)
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def _listing(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _clear(place: Path) -> None:
    """Remove what stands there, a folder or not."""
    shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):
        place.unlink()


def _is_left(place: Path) -> bool:
    """Whether a folder is no longer being filled or cleared."""
    try:
        idle = time.time() - max(each.lstat().st_mtime for each in (place, *place.rglob("*")))
        if idle <= _LEFT_SECONDS or idle > _STALE_SECONDS:
            return idle > _STALE_SECONDS
        descriptor = os.open(place, READ)
    except OSError:
        return False  # going away meanwhile
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # in use, or a file system without locks
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _size(place: Path) -> int:
    total = 0
    for each in (place, *place.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            status = each.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
