"""Failures: every exception as the last frame of a job, with who acts, a code and a sentence.

::

    Refusal             usage      what a loader says; Unavailable is transient
    EngineError         its own    what the mathematics says
    DocumentRefused     usage      the document's first complaint, and how many more there are
    out of memory       usage      the job does not fit this machine, or its budget
    a lost device       transient  a new process may find it well
    OSError ENOSPC …    transient  the disk, not the job (``worker.disk.free_space``)
    OSError EFBIG       usage      a file above the limit of a job's files
    OSError EIO …       transient  the machine, not the job
    anything else       fatal      ours to mend
"""

import errno
import traceback
from dataclasses import replace

from catalog.field_errors import Complaint
from catalog.frames import Failed
from catalog.record import FieldError
from engine.errors import EngineError
from engine.memory.budget import free_host_bytes, resident_bytes
from engine.memory.out_of_memory import first_line, lost_device, ran_out_of_memory
from engine.memory.plan import readable_bytes
from worker.disk.free_space import DISK_FULL, describe_full_disk
from worker.execution.caller_code import CallerCode
from worker.execution.refusal import Refusal, storable_text
from worker.process.crash import DEVICE_LOST

_TRANSIENT_ERRNOS = frozenset({errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE})
_LIBRARY_FAULTS = ("INTERNAL_ERROR", "MAPPING_ERROR", "cuFFT error", "NCCL error")
_MAX_MESSAGE = 4_000


class DocumentRefused(Exception):
    """The document is not accepted."""

    def __init__(self, complaints: tuple[Complaint, ...]) -> None:
        super().__init__(complaints[0].message)
        self.complaints = complaints


def failure_of(error: BaseException, callers: CallerCode | None = None) -> Failed:
    """Return the frame that reports an exception.

    Args:
        callers: The code of the job's factories, calls of which the frame's trace holds.
    """
    failed = _frame_of(error)
    return failed if callers is None else replace(failed, trace=callers.trace(error))


def _frame_of(error: BaseException) -> Failed:
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
    """Return the frame for an exception without a sentence of its own."""
    if ran_out_of_memory(error):
        message = (
            f"the job ran out of memory ({first_line(error)}); {readable_bytes(resident_bytes())} were resident and "
            f"{readable_bytes(free_host_bytes())} free on the host when it was told: raise `memory.host` or "
            "`memory.device`, or take a smaller `collection.batch_size` or a smaller model"
        )
        return _failed(error, "usage", "out_of_memory", message, pointer="/collection/batch_size")
    if lost_device(error) or _library_failed(error):
        message = f"the device failed ({first_line(error)}), and with it this process; the job is tried in a new one"
        return _failed(error, "transient", DEVICE_LOST, message)
    full = describe_full_disk(error) if isinstance(error, OSError) else None
    if full is not None:
        return _failed(error, "transient", DISK_FULL, full)
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        message = (
            "a file would be larger than KRONOSCOPE_CHILD_FILE_BYTES lets a job write; ask the operator to raise it"
        )
        return _failed(error, "usage", "file_too_large", message)
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        message = f"the machine refused a file operation ({error.strerror}); make room, and run the job again"
        return _failed(error, "transient", "machine", message)
    message = f"an unexpected {type(error).__name__} ended the job; the operator's log has the details"
    return _failed(error, "fatal", "unexpected", message)


def _library_failed(error: BaseException) -> bool:
    """Whether one of the device's libraries gave up without a reason, and no fallback was there: it may be the device.

    A call that it refused would be refused in any process.
    """
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LIBRARY_FAULTS)


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
        message=storable_text(message[:_MAX_MESSAGE]),
        pointer=pointer,
        layer=layer,
        detail=storable_text("".join(traceback.format_exception(error))[-20_000:]),
    )
