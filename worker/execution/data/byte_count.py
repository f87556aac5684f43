"""A count of the bytes that a loader holds, which ends it before the machine's memory does."""

from dataclasses import dataclass

from engine.memory.plan import readable_bytes
from worker.execution.refusal import Refusal

_OBJECT_BYTES = 56
"""What Python takes for a text or a number beside its content."""


@dataclass(kw_only=True)
class ByteCount:
    """Bytes held so far, of those that may be."""

    most_bytes: int
    held_bytes: int = 0
    pointer: str = "/data"

    def add_value(self, value: object) -> None:
        """Count a value that a file gave.

        Args:
            value: A text, a number, or anything else, which counts as a number.

        Raises:
            Refusal: If more are held than may be.
        """
        self.add(_OBJECT_BYTES + (len(value) if isinstance(value, (str, bytes)) else 0))

    def add(self, size: int) -> None:
        """Count bytes.

        Args:
            size: Their number.

        Raises:
            Refusal: If more are held than may be.
        """
        self.held_bytes += size
        if self.held_bytes > self.most_bytes:
            raise Refusal(
                f"the data take more than the {readable_bytes(self.most_bytes)} of host memory that this job's loaders "
                "may take; give a smaller `limit`, or raise `memory.host`",
                pointer=self.pointer,
                code="out_of_memory",
            )
