"""One child of a foreground run, from its assignment to its last frame, and the stop that may end it."""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

from catalog.frame_bounds import FrameBeyond
from catalog.frames import Divided, Failed, Stopped
from catalog.record import plain
from catalog.requests.assignment import Assignment
from catalog.requests.ranks import MAX_WORLD_SIZE
from worker.foreground.output_folder import ArtifactMismatch
from worker.process.attended_child import AttendedChild, Last, Sink
from worker.process.child_process import EXECUTION, RANKS, STOP_GRACE_SECONDS, Child, MalformedFrame
from worker.process.crash import BROKEN_CHILD, ending, failure_frame

_PARENT_POLL_SECONDS = 0.5


class Stopper:
    """The one clean stop of the child, on the end of the lifeline, on a signal or on the parent's death."""

    def __init__(self, lifeline: int | None) -> None:
        """Set up the stop; nothing is watched before `install`."""
        self.asked = threading.Event()
        self._lifeline = lifeline
        self._parent = os.getppid()
        self._signalled, self._signal = os.pipe()
        self._child: Child | None = None
        self._ended = threading.Event()

    def install(self) -> None:
        """Take SIGINT and SIGTERM; a handler only writes into a pipe, so it can never meet a held lock."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os.write(self._signal, b"!"))
        threading.Thread(target=self._watch, name="stopper", daemon=True).start()

    def guard(self, child: Child) -> None:
        """Name the child to stop; if a stop was asked for earlier, the child is stopped at once."""
        self._child = child
        if self.asked.is_set():
            child.terminate()

    def ended(self) -> None:
        """There is nothing left to stop."""
        self._ended.set()

    def stop(self) -> None:
        """Ask the child to stop; end it when it does not."""
        if self.asked.is_set():
            return
        self.asked.set()
        if self._child is not None:
            self._child.terminate()
        threading.Thread(target=self._insist, name="insist", daemon=True).start()

    def _insist(self) -> None:
        if not self._ended.wait(STOP_GRACE_SECONDS) and self._child is not None:
            self._child.kill()

    def _watch(self) -> None:
        sources = [self._signalled] if self._lifeline is None else [self._signalled, self._lifeline]
        while not self._ended.is_set():
            readable, _, _ = select.select(sources, [], [], _PARENT_POLL_SECONDS)
            if self._signalled in readable:
                os.read(self._signalled, 16)
                if self.asked.is_set() and self._child is not None:
                    self._child.kill()  # asked twice: now
                self.stop()
            if self._lifeline in readable and not os.read(self._lifeline or 0, 4096):
                sources = [self._signalled]
                self.stop()
            if os.getppid() != self._parent:
                self.stop()


def run_child(assignment: Assignment, sink: Sink, stopper: Stopper, command: Sequence[str]) -> Last | Divided:
    """Run one child to its end."""
    if stopper.asked.is_set():
        return Stopped()
    attended = AttendedChild(sink)
    command = RANKS if command == EXECUTION and _asks_for_ranks(assignment) else command
    with contextlib.closing(Child.start(plain(assignment), sys.stderr.fileno(), os.environ, command)) as child:
        stopper.guard(child)
        try:
            last = attended.follow(child, lambda: None)
        except (MalformedFrame, FrameBeyond, ArtifactMismatch, OSError) as error:
            child.kill()
            last = trouble(error)
        code = child.wait()
    if last is not None:
        return last
    return Stopped() if stopper.asked.is_set() else replace(attended.crash(ending(code), None), category="fatal")


def trouble(error: Exception) -> Failed:
    """Return the failure that says what went wrong on our side of the pipe."""
    if isinstance(error, OSError):
        code, message = "output_failed", f"the output folder refused a write: {error.strerror}; make room in it"
    elif isinstance(error, ArtifactMismatch):
        code, message = "artifact_damaged", f"{error}; run the job again"
    elif isinstance(error, FrameBeyond):
        code, message = BROKEN_CHILD, f"the computing process sent {error}"
    else:
        code, message = "malformed_frame", f"{error}; a factory that writes to foreign file descriptors would do this"
    return failure_frame("fatal", code, message)


def _asks_for_ranks(assignment: Assignment) -> bool:
    """Whether several processes are to compute it; a number that no document may have is for one to refuse."""
    document = assignment.document
    ranks = document.get("world_size") if isinstance(document, dict) else None
    return isinstance(ranks, int) and 1 < ranks <= MAX_WORLD_SIZE and not assignment.estimate
