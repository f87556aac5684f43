"""The log format of the service's processes: one JSON object per line on standard error, whatever names contain.

Lines of libraries (Celery, uvicorn, SQLAlchemy) take the same way, and so do a thread's last words, so that every
line of a process parses. ``job``, ``attempt``, ``fence`` and ``layer`` are bound by code that knows them, ``request``
by the API.
"""

import contextlib
import json
import logging
import math
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

import structlog
from structlog.typing import Processor

_NAME = "kronoscope.audit"
_log = logging.getLogger(_NAME)
_COMMON: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)
_MAX_DEPTH = 12


class _Lines(logging.StreamHandler[TextIO]):
    """A handler that writes one line of JSON even for a record that cannot be formatted."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - as overridden
        """Log the record's origin, without its arguments."""
        error = type(sys.exc_info()[1]).__name__
        told = {"event": "a line could not be logged", "level": "error", "logger": record.name, "error": error}
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            self.stream.write(one_line(told) + "\n")


def configure_logging(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send every log line of this process to a stream, as JSON. Call it once, at the start of the process.

    Args:
        level: The least level that is written.
        stream: The stream; standard error if left out.
    """
    handler = _Lines(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_COMMON, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                lambda _logger, _method, event: one_line(event),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    logging.getLogger("alembic").setLevel("WARNING")  # it is asked for the schema's revision, and speaks of more
    logging.getLogger("httpx").setLevel("WARNING")  # its lines name whole addresses, of which some hold secrets
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_COMMON,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def log_last_words() -> None:
    """Log what ends a thread or the process, in place of Python's own traceback of many lines."""
    log = logging.getLogger("kronoscope")

    def of_process(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.critical("the process ends by an error", exc_info=(kind, error, trace))

    def of_thread(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_value is not None:
            name = None if ended.thread is None else ended.thread.name
            trace = (ended.exc_type, ended.exc_value, ended.exc_traceback)
            log.error("a thread ended by an error", exc_info=trace, extra={"thread_name": name})

    sys.excepthook = of_process
    threading.excepthook = of_thread


def one_line(event: object) -> str:
    """Return JSON on one line that any parser takes; control characters are escaped, printable ones (λ) are not."""
    text = json.dumps(_writable(event, _MAX_DEPTH), ensure_ascii=False, allow_nan=False)
    # what is left is what a terminal takes for a command, a reader for another line or direction, or no encoding writes
    return text if text.isprintable() else "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) > 0xFFFF else f"\\u{ord(character):04x}"


def _writable(value: object, depth: int) -> Any:  # noqa: ANN401 - what JSON takes
    if value is None or isinstance(value, str | bool) or (isinstance(value, int) and value.bit_length() <= 64):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth and isinstance(value, Mapping):
        return {_said(name): _writable(each, depth - 1) for name, each in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_writable(each, depth - 1) for each in value]
    return _said(value)


def _said(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - a value that cannot be shown is not a reason to lose the line
        return f"<a {type(value).__name__} that raised {type(error).__name__}>"


def write_audit_line(**fields: object) -> None:
    """Write one line of the audit trail, which says who changed what, to the logger ``kronoscope.audit``.

    Args:
        fields: Its fields: identifiers and words of this program, and nothing that a caller writes freely.
    """
    # a logger's own `extra` becomes the fields of the line
    _log.info("audit", extra={"logger": _NAME, **fields})
