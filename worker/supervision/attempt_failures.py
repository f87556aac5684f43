"""Failures that the supervisor itself ends an attempt with, and what their messages say."""

import re
from dataclasses import replace

from catalog.frame_bounds import FrameBeyond
from catalog.frames import Divided, Failed, Finished, Frame
from jobs.errors import ArtifactDamaged, DiskTooSmall, QuotaExceeded
from worker.disk.free_space import DISK_FULL, describe_full_disk
from worker.process.child_process import Child
from worker.process.crash import BROKEN_CHILD, OOM, RANK_LOST, failure_frame

_SAID_BY_FACTORIES = frozenset({"factory_failed", "model_refused"})
_MOST_SAID = 2_045
"""Bytes of a message that a factory's code has written, without the mark that it was cut."""
_ABSOLUTE = re.compile(
    r"""(?P<quote>['"`])(?:/(?!\s)[^'"`\n]*)?/(?P<quoted>[^'"`/\n]+)/?(?P=quote)"""
    r"""|"/(?:[^"\n]*/)?(?P<double>[^"/\n]+)/?"|(?<![\w.…])(?:/+[^\s/'"`]+)*/+(?P<plain>[^\s/'"`]+)/?"""
)
"""An absolute path: in quotes with blanks, else to the next blank or quote."""
_DEADLINE_PASSED = (
    "the job was stopped at its deadline; the layers that were done stay. Submit it again with a later one"
)
_ATTEMPT_TOO_LONG = (
    "an attempt may take {:g} s in this service, and this one had not ended by then; the layers that were done stay. "
    "Ask for less in one job, or the operator for more time (KRONOSCOPE_ATTEMPT_LIMIT)"
)
DISK_LIMIT = "disk_limit"
"""The code of a failure of an attempt that had more on the disk than it may."""
_BEYOND_DISK = {
    "bytes": "the job had {found:,} bytes on the disk, and an attempt may have less than {limit:,} in this service; "
    "what was published stays. `keep` less, or ask the operator for more (KRONOSCOPE_CHILD_DISK_BYTES)",
    "room": "the job had {found:,} bytes on the disk of {place}, more than its part of {limit:,}, and less than a "
    "tenth was left there of what was free when it started; what was published stays. Submit it again when there is "
    "more room, `keep` less, or ask the operator for more (KRONOSCOPE_CHILD_DISK_BYTES)",
    "files": "the job had {found:,} files and folders, and an attempt may have {limit:,} in this service; what was "
    "published stays. Write fewer, or ask the operator for more (KRONOSCOPE_CHILD_DISK_FILES)",
    "hidden": "what the job has on the disk could not be counted: {place} cannot be looked into; leave folders and "
    "processes open to their own user",
}
_MAX_PAUSE_SECONDS = 900.0
LEASE_TOO_SMALL = "needs more than was leased for it; another device holds it"
_STOPPED_FROM_OUTSIDE = "the computing process was told to stop by something other than this service; it is tried again"


def with_detail(failure: Failed, tail: str | None) -> Failed:
    """Return a failure with the end of the child's output as its detail, unless it has a detail."""
    return failure if tail is None or failure.detail is not None else replace(failure, detail=tail)


def for_callers(failure: Failed) -> Failed:
    """Return a failure of a factory's code as the caller of a service, who may not be its author, may read it.

    Its message is what that code said: one line of at most 2 KiB, with the last part alone of each absolute path.
    Others are left as they are.
    """
    if not failure.trace and failure.code not in _SAID_BY_FACTORIES:
        return failure
    shown = _ABSOLUTE.sub(_last_part, failure.message)
    line = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)
    within = line.encode()[:_MOST_SAID].decode(errors="ignore")
    return replace(failure, message=within if within == line else f"{within}…")


def _last_part(path: re.Match[str]) -> str:
    quote = path["quote"] or ('"' if path["double"] else "")
    return f"{quote}…/{path['quoted'] or path['double'] or path['plain']}{quote}"


def full_disk_failure(error: Exception) -> Failed | None:
    """Return the failure for an error that a full disk caused."""
    full = describe_full_disk(error) if isinstance(error, OSError) else None
    return None if full is None else failure_frame("transient", DISK_FULL, full)


def within_disk(child: Child, last: Frame | None, planned_bytes: int | None) -> Frame | None:
    """Return the last frame of an attempt: the child's own, or a failure where it had too much on the disk."""
    excess = child.excess()
    if excess is None or isinstance(last, (Finished, Divided)):
        return last
    message = _BEYOND_DISK[excess.kind].format(**vars(excess))
    if excess.kind == "room" and planned_bytes is not None and planned_bytes > excess.limit:
        return failure_frame("transient", DISK_FULL, f"{message}; as its plan needs so much, it waits for room")
    return failure_frame("usage", DISK_LIMIT, message)


def pause_after(failure: Failed, waits: float, *, retry_later: bool) -> float:
    """Return how many seconds a failed job is not claimed: ``waits`` for a full disk or unread files, else 0."""
    # whatever fills the disk, or keeps files from being read, is not gone within seconds, and failures are counted
    return min(waits, _MAX_PAUSE_SECONDS) if retry_later or failure.code == DISK_FULL else 0


def unkept_failure(error: ArtifactDamaged | DiskTooSmall | FrameBeyond | QuotaExceeded) -> Failed:
    """Return the failure of an attempt that has sent what cannot be kept."""
    if isinstance(error, FrameBeyond):
        hint = "a factory that writes to foreign file descriptors would do this"
        return failure_frame("fatal", BROKEN_CHILD, f"the computing process sent {error}; {hint}")
    if isinstance(error, DiskTooSmall):
        return failure_frame("usage", DISK_LIMIT, f"{error}")
    if isinstance(error, QuotaExceeded):
        return failure_frame("usage", "disk_quota", f"{error}; what was done stays")
    return failure_frame("transient", "artifact_damaged", f"{error}; it is computed again")


def layout_failure(error: OSError) -> Failed:
    """Return the failure of an attempt that could not be laid out; the job's own files may be why, so it counts."""
    message = f"the job's files could not be laid out: {error.strerror or error}; it is tried again"
    return full_disk_failure(error) or failure_frame("transient", "machine", message)


def stop_failure(reason: str | None, attempt_seconds: float, tail: str | None) -> tuple[Failed, str | None]:
    """Return the failure of an attempt that was stopped, and what of the child's output belongs to it."""
    if reason == "deadline":
        return failure_frame("usage", "deadline_exceeded", _DEADLINE_PASSED), None
    if reason == "timeout":
        return failure_frame("usage", "timeout", _ATTEMPT_TOO_LONG.format(attempt_seconds)), None
    return failure_frame("transient", "stopped_from_outside", _STOPPED_FROM_OUTSIDE), tail


def how_it_broke(failure: Failed) -> str:
    """Return what the signature of a crash says of a device, or a rank, that was lost."""
    return (failure.detail if failure.code in (RANK_LOST, OOM) else None) or failure.code
