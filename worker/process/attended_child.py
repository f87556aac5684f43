"""The attended child: its frames go to a sink, and by them it is known where it was when it ended without a last one.

The supervisor of a service has the ledger as its sink (``worker.supervision.frame_writer``), a foreground run a folder
(``worker.foreground.output_folder``). What an end means for the job, the owner of the sink says.
"""

from collections.abc import Callable

from catalog.cgroups import oom_kills
from catalog.frames import CacheAnswer, Divided, Failed, Finished, Frame, LayerDone, Progress, Stopped
from worker.process.child_process import Child
from worker.process.crash import Signature, crash_failure

Last = Finished | Failed | Stopped
"""Frames that a job ends with."""
Sink = Callable[[Frame, Callable[[CacheAnswer], None]], None]
"""Takes a frame that is not the last one, and what answers it where it is a question."""


def row_name(kind: str, ordinal: int) -> str:
    """Return the name of one row of the results, such as `capacity/3`."""
    return f"{kind}/{ordinal}"


class AttendedChild:
    """One child, or the one that is to be started."""

    def __init__(self, sink: Sink, last_row: str | None = None) -> None:
        self._sink, self._kills = sink, oom_kills()
        self.begun = False
        """Whether it came to the job at all: before its first word of that nothing was the job's doing."""
        self._stage: str | None = None
        self._layer = last_row

    def follow(self, child: Child, heard: Callable[[], None]) -> Last | Divided | None:
        """Have every frame written, with a call of ``heard`` after it; return the last one, if the child said it."""
        last: Last | Divided | None = None
        for frame in child.frames():
            self.begun = self.begun or not isinstance(frame, Failed)
            if isinstance(frame, Progress):
                self._stage = frame.stage
            elif isinstance(frame, LayerDone):
                self._stage, self._layer = frame.kind, row_name(frame.kind, frame.ordinal)
            if isinstance(frame, (Finished, Failed, Stopped, Divided)):
                last = frame
            else:
                self._sink(frame, child.answer)
            heard()
        return last

    def signature(self, how: str) -> Signature:
        """Return what is to be the same where the same crash comes again."""
        return Signature(signal=how, stage=self._stage, layer=self._layer)

    def crash(self, how: str, tail: str | None) -> Failed:
        """Return the failure of a child that ended without a last frame; the kernel may have killed it."""
        return crash_failure(self.signature(how), tail, exhausted=oom_kills() > self._kills)
