"""The rank hub, the launcher's end of the links: it passes the frames of rank 0 on, and keeps the last one of each.

It also bounds the time that a failure takes. torch's launcher asks the other ranks to end and waits for them, and a
rank that waits on the device for one that is gone hears nothing. So some seconds after the first rank has ended
badly the hub kills what is left.
"""

import contextlib
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from catalog.frames import Failed, Finished, Frame, Stopped, decode
from worker.process.crash import MEMORY_REMEDY, OOM, RANK_LOST, ending, failure_frame
from worker.process.process_group import began

_REMEDY = "; SIGKILL is most often the machine running out of memory: lower `collection.batch_size` or `memory.host`"
_OF_ANOTHER = ("rank_failed", "rank_timed_out")
ADDRESS = "KRONOSCOPE_RANK_LINK"
"""Environment variable with the address of the hub; `@` stands for the abstract namespace."""
HELLO = struct.Struct("=ii")
"""A rank's first message: its number and its process."""
_LAST = (Finished, Failed, Stopped)
_LOOK_SECONDS = 0.1
_TOGETHER_SECONDS = 1.0
"""How long a rank that failed waits for others that meet the same fault."""
_GRACE_SECONDS = 3.0
"""From the first bad end to the kill of the others: they see it within a second."""
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """The end of one rank."""

    rank: int
    last: Frame | None
    """Its last frame; None where it sent none."""
    code: int | None
    """Its exit code, 128 + n for signal n; None where it was not taken."""
    at: float
    """The moment of its last frame, or of its end without one; in seconds of one clock."""
    killed: bool = False
    """Whether the launcher ended it, since another rank had failed."""


def last_frame(ends: Sequence[RankEnd], *, stopped: bool, exhausted: bool = False) -> Finished | Failed | Stopped:
    """Return the frame that ends the job, from each rank's own and from how it ended.

    ::

        all finished                        -> finished, as rank 0 said it
        asked to stop, and none failed first -> stopped
        else the first that ended badly     -> failed: with its number, and its own message where it had one

    A rank that ended without a last frame (killed, or crashed in native code) counts from the moment it ended; the
    errors of the others, which lost it, come later. What a rank says of another's failure (`rank_failed`,
    `rank_timed_out`) is believed only where no rank failed by itself.
    """
    first = ends[0].last
    if isinstance(first, Finished) and all(isinstance(each.last, Finished) for each in ends):
        return first
    failed = [each for each in ends if isinstance(each.last, Failed)]
    by_itself = [each for each in failed if isinstance(each.last, Failed) and each.last.code not in _OF_ANOTHER]
    # one that was asked to stop before it could listen has ended by the signal
    died = [] if stopped else [each for each in ends if each.last is None and not each.killed]
    own = sorted([*by_itself, *died], key=lambda each: each.at)
    if stopped and not own:
        return Stopped()
    if own:
        return _named(own[0], ends, exhausted)
    if failed:
        return _named(min(failed, key=lambda each: each.at), ends, exhausted)
    if any(isinstance(each.last, Stopped) for each in ends):
        return Stopped()
    return _named(min(ends, key=lambda each: each.at), ends, exhausted)


def _named(end: RankEnd, ends: Sequence[RankEnd], exhausted: bool) -> Failed:
    ranks = len(ends)
    if not isinstance(end.last, Failed):
        killed = end.code == 128 + signal.SIGKILL
        how = "" if end.code is None else f" ({ending(end.code)})"
        message = (
            f"rank {end.rank} of {ranks} ended without a word{how}, and the attempt with it{_REMEDY if killed else ''}"
        )
        if killed and exhausted:
            place = f"rank {end.rank} of {ranks} for want of memory, and the attempt ended with it"
            message = f"the kernel killed {place}; {MEMORY_REMEDY}"
        code, pointer = (OOM, "/memory/host") if killed and exhausted else (RANK_LOST, None)
        return failure_frame("transient", code, message, pointer, f"rank {end.rank} of {ranks}{how}")
    same = [each for each in ends if isinstance(each.last, Failed) and each.last.message == end.last.message]
    if len(same) == ranks or end.last.code in _OF_ANOTHER:
        return end.last  # whatever is wrong is wrong on every rank, or it names the rank itself
    return replace(end.last, message=f"rank {end.rank} of {ranks}: {end.last.message}")


class _Rank:
    """One rank as the hub knows it."""

    def __init__(self, number: int, pid: int, link: socket.socket | None = None) -> None:
        self.number = number
        self.pid = pid
        self.began = began(pid)
        self.link = link
        self.text = bytearray()
        self.last: Frame | None = None
        self.ended_at: float | None = None
        self.killed = False
        self.released = False

    def gone(self) -> bool:
        """Whether the process has ended, reaped or not."""
        if began(self.pid) != self.began or self.began is None:
            return True
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True


class RankHub:
    """Listens to the ranks in a thread of its own, from its making until `close`."""

    def __init__(self, ranks: int, frames: int) -> None:
        """Begin to listen."""
        self._size = ranks
        self._frames = frames
        self._ranks: dict[int, _Rank] = {}
        self._failed_at: float | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        name = f"kronoscope-ranks-{secrets.token_hex(16)}"
        if sys.platform == "linux":
            self._listener.bind(f"\0{name}")
            self.address = f"@{name}"
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
            self.address = str(Path(self._folder.name) / "link")
            self._listener.bind(self.address)
        self._listener.listen(ranks)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="rank-hub", daemon=True)
        self._thread.start()

    def close(self, codes: dict[int, int]) -> list[RankEnd]:
        """Read what is left, and return how each rank ended; to be called after all have."""
        self._closing.set()
        self._thread.join()
        self._selector.close()
        self._listener.close()
        if self._folder is not None:
            self._folder.cleanup()
        now = time.monotonic()
        ends = []
        for number in range(self._size):
            rank = self._ranks.get(number)
            code = codes.get(number)
            ends.append(
                RankEnd(
                    rank=number,
                    last=None if rank is None else rank.last,
                    code=None if code is None else code if code >= 0 else 128 - code,
                    at=now if rank is None or rank.ended_at is None else rank.ended_at,
                    killed=rank is not None and rank.killed,
                )
            )
        return ends

    def _listen(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(_LOOK_SECONDS):
                self._accept() if key.data is None else self._read(key.data)
            self._find_processes()
            self._look_after()
        for rank in list(self._ranks.values()):
            self._drain(rank)

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        hello = b""
        link.settimeout(1.0)
        with contextlib.suppress(OSError):
            while len(hello) < HELLO.size and (part := link.recv(HELLO.size - len(hello))):
                hello += part
        if len(hello) < HELLO.size or not _of_this_user(link):
            link.close()
            return
        number, pid = HELLO.unpack(hello)
        if not 0 <= number < self._size or (number in self._ranks and self._ranks[number].link is not None):
            link.close()
            return
        rank = self._ranks.setdefault(number, _Rank(number, pid))
        rank.link = link
        link.setblocking(False)
        self._selector.register(link, selectors.EVENT_READ, rank)

    def _find_processes(self) -> None:
        """Ranks that have not spoken yet: one that dies before it does must be noticed too."""
        if len(self._ranks) == self._size:
            return
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ValueError, KeyError):
                number = int(child.environ()["RANK"])
                if number not in self._ranks and ADDRESS in child.environ():
                    self._ranks[number] = _Rank(number, child.pid)

    def _read(self, rank: _Rank) -> bool:
        """Take what has come; False at the end."""
        if rank.link is None:
            return False
        try:
            part = rank.link.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        if not part:
            self._hang_up(rank)
            return False
        rank.text += part
        *lines, rest = rank.text.split(b"\n")
        rank.text = bytearray(rest)
        for line in lines:
            self._take(rank, bytes(line) + b"\n")
        return True

    def _take(self, rank: _Rank, line: bytes) -> None:
        try:
            frame: Frame | None = decode(line)
        except (ValueError, RecursionError, AttributeError):
            frame = None  # for the parent to judge, as it does of a single process
        if isinstance(frame, _LAST):
            rank.last, rank.ended_at = frame, time.monotonic()
            if isinstance(frame, Finished):
                self._release(rank)
            return
        if rank.number == 0:
            self._pass_on(line)

    def _pass_on(self, line: bytes) -> None:
        left = memoryview(line)
        with contextlib.suppress(BrokenPipeError):  # the reader is gone: the guardian is about to end this process
            while left:
                left = left[os.write(self._frames, left) :]

    def _hang_up(self, rank: _Rank) -> None:
        if rank.link is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(rank.link)
            rank.link.close()
            rank.link = None
        if rank.ended_at is None:
            rank.ended_at = time.monotonic()

    def _drain(self, rank: _Rank) -> None:
        while self._read(rank):
            pass
        self._hang_up(rank)

    def _look_after(self) -> None:
        """Notice ends, let go who has said the last word, and kill who goes on too long after the first bad end."""
        now = time.monotonic()
        for rank in self._ranks.values():
            if rank.ended_at is None and rank.gone():
                self._drain(rank)  # which notes the moment
        bad = [
            rank for rank in self._ranks.values() if rank.ended_at is not None and not isinstance(rank.last, Finished)
        ]
        if not bad:
            return
        self._failed_at = self._failed_at or now
        over = now - self._failed_at
        said = sum(rank.ended_at is not None for rank in self._ranks.values())
        if said == self._size or over >= _TOGETHER_SECONDS:
            for rank in bad:
                self._release(rank)
        if over >= _GRACE_SECONDS:
            for rank in self._ranks.values():
                self._kill(rank)

    def _release(self, rank: _Rank) -> None:
        if rank.link is not None and not rank.released:
            rank.released = True
            with contextlib.suppress(OSError):
                rank.link.send(b"\n")

    def _kill(self, rank: _Rank) -> None:
        if rank.killed or rank.gone():
            return
        rank.killed = rank.last is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(rank.pid, signal.SIGKILL)


def _of_this_user(link: socket.socket) -> bool:
    """Whether the one who connects is this user, where the kernel says so: an abstract name is everybody's to see."""
    if sys.platform != "linux":
        return True
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())
