"""Namespaces of a job: what it sees of the machine's processes and files, where the kernel lets them be made.

::

    processes            its own; the first of them is ours, and hands signals in and exit codes out
    files                all may be read, none be written
    written              the job's own folders
    closed               empty, but for what the job was given in them
    /tmp and /var/tmp    a folder of its own
    /dev/shm, queues     its own, gone with it
    network              its own loopback, and nothing else

    guardian ─ a process that waits outside ─ process 1 ─ the command

They belong to a user namespace that knows the job's user and no other, so no right is needed to make them, and a
process in it has none over processes outside, not of the same user either.

Standard library only: the guardian imports it.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_NEW_SPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x08000000 | 0x40000000
"""CLONE_NEWUSER, …NEWNS, …NEWPID, …NEWIPC and …NEWNET of linux/sched.h."""
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXECUTION = 1, 2, 4, 8  # MS_… of linux/mount.h
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_MOUNT_SETATTR = 442  # the same on all machines
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTRIBUTES = struct.Struct("=QQQQ")  # struct mount_attr
_PR_SET_DUMPABLE = 4
_INTERNET, _DATAGRAMS = 2, 2  # AF_INET, SOCK_DGRAM
_SET_FLAGS, _UP = 0x8914, 1  # SIOCSIFFLAGS and IFF_UP of linux/sockios.h and linux/if.h
_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - they are what it is about
_SHARED_MEMORY = "/dev/shm"  # noqa: S108
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
HANDED_ON = {signal.SIGTERM, signal.SIGCHLD}


@dataclass(frozen=True, kw_only=True)
class Namespaces:
    """The part of the machine that one job's processes see. Paths lead through no links."""

    temporary: str
    """The folder that it finds at `/tmp` and `/var/tmp`, where these are closed."""
    closed: tuple[str, ...] = ()
    """Folders and files that are empty to it."""
    written: tuple[str, ...] = ()
    """Folders that it may write to, whatever they lie in."""
    read: tuple[str, ...] = ()
    """Folders that it may read, whatever they lie in; and not write, in a folder that it writes to either."""

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Namespaces":
        """Return namespaces from their fields, as JSON holds them: lists in place of tuples."""
        lists = {name: tuple(values[name]) for name in ("closed", "written", "read")}
        return cls(temporary=values["temporary"], **lists)

    def enter(self) -> None:
        """Make and enter the namespaces; return only in what becomes the command. ``OSError`` names a refused step."""
        system = _System()
        user, group = os.geteuid(), os.getegid()
        system.call("a new user's namespace", system.libc.unshare, _NEW_SPACES)
        # a process whose memory is closed does not own its files below /proc, and what it holds open is not counted;
        # the job comes to neither of ours, which keep rights that it loses
        system.libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
        _raise_loopback(system)
        self._mount(system)
        # the one who waits outside will find itself in no list of the new namespace
        held = [int(each.name) for each in Path("/proc/self/fd").iterdir()]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
        if first := os.fork():
            attend(first, held)
        system.mount("proc", "/proc", "proc", _NO_SUID | _NO_DEVICES | _NO_EXECUTION)
        if command := os.fork():
            attend(command, held)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _mount(self, system: "_System") -> None:
        home = os.open(self.temporary, _FOLDER)
        given = _opened((*self.read, *self.written))
        system.mount("none", "/", None, _RECURSIVE | _PRIVATE)
        everybodys = self._everybodys()
        for place in everybodys:
            system.mount(f"/proc/self/fd/{home}", place, None, _BIND)
        _bring_back(system, given, everybodys)
        # after that, since what was brought back may hold one of these
        for place in sorted(self.closed):
            if Path(place).is_dir():
                system.mount("tmpfs", place, "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755")
            elif os.path.lexists(place):
                system.mount("/dev/null", place, None, _BIND)
        written = {path: given[path] for path in self.written if path in given}
        for path in sorted(written):
            _bind_folder(system, written[path], path)
        inputs = {path: given[path] for path in self.read if path in given and path not in written}
        _bring_back(system, inputs, (*self.closed, *self.written))
        system.set_read_only("/", True)
        for path in (*written, *everybodys):
            system.set_read_only(path, False)
        if Path(_SHARED_MEMORY).is_dir():
            system.mount("tmpfs", _SHARED_MEMORY, "tmpfs", _NO_SUID | _NO_DEVICES, "mode=1777")
        _return_to_own_folder()
        for descriptor in (home, *given.values()):
            os.close(descriptor)

    def _everybodys(self) -> list[str]:
        """The folders for everybody's files, but where the job was given all that is in them."""
        places = [each for each in _TEMPORARY if Path(each).is_dir() and os.path.realpath(each) == each]
        return [each for each in places if each not in self.read and not any(_holds(read, each) for read in self.read)]


class _System:
    """Calls of the kernel that Python has no names for."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)

    def call(self, what: str, function: Callable[..., int], *arguments: Any) -> None:  # noqa: ANN401 - as ctypes takes
        if function(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    def mount(self, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        texts = [None if each is None else os.fsencode(each) for each in (source, target, kind, data)]
        call = (*texts[:3], ctypes.c_ulong(flags), texts[3])
        self.call(f"a mount at {target}", self.libc.mount, *call)

    def set_read_only(self, path: str, value: bool) -> None:
        """Let nothing be written to a mount and those in it, or let it to this one."""
        attributes = _ATTRIBUTES.pack(_READ_ONLY if value else 0, 0 if value else _READ_ONLY, 0, 0)
        flags = _AT_RECURSIVE if value else 0
        call = (_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, attributes, ctypes.c_size_t(len(attributes)))
        self.call(f"the rights of the mount at {path}", self.libc.syscall, *call)


def _raise_loopback(system: "_System") -> None:
    # importing `socket` takes longer than all of this
    any_socket = system.libc.socket(_INTERNET, _DATAGRAMS, 0)
    try:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("=16sH14x", b"lo", _UP))
    finally:
        os.close(any_socket)


def _opened(paths: Iterable[str]) -> dict[str, int]:
    """A descriptor for each folder that this user comes to: its path may be covered before it is used."""
    found = {}
    for path in paths:
        if path not in found:
            with contextlib.suppress(OSError):
                found[path] = os.open(path, _FOLDER)
    return found


def _holds(folder: str, path: str) -> bool:
    return path != folder and path.startswith(f"{folder.rstrip('/')}/")


def _bring_back(system: _System, given: Mapping[str, int], covered: Iterable[str]) -> None:
    """Let be seen again what the job was given in folders that are covered."""
    for path in sorted(given):
        if any(_holds(folder, path) for folder in covered):
            _bind_folder(system, given[path], path)


def _bind_folder(system: _System, descriptor: int, path: str) -> None:
    Path(path).mkdir(mode=0o755, parents=True, exist_ok=True)
    system.mount(f"/proc/self/fd/{descriptor}", path, None, _BIND | _RECURSIVE)


def _return_to_own_folder() -> None:
    """Come to the folder that this process is in by its path: through what covers it, not below it."""
    try:
        os.chdir(Path.cwd())
    except OSError:
        os.chdir("/")


def attend(child: int, held: Iterable[int]) -> NoReturn:
    """Hand SIGTERM on to a child, forked while `HANDED_ON` was blocked, reap what comes, and end as the child does.

    The descriptors ``held`` are closed meanwhile.
    """
    for each in held:
        with contextlib.suppress(OSError):
            os.close(each)
    while True:
        number = signal.sigwait(HANDED_ON)
        if number == signal.SIGTERM:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        elif (code := _reaped(child)) is not None:
            os._exit(code if code >= 0 else 128 - code)


def _reaped(child: int) -> int | None:
    """Reap all that has ended; the child's exit code if it was among that."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code
