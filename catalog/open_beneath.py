"""Open beneath a folder: no link leads out of it, also one that is put there during the call.

::

    openat2(RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS)    where the kernel has it
    openat(O_NOFOLLOW), component by component        where kernel or container answer ENOSYS or EPERM
"""

import ctypes
import errno
import os
import stat
from pathlib import Path

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
LED_ASTRAY = (errno.EXDEV, errno.ELOOP, errno.EAGAIN)
"""Error numbers of an open that follows no link, where a link is on the way."""
_OPENAT2 = 437  # the same on every architecture of Linux that torch runs on
_RESOLVE_BENEATH, _RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS = 0x08, 0x02, 0x04  # linux/openat2.h
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_NO_SUCH_CALL = (errno.ENOSYS, errno.EPERM, errno.EINVAL)


def open_beneath(root: Path, relative: Path) -> int:
    """Open what lies below a folder for reading, without following any link on the way.

    Args:
        root: The folder; links that lead to it are followed.
        relative: The path below it, of plain segments.

    Returns:
        The descriptor, of whatever kind of file it is; a pipe does not hang.

    Raises:
        OSError: If there is no such file; one of `LED_ASTRAY` where a link stands on the way.
    """
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
    how = _OpenHow(flags=READ, resolve=_RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)
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
            below = os.open(part, (READ if last else _FOLDER) | os.O_NOFOLLOW, dir_fd=current)
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
