"""A crash: the child died, or lost its mind, without a last frame.

Its *signature* (how it ended, in which stage, after which layer) tells bad luck from poison: the
same signature twice in a row means that a third try would end the same way.
"""

import signal
from dataclasses import asdict, dataclass
from typing import Any, Literal

from catalog.frames import Divided, Failed, Finished, Stopped
from worker.process.guardian import NOT_STARTED

DEVICE_LOST = "device_lost"
"""The code of a failure of the device: the process that had it is done for, a new one may find the device well."""

RANK_LOST = "rank_lost"
"""The code of the end of one rank without a word: a crash of a job that several processes compute."""

OOM = "oom"
"""The code of a kill by the kernel for want of memory, of the computing process or of one rank: a crash, too."""

BROKEN_CHILD = "broken_child"
"""The code of a failure of a process that said what none of ours would."""

EXIT_CODES = {"finished": 0, "usage": 2, "transient": 3, "fatal": 4, "stopped": 5, "divided": 6}
"""Exit codes of a computing process by its last frame, of failures by who acts."""

LOST_PARTS = (DEVICE_LOST, RANK_LOST, OOM)
"""Codes of last frames that report a crash: of a device, or of one rank of several."""

MEMORY_REMEDY = (
    'give `memory.host` a size below what the machine has (such as "4GiB"), so that the job is planned to fit, or '
    "lower `collection.batch_size` where factors are collected"
)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The facts that two crashes must share to be the same crash."""

    signal: str
    """`SIGKILL`, or `exit 1`, or `malformed frame`, `no progress`, `device_lost`, or `rank 1 of 2 (SIGKILL)`."""
    stage: str | None
    layer: str | None
    """The last row that stands, of this attempt or an earlier one."""

    def as_json(self) -> dict[str, Any]:
        """For the ledger."""
        return asdict(self)


def failure_frame(
    category: Literal["usage", "transient", "fatal"],
    code: str,
    message: str,
    pointer: str | None = None,
    detail: str | None = None,
) -> Failed:
    """Return a failure that concerns the whole attempt, so without a layer."""
    return Failed(category=category, code=code, message=message, pointer=pointer, layer=None, detail=detail)


def exit_code(last: Finished | Failed | Stopped | Divided) -> int:
    """Return the exit code of a process that ends with this frame."""
    return EXIT_CODES[last.category if isinstance(last, Failed) else last.frame]


def ending(code: int) -> str:
    """Describe an exit code by the signal's name, which 128 + n stands for, or as `exit N`."""
    if code > 128:
        try:
            return signal.Signals(code - 128).name
        except ValueError:
            return f"signal {code - 128}"
    return f"exit {code}"


def never_ran(code: int) -> bool:
    """Return whether a silent child ended because it could not be started, not because of its job.

    So says the guardian's own code, and 1, Python's where a module is missing or does not load.
    """
    return code in (1, NOT_STARTED)


def crash_failure(signature: Signature, detail: str | None, *, exhausted: bool = False) -> Failed:
    """Return the failure that the job's owner sees after a crash, as long as the job is tried again.

    Its code is `oom` where the kernel has killed a process of this control group for want of memory meanwhile.
    """
    place = _place(signature)
    if exhausted and signature.signal == "SIGKILL":
        message = f"the kernel killed the computing process for want of memory{place}; {MEMORY_REMEDY}"
        return failure_frame("transient", OOM, message, "/memory/host", detail)
    remedy = (
        "SIGKILL is most often the machine running out of memory: lower `memory.host`, or `collection.batch_size` "
        "where factors are collected"
        if signature.signal == "SIGKILL"
        else "if it happens again, the operator's log of this job has the process's last lines"
    )
    message = f"the computing process ended without a word ({signature.signal}){place}; {remedy}"
    return failure_frame("transient", "crashed", message, detail=detail)


def silence_failure(signature: Signature, seconds: float, detail: str | None) -> Failed:
    """Return the failure of a child that was stopped because nothing came from it for so many seconds."""
    message = (
        f"nothing came from the computing process for {seconds:g} s{_place(signature)}, so it was stopped; a "
        "second time at the same place ends the job. Where one step takes that long, the operator allows more "
        "(KRONOSCOPE_NO_PROGRESS)"
    )
    return failure_frame("transient", "no_progress", message, detail=detail)


def _place(signature: Signature) -> str:
    where = f" during {signature.stage}" if signature.stage else " before it reported anything"
    return where + (f", after layer {signature.layer}" if signature.layer else "")
