"""The outputs of the command line: results on standard output, everything else on standard error."""

import io
import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from kronoscope.display.printable import escaped, printable

_UNCUT = 10_000


class PrintableConsole(Console):
    """A console that sends sequences of its own to the terminal, and no text that the terminal would obey."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        shown = (each if each.control else each._replace(text=printable(each.text)) for each in buffer)
        return super()._render_buffer(shown)


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
    """Return the console for results; what is not a terminal has room for everything, so that nothing is cut."""
    console = PrintableConsole(highlight=False)
    return console if console.is_terminal else PrintableConsole(highlight=False, width=_UNCUT)


def message_console() -> Console:
    """Return the console for progress and messages."""
    return PrintableConsole(stderr=True, highlight=False)


def write_line(text: str) -> None:
    """Write a text to standard output as it is but for what a terminal would obey."""
    sys.stdout.write(f"{printable(text)}\n")
    sys.stdout.flush()  # a job that is followed through a pipe shows each line as it comes


def write_error(text: str) -> None:
    """Write a text to standard error as it is but for what a terminal would obey."""
    sys.stderr.write(f"{printable(text)}\n")


def print_json(value: Any, *, indent: int | None = 2) -> None:  # noqa: ANN401 - any JSON
    """Print a value for programs; without an indent on one line, as one of many."""
    sys.stdout.write(escaped(json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)) + "\n")
    sys.stdout.flush()
