"""Every exception as the last frame of a job: who acts, a code, a sentence; the traceback only for the operator.

::

    Refusal             usage      what a loader says; Unavailable is transient
    EngineError         its own    what the mathematics says
    DocumentRefused     usage      the document's first complaint, and how many more there are
    OutOfMemoryError    usage      the job does not fit this machine
    OSError ENOSPC …    transient  the disk, not the job
    anything else       fatal      ours to mend
"""

import errno
import traceback

import torch

from catalog.complaints import Complaint
from catalog.frames import Failed
from catalog.record import FieldError
from engine.errors import EngineError
from worker.refusal import Refusal, writable

_TRANSIENT_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE})
_HOST_ALLOCATOR = ("not enough memory", "can't allocate memory")  # torch has no type for it, and two ways to say it
_MAX_MESSAGE = 4_000


class DocumentRefused(Exception):
    """The document is not accepted."""

    def __init__(self, complaints: tuple[Complaint, ...]) -> None:
        super().__init__(complaints[0].message)
        self.complaints = complaints


def failure_of(error: BaseException) -> Failed:
    """The frame that tells of ``error``."""
    match error:
        case Refusal():
            return _failed(error, error.category, error.code, error.message, pointer=error.pointer)
        case EngineError():
            return _failed(error, error.category, error.code, error.message, pointer=error.pointer, layer=error.layer)
        case DocumentRefused():
            return _refused(error)
        case FieldError():
            return _failed(error, "usage", "invalid_value", f"`{error.field}` {error.message}")
        case _:
            return _machine_failure(error)


def _machine_failure(error: BaseException) -> Failed:
    """What nobody foresaw in a sentence of their own."""
    exhausted = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if exhausted or (isinstance(error, RuntimeError) and any(text in str(error) for text in _HOST_ALLOCATOR)):
        message = "the job ran out of memory; take a smaller `collection.batch_size` or a smaller model"
        return _failed(error, "usage", "out_of_memory", message, pointer="/collection/batch_size")
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        message = f"the machine refused a file operation ({error.strerror}); make room, and run the job again"
        return _failed(error, "transient", "machine", message)
    message = f"an unexpected {type(error).__name__} ended the job; the operator's log has the details"
    return _failed(error, "fatal", "unexpected", message)


def _refused(error: DocumentRefused) -> Failed:
    """All complaints in one message, one a line; the pointer is the first one's."""
    lines = [f"{complaint.pointer or '/'} {complaint.message}" for complaint in error.complaints]
    first = error.complaints[0]
    message = first.message if len(lines) == 1 else "\n".join(lines)
    return _failed(error, "usage", first.code, message, pointer=first.pointer)


def _failed(
    error: BaseException,
    category: str,
    code: str,
    message: str,
    *,
    pointer: str | None = None,
    layer: str | None = None,
) -> Failed:
    return Failed(
        category="usage" if category == "usage" else "transient" if category == "transient" else "fatal",
        code=code,
        message=writable(message[:_MAX_MESSAGE]),
        pointer=pointer,
        layer=layer,
        detail=writable("".join(traceback.format_exception(error))[-20_000:]),
    )
