"""Confinement of a child, set by its guardian between fork and exec, and never undone by the child.

::

    always              no core files, no_new_privs, at most so many open files, at most so large a file
    on x86-64, aarch64  the system calls that computing needs, and no others (``worker.process.system_calls``)
    with a user         that user and no capability, at most so many processes and threads
    with namespaces     what it sees of processes and files (``worker.process.namespaces``)
    of a service        at most so much on the disk (``worker.process.disk_monitor``), which is looked at while it runs

There is no limit on the address space: CUDA reserves far more of it than it uses. The number of processes is counted
by the kernel for each user, not for each child, so it is bounded only where the child has a user of its own.

An attempt is beyond its limit of the disk for one of four reasons::

    bytes   more than the operator allows an attempt                               (`DiskLimit.total_bytes`)
    room    a volume has less than a tenth left of what was free at the start, and
            the attempt has more of it than its part of the other nine tenths      (`DiskLimit.parts`)
    files   more files and folders than an attempt may have, or too many to count  (`DiskLimit.total_files`)
    hidden  a folder or process of it that cannot be looked into

Without a figure of the operator's an attempt is held to its part only when room is short: as long as all keep to their
parts it never is, and a job that needs more while no other misses it is left alone.

Standard library only: the guardian imports it.
"""

import contextlib
import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from worker.process.namespaces import Namespaces
from worker.process.system_calls import filter_program

ExcessKind = Literal["bytes", "room", "files", "hidden"]
_DEVICE_FILES = ("nvidia*", "nvidia-caps/*", "dri/*", "kfd")
_PR_SET_DUMPABLE = 4  # linux/prctl.h
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522


@dataclass(frozen=True, kw_only=True)
class DiskLimit:
    """The disk limit of one attempt."""

    folder: str
    """The job's folder: whatever its attempts write is below it."""
    total_bytes: int | None = None
    """The most bytes, in all places together; None: its part of what is free."""
    total_files: int = 2**17
    """The most files and folders."""
    parts: int = 1
    """Attempts that may write to the volume at a time."""
    floor_bytes: int = 0
    """Bytes of the folder's volume that belong to no attempt's part."""


@dataclass(frozen=True, kw_only=True)
class Excess:
    """The use of an attempt when it was found beyond its limit."""

    kind: ExcessKind
    found: int
    limit: int
    place: str
    """The folder of the volume, or what could not be looked into."""

    def as_bytes(self) -> bytes:
        """Return it for a pipe."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> "Excess":
        """Read what `as_bytes` returned."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """The limits of one child."""

    user: int | None = None
    """The user that it runs as, in the group of the same number; None: the guardian's."""
    files: int = 4096
    """Files that it may have open."""
    file_bytes: int = 2**40
    """Bytes of the largest file that it may write."""
    processes: int = 4096
    """Processes and threads of its user, where that is its own."""
    disk: DiskLimit | None = None
    """Limit of its use of the disk; None sets no limit."""
    namespaces: Namespaces | None = None
    """The part of the machine that it sees; None: all that its user may."""

    @property
    def apart(self) -> bool:
        """Whether it comes to no folder but those that it was given."""
        return self.user is not None or self.namespaces is not None

    def as_text(self) -> str:
        """Return the limits for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Confinement":
        """Read the limits that `as_text` returned."""
        values: dict[str, Any] = json.loads(text)
        if values["namespaces"] is not None:
            values["namespaces"] = Namespaces.from_values(values["namespaces"])
        if values["disk"] is not None:
            values["disk"] = DiskLimit(**values["disk"])
        return cls(**values)

    def popen_arguments(self) -> dict[str, Any]:
        """Return what `subprocess.Popen` needs to start a program that is held to these limits."""
        user: dict[str, Any] = {}
        if self.user is not None:
            # no group of the worker's, but those that open a GPU to their members
            user = {"user": self.user, "group": self.user, "extra_groups": _device_groups(), "umask": 0o007}
        return {"preexec_fn": self._prepare(), **user}

    def enter(self) -> None:
        """Hold this process, forked for that and of one thread, to these limits; ``OSError`` if the kernel refuses.

        With namespaces it returns in the process that becomes the job's, and in no other.
        """
        apply = self._prepare()
        if self.user is not None:
            arguments = self.popen_arguments()  # in the order in which `subprocess` sets them
            os.umask(arguments["umask"])
            os.setgroups(arguments["extra_groups"])
            os.setregid(self.user, self.user)
            os.setreuid(self.user, self.user)
        apply()
        # a fork keeps memory closed that was so before; the kernel opens that of a new program itself
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)

    def _prepare(self) -> Callable[[], None]:
        """Everything that can be made before the fork is made here; the guardian has no threads."""
        libc = ctypes.CDLL(None, use_errno=True)
        program = filter_program()
        limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: self.files, resource.RLIMIT_FSIZE: self.file_bytes}
        if self.user is not None:
            limits[resource.RLIMIT_NPROC] = self.processes

        def apply() -> None:
            if self.namespaces is not None:
                _enter(self.namespaces)
            for limit, value in limits.items():
                hard = resource.getrlimit(limit)[1]
                bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(limit, (bounded, bounded))
            if sys.platform != "linux":
                return
            if os.getuid() != 0:
                _drop_capabilities(libc)
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            if program is not None:
                # a kernel or sandbox without filters refuses; the probe of `worker.agent.isolation` tells so
                libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)

        return apply


def _enter(namespaces: Namespaces) -> None:
    try:
        namespaces.enter()
    except OSError as error:
        # `subprocess` would say no more than that something failed
        os.write(2, f"no namespaces for it: {error}\n".encode())
        raise


def _device_groups() -> list[int]:
    """The groups of this process that GPUs' device files belong to."""
    found = set()
    for pattern in _DEVICE_FILES:
        for path in Path("/dev").glob(pattern):
            with contextlib.suppress(OSError):
                found.add(path.stat().st_gid)
    return sorted((found & set(os.getgroups())) - {0, os.getegid()})


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Give up what the guardian was lent to start this process as another user."""
    with contextlib.suppress(AttributeError):
        libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
        if libc.capset(header, bytes(24)) != 0:
            raise OSError(ctypes.get_errno(), "capabilities could not be given up")
