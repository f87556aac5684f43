"""Files that a job names, opened and held: what is read is what was checked, and lies where it may.

A link may lead anywhere, and a name may come to mean another file between its check and its use. So a path is first
resolved to one without links, which must lie in the allowed folder; then that is opened from the folder's own
descriptor, and no link is followed any more (``catalog.open_beneath``).

Links that stay inside the folder are resolved beforehand, so that they work. Only regular files of a disk are opened:
no pipe, no device, nothing of /proc or /sys. Libraries get a name of the open descriptor, not of the file.
"""

import contextlib
import errno
import os
import stat
import weakref
from pathlib import Path
from typing import BinaryIO

from catalog.open_beneath import LED_ASTRAY, READ, open_beneath
from worker.execution.refusal import Refusal, storable_text

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_PSEUDO_FOLDERS = ("/proc", "/sys")
_MOST_LISTED = 100_000
"""Names below a folder that are looked at."""


class OpenFile(os.PathLike[str]):
    """A regular file that is open for reading; closed when this object is no longer held."""

    def __init__(self, name: str, descriptor: int) -> None:
        """Take over a descriptor."""
        self.name = storable_text(name)
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, os.close, descriptor)

    def __fspath__(self) -> str:
        """Return a path by which a library opens this very file, whatever its name means by then."""
        folder = "/proc/self/fd" if Path("/proc/self/fd").is_dir() else "/dev/fd"
        return f"{folder}/{self._descriptor}"

    def stat(self) -> os.stat_result:
        """Return the size and the other facts of the file."""
        return os.fstat(self._descriptor)

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the file from its beginning."""
        del mode
        return Path(self.__fspath__()).open("rb")

    def read_bytes(self) -> bytes:
        """Return the whole content; look at the size first."""
        with self.open() as file:
            return file.read()

    def read_at(self, begin: int, count: int) -> bytearray:
        """Read bytes from a place, fewer where the file ends; none stay in memory, as those of a mapped file would."""
        found, read = bytearray(count), 0
        with memoryview(found) as view:
            while read < count and (part := os.preadv(self._descriptor, [view[read:]], begin + read)):
                read += part
        del found[read:]
        return found

    @property
    def suffix(self) -> str:
        """The name's suffix, with its dot, in lower case."""
        return Path(self.name).suffix.lower()


class OpenFolder:
    """A folder whose files are opened beneath an allowed one."""

    def __init__(self, path: Path, root: Path | None, pointer: str) -> None:
        """Name the folder; nothing is opened yet."""
        self.path = path
        self._root = root
        self._pointer = pointer

    @classmethod
    def by_itself(cls, path: Path, pointer: str) -> "OpenFolder":
        """Return a folder whose files must lie in it."""
        real = Path(os.path.realpath(path))
        return cls(real, real, pointer)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return storable_text(self.path.name)

    def folder(self, name: str) -> "OpenFolder":
        """Return a folder in this one, which need not exist."""
        return OpenFolder(self.path / name, self._root, self._pointer)

    def file(self, name: str) -> OpenFile | None:
        """Open a file of the folder."""
        found = open_allowed(self.path / name, self._root, name, self._pointer)
        return found if isinstance(found, OpenFile) else None

    def names(self) -> list[str]:
        """Return the names in the folder, sorted; none where it does not exist, or a link leads out of the allowed."""
        real = real_path(self.path)
        if real is None or (self._root is not None and not real.is_relative_to(self._root)):
            return []
        try:
            return sorted(each.name for each in real.iterdir())
        except OSError:
            return []

    def walk(self) -> list[str]:
        """Return the names of all files below the folder, sorted; links to folders are not followed."""
        found: list[str] = []
        for folder, _, files in os.walk(self.path):
            found += (str((Path(folder) / name).relative_to(self.path)) for name in files)
            if len(found) > _MOST_LISTED:
                raise _refused(
                    self.name, f"holds more than {_MOST_LISTED:,} files; name a folder with fewer", self._pointer
                )
        return sorted(found)


ReadableFile = Path | OpenFile
"""A file of our own by its path, or one that a job named, open."""


def open_allowed(path: Path, root: Path | None, shown: str, pointer: str) -> OpenFile | OpenFolder | None:
    """Open a path that a job may read."""
    real = real_path(path)
    if real is None:
        return None
    if root is not None and not real.is_relative_to(root):
        raise outside(shown, pointer)
    try:
        descriptor = os.open(real, READ) if root is None else open_beneath(root, real.relative_to(root))
    except OSError as error:
        if error.errno in LED_ASTRAY:
            if _is_loop(real):
                raise _refused(shown, "is a link that leads back to itself; name the file itself", pointer) from error
            raise outside(shown, pointer) from error
        if error.errno in _ABSENT:
            return None
        if error.errno in (errno.EACCES, errno.ENXIO, errno.ENODEV):
            what = f"cannot be opened ({error.strerror}); name a file or folder that may be read"
            raise _refused(shown, what, pointer) from error
        raise
    try:
        return _taken(descriptor, real, root, shown, pointer)
    except BaseException:
        os.close(descriptor)
        raise


def real_path(path: Path) -> Path | None:
    """Return a path without links."""
    try:
        return Path(os.path.realpath(path.expanduser()))
    except (OSError, ValueError, RuntimeError):
        # half of a surrogate pair, a NUL, a name of 5,000 letters, a home that no user has
        return None


def _is_loop(real: Path) -> bool:
    """Return whether a path without links that can be followed is a link still."""
    try:
        real.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _taken(descriptor: int, real: Path, root: Path | None, shown: str, pointer: str) -> OpenFile | OpenFolder:
    facts = os.fstat(descriptor)
    if facts.st_dev in _pseudo_devices():
        raise _refused(shown, "is not a file of a disk, but of the system; name a file or folder of a disk", pointer)
    if stat.S_ISDIR(facts.st_mode):
        os.close(descriptor)
        return OpenFolder(real, root, pointer)
    if not stat.S_ISREG(facts.st_mode):
        raise _refused(shown, "is neither a file nor a folder; name one of them", pointer)
    return OpenFile(Path(shown).name, descriptor)


def _pseudo_devices() -> set[int]:
    """Device numbers of the file systems that show the state of the kernel and of other processes."""
    found = set()
    for folder in _PSEUDO_FOLDERS:
        with contextlib.suppress(OSError):
            found.add(Path(folder).stat().st_dev)
    return found - {Path("/").stat().st_dev}


def outside(shown: str | None, pointer: str) -> Refusal:
    """Return the refusal of a path that no allowed folder holds."""
    # the same sentence whether it exists or not: a caller learns nothing about the machine
    what = "lies outside the folders that this service's operator lists"
    return _refused(shown or "", what, pointer, "not_allowed")


def _refused(shown: str, what: str, pointer: str, code: str = "not_found") -> Refusal:
    return Refusal(f"{storable_text(shown)} {what}".lstrip(), pointer=pointer, code=code)
