"""The worker's loggers: what they are bound to stands in every one of their lines (``jobs.service_log``)."""

import structlog
from structlog.typing import FilteringBoundLogger


def job_logger(**bound: object) -> FilteringBoundLogger:
    """Return a logger whose lines carry the job's facts."""
    logger: FilteringBoundLogger = structlog.get_logger("kronoscope.worker").bind(**bound)
    return logger
