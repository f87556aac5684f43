"""How the service's processes log: structlog, one JSON object per line on standard error.

Lines of libraries (Celery, kombu, SQLAlchemy) take the same way, so that every line of the
process parses. ``job``, ``attempt``, ``fence`` and ``layer`` are bound by whoever knows them.
"""

import json
import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import FilteringBoundLogger, Processor

_COMMON: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure_logging(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send every line of this process to ``stream`` as JSON. Call it once, at the process edge."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_COMMON, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(serializer=_one_line),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    logging.getLogger("alembic").setLevel("WARNING")  # it is asked for the schema's revision, and speaks of more
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


def job_logger(**bound: object) -> FilteringBoundLogger:
    """A logger whose lines carry ``bound`` (job, attempt, fence, layer)."""
    logger: FilteringBoundLogger = structlog.get_logger("kronoscope.worker").bind(**bound)
    return logger


def _one_line(event: object, **_: object) -> str:
    """JSON in which nothing is taken for the end of a line; λ and κ stay readable."""
    text = json.dumps(event, ensure_ascii=False, default=str)
    for separator in ("\x85", "\u2028", "\u2029"):
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return text
