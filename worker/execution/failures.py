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

A service's caller may not be the author of a factory that its operator lists. So a trace holds names and numbers alone:
no path, no line of source, no value, and no call of ours or of a library. The whole traceback is the failure's detail.
"""

import errno
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Self

from catalog.field_errors import Complaint
from catalog.frame_bounds import CODE_NAME, MAX_TRACE
from catalog.frames import Failed
from catalog.record import FieldError
from catalog.requests.assignment import Assignment
from catalog.responses.views import CallerFrame
from engine.errors import EngineError
from engine.memory.budget import free_host_bytes, resident_bytes
from engine.memory.out_of_memory import first_line, lost_device, ran_out_of_memory
from engine.memory.plan import readable_bytes
from worker.disk.free_space import DISK_FULL, describe_full_disk
from worker.execution.refusal import Refusal, storable_text
from worker.execution.resolve import OUR_MODULES
from worker.process.crash import DEVICE_LOST

_LIBRARIES = frozenset({"site-packages", "dist-packages"})
_TRANSIENT_ERRNOS = frozenset({errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE})
_LIBRARY_FAULTS = ("INTERNAL_ERROR", "MAPPING_ERROR", "cuFFT error", "NCCL error")
_MAX_MESSAGE = 4_000


@dataclass(frozen=True, kw_only=True)
class CallerCode:
    """The modules that are a caller's: those of the factories' packages, and those in the folders of factories."""

    packages: frozenset[str] = frozenset()
    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, assignment: Assignment) -> Self:
        """Return the code of the factories that a document names, which nobody has judged yet."""
        document = assignment.document if isinstance(assignment.document, Mapping) else {}
        blocks = [document.get(name) for name in ("model", "data")]
        factories = [block.get("factory") for block in blocks if isinstance(block, Mapping)]
        packages = {re.split("[.:]", name)[0] for name in factories if isinstance(name, str)}
        return cls(packages=frozenset(packages) - OUR_MODULES, folders=tuple(assignment.paths) if packages else ())

    def trace(self, error: BaseException) -> tuple[CallerFrame, ...]:
        """Return the caller's calls that an exception, or the first cause with any, came through, innermost last."""
        for each in _causes(error):
            frames = [
                CallerFrame(module=_name(_module(frame)), line=line, function=_name(frame.f_code.co_qualname))
                for frame, line in traceback.walk_tb(each.__traceback__)
                if self._holds(frame)
            ]
            if frames:
                return tuple(frames[-MAX_TRACE:])
        return ()

    def _holds(self, frame: FrameType) -> bool:
        top = _module(frame).partition(".")[0]
        if top in self.packages:
            return True
        if top in OUR_MODULES or top in sys.stdlib_module_names:
            return False
        file = Path(frame.f_code.co_filename)
        below = next((folder for folder in self.folders if file.is_relative_to(folder)), None)
        return below is not None and _LIBRARIES.isdisjoint(file.relative_to(below).parts)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from, each once."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__


def _module(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if type(name) is str else "?"  # whatever code has put there


def _name(text: str) -> str:
    """Return a name as a trace holds one; a question mark for what code has put in its place."""
    return text if re.fullmatch(CODE_NAME, text) else "?"


class DocumentRefused(Exception):
    """The document is not accepted."""

    def __init__(self, complaints: tuple[Complaint, ...]) -> None:
        super().__init__(complaints[0].message)
        self.complaints = complaints


def failure_of(error: BaseException, callers: CallerCode | None = None) -> Failed:
    """Return the frame that reports an exception; its trace holds calls of ``callers``, the code of the factories."""
    failed = _frame_of(error)
    return failed if callers is None else replace(failed, trace=callers.trace(error))


def _frame_of(error: BaseException) -> Failed:
    match error:
        case Refusal() | EngineError():
            layer = error.layer if isinstance(error, EngineError) else None
            return _failed(error, error.category, error.code, error.message, pointer=error.pointer, layer=layer)
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
