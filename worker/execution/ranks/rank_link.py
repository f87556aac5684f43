"""A rank's end of its link to the launcher: a socket that carries frames up, and one byte down.

Rank 0 sends every frame, the others their last one alone, so that one writer reaches the parent. After its last frame
a rank waits for a byte, so that all ranks that meet the same fault can say so before the first to end has the others
ended.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys

from typing_extensions import override

from catalog.frames import Failed, Finished, Frame, Stopped
from worker.execution.frame_pipe import FramePipe
from worker.execution.ranks.rank_hub import ADDRESS, HELLO

_RELEASE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ASSIGNMENT_BYTES = 2**20


class RankPipe(FramePipe):
    """The frames of one rank, of which the launcher passes on those of rank 0."""

    def __init__(self, rank: int, link: socket.socket, answers: int | None) -> None:
        super().__init__(link.fileno(), answers if rank == 0 else None)
        self.rank = rank
        self._link = link
        link.sendall(HELLO.pack(rank, os.getpid()))

    @override
    def send(self, frame: Frame) -> None:
        # write one frame; of another rank than 0 only a last one
        last = isinstance(frame, (Finished, Failed, Stopped))
        if self.rank == 0 or last:
            super().send(frame)
        if last:
            self._await_release()

    def _await_release(self) -> None:
        self._link.settimeout(_RELEASE_SECONDS)
        with contextlib.suppress(OSError):
            self._link.recv(1)


def connect(answers: int | None) -> RankPipe | None:
    """Connect to the launcher that started this process."""
    address = os.environ.get(ADDRESS)
    if address is None:
        return None
    _die_with_launcher()
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(f"\0{address[1:]}" if address.startswith("@") else address)
    return RankPipe(int(os.environ["RANK"]), link, answers)


def read_assignment_text() -> bytes:
    """Return the text on standard input, which all ranks share: it is read from its beginning, without moving there."""
    text, offset = b"", 0
    while part := os.pread(0, _ASSIGNMENT_BYTES, offset):
        text += part
        offset += len(part)
    return text


def _die_with_launcher() -> None:
    """Have the kernel end this process when the launcher's first thread ends, which started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
