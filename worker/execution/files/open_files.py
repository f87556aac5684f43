"""Files that a job names, opened and held: what is read is what was checked, and lies where it may.

A link may lead anywhere, and a name may come to mean another file between its check and its use. So a path is first
resolved to one without links, which must lie in the allowed folder; then that is opened from the folder's own
descriptor, and no link is followed any more::

    openat2(RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS)    where the kernel has it
    openat(O_NOFOLLOW), component by component        where kernel or container answer ENOSYS or EPERM

Links that stay inside the folder are resolved beforehand, so that they work. Only regular files of a disk are opened:
no pipe, no device, nothing of /proc or /sys. Libraries get a name of the open descriptor, not of the file.
"""

import contextlib
import ctypes
import errno
import os
import stat
import weakref
from pathlib import Path
from typing import BinaryIO

from worker.execution.refusal import Refusal, storable_text

_OPENAT2 = 437  # the same on every architecture of Linux that torch runs on
_RESOLVE_BENEATH, _RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS = 0x08, 0x02, 0x04  # linux/openat2.h
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_NO_SUCH_CALL = (errno.ENOSYS, errno.EPERM, errno.EINVAL)
_LED_ASTRAY = (errno.EXDEV, errno.ELOOP, errno.EAGAIN)
"""What an open that follows no link says where a link stands: it was put there after the path was resolved."""
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_PSEUDO_FOLDERS = ("/proc", "/sys")
_MOST_LISTED = 100_000
"""Names below a folder that are looked at."""


class OpenFile(os.PathLike[str]):
    """A regular file that is open for reading; closed when nobody holds this object any more."""

    def __init__(self, name: str, descriptor: int) -> None:
        """Take over a descriptor.

        Args:
            name: The file's name for messages.
            descriptor: An open descriptor of a regular file.
        """
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
        """Open the file from its beginning.

        Args:
            mode: `rb`; it is read and never written.

        Returns:
            A binary stream of its own position.
        """
        del mode
        return Path(self.__fspath__()).open("rb")

    def read_bytes(self) -> bytes:
        """Return the whole content; look at the size first."""
        with self.open() as file:
            return file.read()

    @property
    def suffix(self) -> str:
        """The name's suffix, with its dot."""
        return Path(self.name).suffix


class OpenFolder:
    """A folder whose files are opened beneath an allowed one."""

    def __init__(self, path: Path, root: Path | None, pointer: str) -> None:
        """Name the folder; nothing is opened yet.

        Args:
            path: The folder, without links.
            root: The allowed folder that every file of it must lie in, without links; None allows any.
            pointer: The field of the document that named it, for messages.
        """
        self.path = path
        self._root = root
        self._pointer = pointer

    @classmethod
    def by_itself(cls, path: Path, pointer: str) -> "OpenFolder":
        """Return a folder whose files must lie in it.

        Args:
            path: The folder.
            pointer: The field of the document that stands for it, for messages.
        """
        real = Path(os.path.realpath(path))
        return cls(real, real, pointer)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return storable_text(self.path.name)

    def folder(self, name: str) -> "OpenFolder":
        """Return a folder in this one, which need not exist.

        Args:
            name: Its path below this folder.
        """
        return OpenFolder(self.path / name, self._root, self._pointer)

    def file(self, name: str) -> OpenFile | None:
        """Open a file of the folder.

        Args:
            name: Its path below the folder.

        Returns:
            The file; None if there is none, or a folder of that name.

        Raises:
            Refusal: If it is a link out of the allowed folder, or no regular file.
        """
        found = open_allowed(self.path / name, self._root, name, self._pointer)
        return found if isinstance(found, OpenFile) else None

    def names(self) -> list[str]:
        """Return the names in the folder, sorted; none where it does not exist."""
        try:
            return sorted(each.name for each in self.path.iterdir())
        except OSError:
            return []

    def walk(self) -> list[str]:
        """Return the names of all files below the folder, sorted; links to folders are not followed.

        Raises:
            Refusal: If there are more than 100,000.
        """
        found: list[str] = []
        for folder, _, files in os.walk(self.path):
            found += (str((Path(folder) / name).relative_to(self.path)) for name in files)
            if len(found) > _MOST_LISTED:
                raise _refused(self.name, f"holds more than {_MOST_LISTED:,} files", self._pointer)
        return sorted(found)


ReadableFile = Path | OpenFile
"""A file of our own by its path, or one that a job named, open."""


def open_allowed(path: Path, root: Path | None, shown: str, pointer: str) -> OpenFile | OpenFolder | None:
    """Open a path that a job may read.

    Args:
        path: The path; links in it are followed as far as they stay in ``root``.
        root: The allowed folder, without links; None allows any.
        shown: The name for messages.
        pointer: The field of the document.

    Returns:
        The file or folder; None if there is none.

    Raises:
        Refusal: If it lies outside ``root``, or is neither a folder nor a regular file of a disk.
    """
    real = real_path(path)
    if real is None:
        return None
    if root is not None and not real.is_relative_to(root):
        raise outside(shown, pointer)
    try:
        descriptor = os.open(real, _READ) if root is None else _open_beneath(root, real.relative_to(root))
    except OSError as error:
        if error.errno in _LED_ASTRAY:
            raise outside(shown, pointer) from error
        if error.errno in _ABSENT:
            return None
        if error.errno in (errno.EACCES, errno.ENXIO, errno.ENODEV):
            raise _refused(shown, f"cannot be opened ({error.strerror})", pointer) from error
        raise
    try:
        return _taken(descriptor, real, root, shown, pointer)
    except BaseException:
        os.close(descriptor)
        raise


def real_path(path: Path) -> Path | None:
    """Return a path without links.

    Args:
        path: Any path, with `~` for the home.

    Returns:
        The absolute path, which need not exist; None where no file can have that name.
    """
    try:
        return Path(os.path.realpath(path.expanduser()))
    except (OSError, ValueError, RuntimeError):
        # half of a surrogate pair, a NUL, a name of 5,000 letters, a home that nobody has
        return None


def _taken(descriptor: int, real: Path, root: Path | None, shown: str, pointer: str) -> OpenFile | OpenFolder:
    facts = os.fstat(descriptor)
    if facts.st_dev in _pseudo_devices():
        raise _refused(shown, "is no file of a disk, but of the system", pointer)
    if stat.S_ISDIR(facts.st_mode):
        os.close(descriptor)
        return OpenFolder(real, root, pointer)
    if not stat.S_ISREG(facts.st_mode):
        raise _refused(shown, "is neither a file nor a folder", pointer)
    return OpenFile(Path(shown).name, descriptor)


def _pseudo_devices() -> set[int]:
    """Device numbers of the file systems that show the state of the kernel and of other processes."""
    found = set()
    for folder in _PSEUDO_FOLDERS:
        with contextlib.suppress(OSError):
            found.add(Path(folder).stat().st_dev)
    return found - {Path("/").stat().st_dev}


def _open_beneath(root: Path, relative: Path) -> int:
    """Open what lies below a folder, without following any link."""
    folder = os.open(root, _FOLDER)
    try:
        descriptor = _openat2(folder, relative)
        return _open_by_components(folder, relative) if descriptor is None else descriptor
    finally:
        os.close(folder)


class _OpenHow(ctypes.Structure):
    """``struct open_how`` of linux/openat2.h."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _openat2(folder: int, relative: Path) -> int | None:
    """Open by one call of the kernel; None where there is no such call, or a container forbids it."""
    syscall = getattr(ctypes.CDLL(None, use_errno=True), "syscall", None)
    if syscall is None or os.uname().sysname != "Linux":
        return None
    how = _OpenHow(flags=_READ, resolve=_RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)
    arguments = (ctypes.c_int(folder), ctypes.c_char_p(os.fsencode(relative)), ctypes.byref(how))
    syscall.restype = ctypes.c_long
    descriptor = int(syscall(ctypes.c_long(_OPENAT2), *arguments, ctypes.c_size_t(ctypes.sizeof(how))))
    if descriptor >= 0:
        return descriptor
    number = ctypes.get_errno()
    if number in _NO_SUCH_CALL:
        return None
    raise OSError(number, os.strerror(number), str(relative))


def _open_by_components(folder: int, relative: Path) -> int:
    """Open one component after another, each from the descriptor of the one before."""
    current = os.dup(folder)
    for place, part in enumerate(relative.parts):
        last = place == len(relative.parts) - 1
        try:
            below = os.open(part, (_READ if last else _FOLDER) | os.O_NOFOLLOW, dir_fd=current)
        except NotADirectoryError as error:
            # with O_DIRECTORY a link is not a folder either
            raise OSError(errno.ELOOP if _is_link(part, current) else error.errno, error.strerror) from error
        finally:
            os.close(current)
        current = below
    return current


def _is_link(part: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def outside(shown: str | None, pointer: str) -> Refusal:
    """Return the refusal of a path that no allowed folder holds.

    Args:
        shown: The file's name for the message; None for the path that the document names itself.
        pointer: The field of the document.

    Returns:
        The error to raise.
    """
    # the same sentence whether it exists or not: a caller learns nothing about the machine
    what = "lies outside the folders that this service's operator lists"
    return _refused(shown or "", what, pointer, "not_allowed")


def _refused(shown: str, what: str, pointer: str, code: str = "not_found") -> Refusal:
    return Refusal(f"{storable_text(shown)} {what}".lstrip(), pointer=pointer, code=code)
