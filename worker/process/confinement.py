"""What a child is held to, set by its guardian between fork and exec, and never undone by the child.

::

    always              no core files, no_new_privs, at most so many open files, at most so large a file
    on x86-64, aarch64  a system call filter: no tracing of others, no kernel keys, no namespaces, mounts or modules
    with a user         that user and no capability, at most so many processes and threads

There is no limit on the address space: CUDA reserves far more of it than it uses. The number of processes is counted
by the kernel for each user, not for each child, so it is bounded only where the child has a user of its own.

Standard library only: the guardian imports it.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522

_EPERM = 1
_RETURN_ALLOW = 0x7FFF0000
_RETURN_ERRNO = 0x00050000
_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4  # of struct seccomp_data
_X32_BIT = 0x40000000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_…, in the order of the columns below
_DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "unshare": (272, 97),
    "setns": (308, 268),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
}


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """The limits of one child."""

    user: int | None = None
    """The user that it runs as; None: the guardian's."""
    files: int = 4096
    """Files that it may have open."""
    file_bytes: int = 2**40
    """Bytes of the largest file that it may write."""
    processes: int = 4096
    """Processes and threads of its user, where that is its own."""

    def as_text(self) -> str:
        """Return the limits for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Confinement":
        """Read the limits from a command line.

        Args:
            text: What `as_text` returned.

        Returns:
            The limits.
        """
        return cls(**json.loads(text))

    def popen_arguments(self) -> dict[str, Any]:
        """Return what `subprocess.Popen` needs to start a program that is held to these limits."""
        user: dict[str, Any] = {} if self.user is None else {"user": self.user, "extra_groups": [], "umask": 0o007}
        return {"preexec_fn": self._prepare(), **user}

    def _prepare(self) -> Callable[[], None]:
        """Everything that can be made before the fork is made here; the guardian has no threads."""
        libc = ctypes.CDLL(None, use_errno=True)
        program = _filter_program()
        limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: self.files, resource.RLIMIT_FSIZE: self.file_bytes}
        if self.user is not None:
            limits[resource.RLIMIT_NPROC] = self.processes

        def apply() -> None:
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


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Give up what the guardian was lent to start this process as another user."""
    with contextlib.suppress(AttributeError):
        libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
        if libc.capset(header, bytes(24)) != 0:
            raise OSError(ctypes.get_errno(), "capabilities could not be given up")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _filter_program() -> _Program | None:
    """The filter as classic BPF, or None on a machine for which no numbers are listed.

    A call of another architecture, or of the x32 numbering, would evade the list: it is denied too.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCHITECTURES:
        return None
    column = list(_ARCHITECTURES).index(machine)
    denied = [numbers[column] for numbers in _DENIED.values()]
    count = len(denied)
    instructions = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_EQUAL, 0, count + 3, _ARCHITECTURES[machine]),
        (_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_AT_LEAST, count + 1, 0, _X32_BIT),
        *((_JUMP_EQUAL, count - place, 0, number) for place, number in enumerate(denied)),
        (_RETURN, 0, 0, _RETURN_ALLOW),
        (_RETURN, 0, 0, _RETURN_ERRNO | _EPERM),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    return _Program(len(instructions), code)
