"""Scratch in a bucket: a copy of an attempt's finished checkpoints, for an attempt on another machine.

``scratch/<job>/<fence>/<sha256>`` are the files of the newest checkpoint that was copied whole, and
``index.json`` beside them says which name each has; it is put last and replaces the one before in
one step. So its reader finds a whole checkpoint, whatever happened to its writer.
"""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from jobs.errors import ArtifactDamaged
from jobs.objects import job_folders
from jobs.objects.object_store import PART, ObjectStore, written_beside
from jobs.schema.identifiers import is_id

MANIFEST = "checkpoint/checkpoint.json"
"""The file that makes the others a checkpoint of a collection."""
MANIFESTS = (MANIFEST, "search/search.json", "training/training.json")
"""The same of everything that has checkpoints: a collection, a search for eigenvalues, and a training."""
_ROOT = "scratch/"
_INDEX = "index.json"
_MAX_INDEX_BYTES = 64 * 2**20


class ScratchStore:
    """The copies of all jobs."""

    def __init__(self, store: ObjectStore) -> None:
        """Set up the copies in a store."""
        self._store = store
        self._digests: dict[tuple[int, int, int], str] = {}
        """Digests by inode, time and size of copied files, which are never changed in place."""

    def save(self, job_id: str, fence: int, folder: Path) -> bool:
        """Copy the checkpoint in an attempt's folder, and delete the files that only the copy before had.

        Returns:
            Whether there was a checkpoint.

        Raises:
            StoreUnavailable: If the store does not answer; earlier copies stay.
            OSError: If a disk is full or fails.
        """
        prefix = _prefix(job_id, fence)
        with _snapshot(folder) as files:
            if files.keys().isdisjoint(MANIFESTS):
                return False
            before = {each.key for each in self._store.listing(prefix)}
            index = {}
            for name, path in files.items():
                with job_folders.within(folder):
                    file = path.open("rb")
                with file:
                    sha256, size = self._digest(file), path.stat().st_size
                    index[name] = [sha256, size]
                    if f"{prefix}{sha256}" not in before:
                        self._store.put(f"{prefix}{sha256}", file, sha256=sha256, size_bytes=size)
            self._put_index(prefix, index, folder.parent)
        kept = {f"{prefix}{sha256}" for sha256, _ in index.values()} | {f"{prefix}{_INDEX}"}
        for each in before - kept:
            self._store.delete(each)
        for earlier in self._fences(job_id):
            if earlier < fence:
                self._remove(_prefix(job_id, earlier))
        return True

    def newest(self, job_id: str, before: int) -> int | None:
        """Return the fence of the latest attempt with a copied checkpoint before the one that asks, or None."""
        return max((fence for fence in self._fences(job_id) if fence < before), default=None)

    def fetch(self, job_id: str, fence: int, target: Path) -> None:
        """Download an attempt's copy to a folder, which appears complete or not at all.

        Raises:
            ArtifactDamaged: If it is other than copied.
            StoreUnavailable: If the store does not answer.
            OSError: If a disk is full or fails.
        """
        prefix = _prefix(job_id, fence)
        part = target.with_name(f"{PART}{uuid.uuid4().hex}")
        try:
            for name, (sha256, size) in self._index(prefix).items():
                place = part / name
                if not place.resolve().is_relative_to(part.resolve()):
                    raise ArtifactDamaged(f"the copied checkpoint names {name[:80]!r}, outside its folder")
                place.parent.mkdir(parents=True, exist_ok=True)
                self._store.fetch(f"{prefix}{sha256}", place, sha256=sha256, size_bytes=size)
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def clear(self, job_id: str) -> None:
        """Delete all copies of a job."""
        self._remove(f"{_ROOT}{job_id}/")

    def size(self, job_id: str) -> int:
        """Return the bytes of all copies of a job; ``StoreUnavailable`` if the store does not answer."""
        return sum(each.size_bytes for each in self._store.listing(f"{_ROOT}{job_id}/"))

    def jobs(self) -> set[str]:
        """Ids of the jobs that have copies."""
        return {job_id for each in self._store.listing(_ROOT) if is_id(job_id := each.key.split("/")[1])}

    def _digest(self, file: BufferedReader) -> str:
        status = os.fstat(file.fileno())
        place = (status.st_ino, status.st_mtime_ns, status.st_size)
        if place not in self._digests:
            self._digests[place] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._digests[place]

    def _put_index(self, prefix: str, index: dict[str, list[object]], folder: Path) -> None:
        text = json.dumps(index).encode()
        with written_beside(folder / _INDEX) as place:
            place.write_bytes(text)
            self._store.put(f"{prefix}{_INDEX}", place, sha256=hashlib.sha256(text).hexdigest(), size_bytes=len(text))

    def _index(self, prefix: str) -> dict[str, tuple[str, int]]:
        size = next((each.size_bytes for each in self._store.listing(prefix) if each.key == f"{prefix}{_INDEX}"), None)
        if size is None or size > _MAX_INDEX_BYTES:
            raise ArtifactDamaged("the copied checkpoint has no index")
        with self._store.open(f"{prefix}{_INDEX}", size) as file:
            text = file.read()
        try:
            return {str(name): (str(sha256), int(each)) for name, (sha256, each) in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ArtifactDamaged("the copied checkpoint's index is damaged") from error

    def _fences(self, job_id: str) -> list[int]:
        found = [each.key.split("/") for each in self._store.listing(f"{_ROOT}{job_id}/")]
        return [int(parts[2]) for parts in found if parts[-1] == _INDEX and parts[2].isdecimal()]

    def _remove(self, prefix: str) -> None:
        # the index first: what is left of a copy is none
        for each in sorted(self._store.listing(prefix), key=lambda each: not each.key.endswith(_INDEX)):
            self._store.delete(each.key)


def _prefix(job_id: str, fence: int) -> str:
    return f"{_ROOT}{job_id}/{int(fence)}/"


@contextlib.contextmanager
def _snapshot(folder: Path) -> Iterator[dict[str, Path]]:
    """Links to every complete file as of one moment: the child replaces the manifest and removes what it left."""
    place = folder.with_name(f"{PART}{uuid.uuid4().hex}")
    try:
        while True:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            begun = version_of(folder)
            with job_folders.within(folder):
                files = _linked(folder, place)
            if begun == version_of(folder):
                yield files
                return
    finally:
        shutil.rmtree(place, ignore_errors=True)


def version_of(folder: Path) -> tuple[tuple[int, int] | None, ...]:
    """Return the inode and time of each manifest in an attempt's folder, None of one that is not there."""
    found: list[tuple[int, int] | None] = []
    with job_folders.within(folder):
        for name in MANIFESTS:
            try:
                status = (folder / name).stat()
                found.append((status.st_ino, status.st_mtime_ns))
            except FileNotFoundError:
                found.append(None)
    return tuple(found)


def _linked(folder: Path, place: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    if not folder.is_dir():
        return files
    # the folder is the job's, which may put a link in the place of a folder or of a file at any moment: each is
    # reached from the descriptor of the folder above it, and what was linked is looked at afterwards
    for above, _, names, descriptor in os.fwalk(folder, follow_symlinks=False):
        for each in names:
            if each.startswith(PART):
                continue
            name = (Path(above) / each).relative_to(folder).as_posix()
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.link(each, target, src_dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(target.lstat().st_mode):
                    files[name] = target
    return dict(sorted(files.items()))
