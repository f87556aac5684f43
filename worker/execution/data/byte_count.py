"""A count of the bytes that a loader holds, which ends it before the machine's memory does."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.memory.plan import readable_bytes
from worker.execution.refusal import Refusal

_VALUES_BETWEEN = 1_000
_OBJECT_BYTES = 56
"""Bytes that Python takes for a text or a number beside its content."""


@dataclass(kw_only=True)
class ByteCount:
    """Bytes held so far, of those that may be."""

    most_bytes: int
    held_bytes: int = 0
    pointer: str = "/data"
    checkpoint: Callable[[], None] = lambda: None
    """Called now and then, so that a job can be stopped while it reads."""
    values: int = 0

    def add_value(self, value: object) -> None:
        """Count a value that a file gave."""
        self.values += 1
        if self.values % _VALUES_BETWEEN == 0:
            self.checkpoint()
        self.add(_OBJECT_BYTES + (len(value) if isinstance(value, (str, bytes)) else 0))

    def require(self, size: int) -> None:
        """Require that there is room for bytes that are held for a while."""
        self.add(size)
        self.held_bytes -= size

    def add(self, size: int) -> None:
        """Count bytes."""
        self.held_bytes += size
        if self.held_bytes > self.most_bytes:
            raise Refusal(
                f"the data take more than the {readable_bytes(self.most_bytes)} of host memory that are left to this "
                "job; give a smaller `limit`, or give the job more (`memory.host`)",
                pointer=self.pointer,
                code="budget_exceeded",
            )
