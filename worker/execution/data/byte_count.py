"""A count of the bytes that a loader holds, which ends it before the machine's memory does."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.memory.plan import readable_bytes
from worker.execution.refusal import Refusal

_VALUES_BETWEEN = 1_000
_REFERENCE_BYTES = 8
_LEAST_VALUE_BYTES = 56
"""A text without letters in its place; the least that a value of a row counts, since reading it takes time, too."""
_PLAIN = (str, int, float, bool, type(None))
_FILE_BYTES = 128 * 2**20
_TIMES_FILE = 4
"""Values of a file may take this many times its own size, or ``_FILE_BYTES``, the larger."""


def no_room(needed: str, most_bytes: int, pointer: str, remedy: str = "give it more (`memory.host`)") -> Refusal:
    """Return the refusal of what takes more host memory than is left; ``needed`` says how much."""
    left = f"{readable_bytes(most_bytes)} of host memory are left to this job"
    return Refusal(f"{needed}, and {left}; {remedy}", pointer=pointer, code="budget_exceeded")


class Sized(Protocol):
    """A file with a name and a size."""

    @property
    def name(self) -> str:
        """The file's name."""

    def stat(self) -> os.stat_result:
        """Return its facts."""


@dataclass(kw_only=True)
class ByteCount:
    """Bytes held so far, of those that may be."""

    most_bytes: int
    held_bytes: int = 0
    pointer: str = "/data"
    checkpoint: Callable[[], None] = lambda: None
    """Called now and then, so that a job can be stopped while it reads."""
    values: int = 0
    file_bytes: int = 0
    """Sizes of the files that are read, together; 0 where none is."""

    def __post_init__(self) -> None:
        self._room_bytes = self.most_bytes

    def allow_file(self, file: Sized) -> None:
        """Allow the values of one file more, by its size."""
        self.file_bytes += max(1, file.stat().st_size)
        self._room_bytes = min(self.most_bytes, max(_FILE_BYTES, _TIMES_FILE * self.file_bytes))

    def add_value(self, value: object) -> None:
        """Count a value that a file gave."""
        self.values += 1
        if self.values % _VALUES_BETWEEN == 0:
            self.checkpoint()
        # most values are no lists, and there are millions
        plain = type(value) in _PLAIN
        size = _REFERENCE_BYTES + sys.getsizeof(value) if plain else _value_bytes(value)
        self.add(max(_LEAST_VALUE_BYTES, size))

    def require(self, size: int) -> None:
        """Require that there is room for bytes that are held for a while."""
        self.add(size)
        self.held_bytes -= size

    def add(self, size: int) -> None:
        """Count bytes."""
        self.held_bytes += size
        if self.held_bytes <= self._room_bytes:
            return
        if self.held_bytes > self.most_bytes:
            raise Refusal(
                f"the data take more than the {readable_bytes(self.most_bytes)} of host memory that are left to this "
                "job; give a smaller `limit`, or give the job more (`memory.host`)",
                pointer=self.pointer,
                code="budget_exceeded",
            )
        raise Refusal(
            f"the data take more than the {readable_bytes(self._room_bytes)} that {readable_bytes(self.file_bytes)} of "
            f"files may become ({_TIMES_FILE} times their size, {readable_bytes(_FILE_BYTES)} at least); give a "
            "smaller `limit`, or write them without compression and without rows that repeat",
            pointer=self.pointer,
            code="budget_exceeded",
        )


def _value_bytes(value: object) -> int:
    """Return the bytes that a value and its place take."""
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return _REFERENCE_BYTES + sys.getsizeof(value) + sum(map(_value_bytes, inner))
