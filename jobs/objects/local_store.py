"""The local object store, a folder: files are copied under a temporary name, verified, synced, renamed.

An object is a copy that no other has open, since the writer of the source may still write to it, or hold a second
name of it. The file system makes the copy where it can share blocks between files. A lock on the folder, which the
kernel takes back from a process that is gone, keeps the removal of an old object from taking the new one that just
replaced it.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from catalog.open_beneath import READ
from jobs.errors import ArtifactDamaged
from jobs.objects.object_store import Source, StoredObject, written_beside

CHUNK_BYTES = 2**20
_MODE = 0o444
LOCKS = ".objects"
"""Folder of the lock on the objects; it is closed to jobs, which could hold the lock for ever."""
_COPY_BYTES = 2**30
_NO_COPIES = frozenset({errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM})
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})


class LocalObjects:
    """The objects below one folder."""

    def __init__(self, root: Path) -> None:
        """Set up the store."""
        self.root = root.absolute()

    def put(self, key: str, source: Source, *, sha256: str, size_bytes: int) -> None:
        """Copy the file into place (`ObjectStore.put`)."""
        target = self._path(key)
        _make_folder(target.parent)
        with written_beside(target) as part:
            called = Path(source.name).name
            with open_plain(source, size_bytes, called=called) as file:
                _copy(file, part)
            with open_plain(part, size_bytes, called=called) as file:
                require_digest(file, sha256, called=called)
                # the holder of a second name of it reads it, and it is no longer written to
                os.fchmod(file.fileno(), _MODE)
                os.fsync(file.fileno())
            with self._locked(fcntl.LOCK_SH):
                # its age begins now: it is not removed before a row names it
                os.utime(part)
                part.replace(target)
        _sync_folder(target.parent)

    def has(self, key: str, size_bytes: int) -> bool:
        """Open the file for a moment, by the same rules (`ObjectStore.has`)."""
        try:
            self.open(key, size_bytes).close()
        except ArtifactDamaged:
            return False
        return True

    def open(self, key: str, size_bytes: int, first: int = 0) -> BinaryIO:
        """Open the file, which stays readable whatever happens to its name (`ObjectStore.open`)."""
        path = self._path(key)
        # links were not written by a store, and could lead out of its folder
        if path.resolve() != self.root.resolve() / key:
            raise ArtifactDamaged(f"artifact {key} is reached through a link; only plain files are artifacts")
        file = open_plain(path, size_bytes, called=key)
        file.seek(first)
        return file

    def fetch(self, key: str, target: Path, *, sha256: str, size_bytes: int) -> None:
        """Link the file to another path of the same file system, or copy it (`ObjectStore.fetch`)."""
        with self.open(key, size_bytes) as file:
            status = os.fstat(file.fileno())
        with written_beside(target) as part:
            # objects of earlier versions are second names of what a job has written, and may write to
            _take(self._path(key), part, linked=status.st_uid == os.geteuid() and not status.st_mode & 0o022)
            with open_plain(part, size_bytes, called=key) as file:
                require_digest(file, sha256, called=key)
            part.replace(target)

    def listing(self, prefix: str) -> Iterator[StoredObject]:
        """List all files, also those under temporary names: being written, or left by a killed process."""
        for folder, _, names in os.walk(self.root / prefix):
            for name in names:
                path = Path(folder) / name
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    yield StoredObject(
                        key=path.relative_to(self.root).as_posix(),
                        size_bytes=status.st_size,
                        modified_at=status.st_mtime,
                    )

    def delete(self, key: str, *, older_than: float | None = None) -> bool:
        """Unlink the file under a lock, so that no new object takes its place after the check of its age."""
        path = self._path(key)
        try:
            with self._locked(fcntl.LOCK_EX):
                if older_than is not None and path.lstat().st_mtime >= older_than:
                    return False
                path.unlink()
        except FileNotFoundError:
            return False
        return True

    def now(self) -> float:
        """The file system's clock, which is the file server's where there is one."""
        with self._lock_file() as descriptor:
            os.utime(descriptor)
            return os.fstat(descriptor).st_mtime

    def signed_url(self, key: str, seconds: int, answers: dict[str, str]) -> None:
        """Return None, since a folder has no addresses."""

    def _path(self, key: str) -> Path:
        if not key or any(part in ("", ".", "..") for part in key.split("/")) or "\0" in key:
            raise ArtifactDamaged(f"an object's key {key[:80]!r} is not made of plain path segments")
        return self.root / key

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[int]:
        place = self.root / LOCKS
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        with self._lock_file() as descriptor:
            # a file system without locks: what is left is the age, looked at just before
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, how)
            yield


def open_plain(source: Source, size_bytes: int, *, called: str) -> BinaryIO:
    """Open a plain file of the declared size; neither links nor pipes are followed."""
    try:
        # a pipe would hang
        descriptor = os.open(source, READ | os.O_NOFOLLOW) if isinstance(source, Path) else os.dup(source.fileno())
    except OSError as error:
        raise ArtifactDamaged(
            f"artifact {called} cannot be opened ({error.strerror}); was the folder moved?"
        ) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
        os.close(descriptor)
        raise ArtifactDamaged(
            f"artifact {called} has {status.st_size:,} bytes, {size_bytes:,} were declared; it is cut off or replaced"
        )
    file = os.fdopen(descriptor, "rb")
    file.seek(0)  # an open one may have been read
    return file


def require_digest(file: BinaryIO, sha256: str, *, called: str) -> None:
    """Read a file to its end, and raise ``ArtifactDamaged``, with the name it is called, if its digest is another."""
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise ArtifactDamaged(f"artifact {called} has another SHA-256 than declared: its bytes have changed")


def _take(source: Path, part: Path, *, linked: bool) -> None:
    """Link an object, or copy it where another file system asks for that, or it could be changed by the link."""
    if not linked:
        shutil.copyfile(source, part, follow_symlinks=False)
        return
    try:
        os.link(source, part, follow_symlinks=False)
    except FileNotFoundError as error:
        raise ArtifactDamaged(f"artifact {source.name} cannot be opened: there is no such file") from error
    except OSError as error:
        if error.errno not in _NO_LINKS or not stat.S_ISREG(source.lstat().st_mode):
            raise
        shutil.copyfile(source, part, follow_symlinks=False)


def _copy(file: BinaryIO, part: Path) -> None:
    """Copy an open file from its beginning to a new one, which this process's user alone may write."""
    with part.open("xb") as copy:
        try:
            while os.copy_file_range(file.fileno(), copy.fileno(), _COPY_BYTES):
                pass
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_COPIES:
                raise
            shutil.copyfileobj(file, copy, CHUNK_BYTES)


def _make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, each synced to disk before it is used."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
