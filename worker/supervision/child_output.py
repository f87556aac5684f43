"""Output of a child outside its frames: read to the end, logged, the last lines kept for the operator."""

import threading
from collections import deque
from collections.abc import Iterable

import structlog
from structlog.typing import FilteringBoundLogger

_KEPT_LINES = 40


class ChildOutput:
    """Reads in a thread of its own, so that a talkative child never blocks on a full pipe."""

    def __init__(self, lines: Iterable[bytes], log: FilteringBoundLogger) -> None:
        self._lines = lines
        self._log = log
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._read, name="child-output", daemon=True)
        self._thread.start()

    def tail(self) -> str | None:
        """The last lines, once the child has ended."""
        self._thread.join()
        return "\n".join(self._kept) or None

    def _read(self) -> None:
        for line in self._lines:
            text = line.decode(errors="replace").rstrip().replace("\0", "")
            if text:
                self._kept.append(text)
                self._log.debug("child says", text=text)


def job_logger(**bound: object) -> FilteringBoundLogger:
    """Return a logger whose lines carry the job's facts."""
    logger: FilteringBoundLogger = structlog.get_logger("kronoscope.worker").bind(**bound)
    return logger
