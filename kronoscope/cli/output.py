"""The outputs of the command line: results on standard output, everything else on standard error."""

import io
import json
import sys
from typing import Any

from rich.console import Console


class _Pipe(io.FileIO):
    """Standard output; what its reader no longer takes is dropped, so that a command goes on, as with `| head`."""

    def write(self, data: Any) -> int:  # noqa: ANN401 - anything with the buffer protocol
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return memoryview(data).nbytes


def outlast_reader() -> None:
    """Let this process outlast the reader of its standard output."""
    try:
        pipe = _Pipe(sys.stdout.fileno(), "wb", closefd=False)
    except (OSError, ValueError):
        return  # no file stands behind it
    sys.stdout.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(pipe),
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
        line_buffering=pipe.isatty(),
    )


def result_console() -> Console:
    """Return the console for results, 100 columns wide where it is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=100)


def message_console() -> Console:
    """Return the console for progress and messages."""
    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:  # noqa: ANN401 - any JSON
    """Print a value for programs.

    Args:
        value: Anything that JSON holds.
    """
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
