"""A crash: the child died, or lost its mind, without a last frame.

Its *signature* (how it ended, in which stage, after which layer) tells bad luck from poison: the
same signature twice in a row means that a third try would end the same way.
"""

import signal
from dataclasses import asdict, dataclass
from typing import Any

from catalog.frames import Failed, Frame, LayerDone, Progress
from worker.process.guardian import NOT_STARTED

DEVICE_LOST = "device_lost"
"""The code of a failure of the device: the process that met it is done for, a new one may find the device well."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What two crashes must share to be the same crash."""

    signal: str
    """`SIGKILL`, or `exit 1`, or `malformed frame`, `no progress`, or `device_lost`."""
    stage: str | None
    layer: str | None
    """The last row that stands, of this attempt or an earlier one."""

    def as_json(self) -> dict[str, Any]:
        """For the ledger."""
        return asdict(self)


class LastPosition:
    """How far a child was: follows its frames."""

    def __init__(self, last_row: str | None = None) -> None:
        self.begun = False
        """Whether it came to the job at all: before its first word of that nothing was the job's doing."""
        self.stage: str | None = None
        self.layer = last_row

    def follow(self, frame: Frame) -> None:
        """Note stage and layer."""
        self.begun = self.begun or not isinstance(frame, Failed)
        if isinstance(frame, Progress):
            self.stage = frame.stage
        elif isinstance(frame, LayerDone):
            self.stage = frame.kind
            self.layer = row_name(frame.kind, frame.ordinal)


def row_name(kind: str, ordinal: int) -> str:
    """One row of the results, in a word."""
    return f"{kind}/{ordinal}"


def ending(code: int) -> str:
    """An exit code in words: codes above 128 are signals."""
    if code > 128:
        try:
            return signal.Signals(code - 128).name
        except ValueError:
            return f"signal {code - 128}"
    return f"exit {code}"


def never_ran(code: int) -> bool:
    """Whether a child that said nothing ended because it could not be started, not because of what it computed.

    The guardian says so where it could not start it. 1 is Python's own end where a module is not there or does not
    load, as while an installation is replaced: from then on the program tells of every error itself.
    """
    return code in (1, NOT_STARTED)


def crash_failure(signature: Signature, detail: str | None, *, exhausted: bool = False) -> Failed:
    """What the job's owner is told, as long as it will be tried again.

    ``exhausted``: the kernel has killed a process of this control group for want of memory meanwhile.
    """
    place = _place(signature)
    if exhausted and signature.signal == "SIGKILL":
        return Failed(
            category="transient",
            code="oom",
            message=f"the kernel killed the computing process for want of memory{place}; give `memory.host` a "
            'size below what the machine has (such as "4GiB"), so that the job is planned to fit, or lower '
            "`collection.batch_size`",
            pointer="/memory/host",
            layer=None,
            detail=detail,
        )
    remedy = (
        "SIGKILL is most often the machine running out of memory: lower `collection.batch_size` or `memory.host`"
        if signature.signal == "SIGKILL"
        else "if it happens again, the operator's log of this job has the process's last lines"
    )
    return Failed(
        category="transient",
        code="crashed",
        message=f"the computing process ended without a word ({signature.signal}){place}; {remedy}",
        pointer=None,
        layer=None,
        detail=detail,
    )


def silence_failure(signature: Signature, seconds: float, detail: str | None) -> Failed:
    """The same of a child that was stopped because nothing came from it."""
    return Failed(
        category="transient",
        code="no_progress",
        message=f"nothing came from the computing process for {seconds:g} s{_place(signature)}, so it was stopped; a "
        "second time at the same place ends the job. Where one step takes that long, the operator allows more "
        "(KRONOSCOPE_NO_PROGRESS)",
        pointer=None,
        layer=None,
        detail=detail,
    )


def _place(signature: Signature) -> str:
    where = f" during {signature.stage}" if signature.stage else " before it reported anything"
    return where + (f", after layer {signature.layer}" if signature.layer else "")
