"""The verdict on a job of several ranks: one last frame, from each rank's own and from how it ended.

    all finished                        -> finished, as rank 0 said it
    asked to stop, and none failed first -> stopped
    else the first that ended badly     -> failed: with its number, and its own message where it had one

A rank that ended without a last frame (killed, or crashed in native code) counts from the moment it ended; the errors
of the others, which lost it, come later. What a rank says of another's failure (`rank_failed`, `rank_timed_out`) is
believed only where no rank failed by itself.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from catalog.frames import Failed, Finished, Frame, Stopped
from worker.process.crash import MEMORY_REMEDY, OOM, RANK_LOST, ending

_REMEDY = "; SIGKILL is most often the machine running out of memory: lower `collection.batch_size` or `memory.host`"
_OF_ANOTHER = ("rank_failed", "rank_timed_out")


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


def last_frame(ends: Sequence[RankEnd], *, stopped: bool, exhausted: bool = False) -> Frame:
    """Return the frame that ends the job."""
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
        return Failed(
            category="transient",
            code=OOM if killed and exhausted else RANK_LOST,
            message=message,
            pointer="/memory/host" if killed and exhausted else None,
            layer=None,
            detail=f"rank {end.rank} of {ranks}{how}",
        )
    same = [each for each in ends if isinstance(each.last, Failed) and each.last.message == end.last.message]
    if len(same) == ranks or end.last.code in _OF_ANOTHER:
        return end.last  # whatever is wrong is wrong on every rank, or it names the rank itself
    return replace(end.last, message=f"rank {end.rank} of {ranks}: {end.last.message}")
