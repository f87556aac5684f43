"""The table process from outside: rows of a foreign parquet or CSV file, read apart from the job.

Of a small file a library can make any number of bytes (a dictionary of one repeated text, a page that unpacks to
gigabytes, two billion repeated levels), and its sizes are what the file says. So the kernel holds the process to what
an honest file of that size needs::

    memory       128 MiB beyond the library's own, twice the file where that is more
    processor    8 s, and as many again for every 64 MiB of the file
    values       what ``ByteCount`` allows of a file of that size, counted here as they come
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from engine.memory.plan import readable_bytes
from worker.execution.data.apart.apart_process import ApartFault, ApartProcess, Limits
from worker.execution.data.byte_count import ByteCount
from worker.execution.files.open_files import OpenFile
from worker.execution.refusal import Refusal, storable_text

_PROGRAM = "worker.execution.data.apart.table_program"
# the allocators of the library's own keep what was freed
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
_LEAST_BYTES = 128 * 2**20
_BYTES_PER_FILE_BYTE = 2
_PROCESSOR_SECONDS = 8
_FILE_BYTES = 64 * 2**20
_REPLY_SECONDS = 120.0
_MOST_REPLY_BYTES = 64 * 2**20


class TableProcess:
    """A file that is open apart; ``open_table`` makes one."""

    def __init__(self, process: ApartProcess, file: OpenFile, kind: str, pointer: str) -> None:
        self._process = process
        self._file = file
        self._pointer = pointer
        self._kind = kind
        self.names: list[str] = self._asked({"kind": kind})["names"]
        """Names of all columns."""

    def rows(self, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        """Return the values of columns, row by row; all values of CSV are texts."""
        message: dict[str, Any] = {"columns": list(columns)}
        while rows := self._asked(message):
            yield from rows
            message = {}

    def _asked(self, message: object) -> Any:  # noqa: ANN401 - each message has its own reply
        try:
            return self._process.ask(message)
        except ApartFault as fault:
            size = readable_bytes(self._file.stat().st_size)
            raise Refusal(
                f"{self._file.name}, of {size}, cannot be read as {self._kind}: {storable_text(str(fault))}"
                + ("; write it with pages, rows and dictionaries of a few MiB" if fault.exhausted else ""),
                pointer=self._pointer,
                code="budget_exceeded" if fault.exhausted else "wrong_format",
            ) from fault


@contextlib.contextmanager
def open_table(file: OpenFile, kind: str, count: ByteCount) -> Iterator[TableProcess]:
    """Open a file in a process of its own, and end that at last.

    Args:
        kind: ``parquet`` or ``csv``.
        count: The count of what is held; its checkpoint is called while the process is waited for.

    Raises:
        Refusal: If the file cannot be read within the limits.
    """
    size = file.stat().st_size
    limits = Limits(
        memory_bytes=max(_LEAST_BYTES, _BYTES_PER_FILE_BYTE * size),
        processor_seconds=_PROCESSOR_SECONDS * max(1, -(-size // _FILE_BYTES)),
        reply_seconds=_REPLY_SECONDS,
        reply_bytes=_MOST_REPLY_BYTES,
    )
    with ApartProcess.start(_PROGRAM, file, limits, count.checkpoint, _ENVIRONMENT) as process:
        yield TableProcess(process, file, kind, count.pointer)
