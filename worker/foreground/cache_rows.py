"""Cache rows of runs in the foreground: a file of JSON for each entry, beside the entries' folders.

There is no ledger, and all jobs are the user's: all who may write to the folder are believed.
"""

import contextlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from catalog.frames import CacheAnswer, CacheAsked, CacheFilled, LogLine
from catalog.open_beneath import READ, open_beneath
from catalog.record import plain
from catalog.requests.cached_factors import FILLED, CachedEntry, CachedFile
from worker.disk.cache_folder import CacheFolder, Filling

_FORMAT = "kronoscope-cached-factors/2"
_MOST_BYTES = 64 * 2**20
_SUFFIX = ".json"


class CacheRows:
    """The rows of one folder's entries."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> CachedEntry | None:
        """Return the entry of a key, and note its use."""
        path = self._path(key)
        try:
            entry = _read(path)
        except FileNotFoundError:
            return None
        if entry.key != key:
            raise ValueError("the entry is of another key")
        with contextlib.suppress(OSError):
            os.utime(path)
        return entry

    def add(self, entry: CachedEntry, *, replace: bool) -> bool:
        """Make an entry that of its key."""
        path = self._path(entry.key)
        part = self._folder / f".part-{uuid.uuid4().hex}"
        try:
            with part.open("x") as file:
                json.dump({"format": _FORMAT, **plain(entry)}, file)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                part.replace(path)
                return True
            with contextlib.suppress(FileExistsError):
                os.link(part, path)
                return True
            return False
        finally:
            part.unlink(missing_ok=True)

    def remove(self, key: str, entry_id: str | None) -> None:
        """Remove the row of a key."""
        with contextlib.suppress(OSError, ValueError):
            if entry_id is not None and _read(self._path(key)).id != entry_id:
                return
        self._path(key).unlink(missing_ok=True)

    def all(self) -> list[CachedEntry]:
        """Return all entries, the longest unused last."""
        found = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError, ValueError):
                found.append((path.stat().st_mtime, _read(path)))
        return [entry for _, entry in sorted(found, key=lambda each: -each[0])]

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"


class RunCache:
    """The cache of one run: answers its child, and takes what that leaves."""

    def __init__(self, request: Mapping[str, Any], artifacts: Path) -> None:
        """Set up the cache that a run's request names, if it names one."""
        self.view = artifacts.with_name(".cached")
        """Folder in which the child finds the entries that it asks for."""
        self._artifacts = artifacts
        self._run = str(request.get("job") or "(without an id)")
        document = request.get("document")
        self._replace = isinstance(document, dict) and document.get("cache") == "refresh"
        self._cache: CacheFolder | None = None
        if request.get("cache"):
            folder = Path(request["cache"])
            self._cache = CacheFolder(folder, CacheRows(folder), int(request.get("cache_bytes") or 0))

    def told(self) -> Path | None:
        """Return the folder that the child's assignment names; None without a cache."""
        return None if self._cache is None else self.view

    def answer(self, asked: CacheAsked) -> CacheAnswer:
        """Answer the child."""
        shutil.rmtree(self.view, ignore_errors=True)
        return CacheAnswer(job=None) if self._cache is None else self._cache.answer(asked.key, self.view)

    def take(self, filled: CacheFilled) -> LogLine | None:
        """Make an entry of what the child has left, and clear its folder."""
        if self._cache is None:
            return None
        filling = Filling(key=filled.key, job=self._run, files=filled.files, open=self._open, replace=self._replace)
        try:
            why = self._cache.take(filling)
        finally:
            shutil.rmtree(self._artifacts / FILLED, ignore_errors=True)
        return None if why is None else LogLine(level="warning", message=f"factors are not cached: {why}")

    def close(self) -> None:
        """Remove what the child was given."""
        shutil.rmtree(self.view, ignore_errors=True)

    def _open(self, name: str) -> BinaryIO:
        return os.fdopen(open_beneath(self._artifacts, Path(FILLED, name)), "rb")


def _read(path: Path) -> CachedEntry:
    """Read a row; a link or a pipe is none."""
    descriptor = os.open(path, READ | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is not a plain file")
        value: Any = json.loads(file.read(_MOST_BYTES))
    try:
        if value.pop("format") != _FORMAT:
            raise ValueError("the entry is of another format")
        return CachedEntry(**value | {"files": tuple(CachedFile(**each) for each in value["files"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is not the row of an entry") from error
