"""The outputs of the command line: results on standard output, everything else on standard error."""

import io
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
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


class OutputFailed(RuntimeError):
    """A standard output that takes no more, as on a full disk."""


class _Pipe(io.FileIO):
    """A standard stream; what its reader no longer takes is dropped, so that a command goes on, as with `| head`.

    Another fault of standard output ends the command; from then on, and on standard error, what fails is dropped too.
    """

    is_silent = False

    def write(self, data: Any) -> int:  # noqa: ANN401 - anything with the buffer protocol
        try:
            return super().write(data) or 0
        except OSError as error:
            if not isinstance(error, BrokenPipeError) and not self.is_silent:
                self.is_silent = True
                raise OutputFailed(f"standard output takes no more ({error.strerror}); make room there") from error
            return memoryview(data).nbytes


def outlast_readers() -> None:
    """Let this process outlast the readers of its outputs, one that is closed, and characters that their code lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by `>&-`
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - to the end
            continue
        try:
            pipe = _Pipe(stream.fileno(), "wb", closefd=False)
        except (OSError, ValueError):
            continue  # no file stands behind it
        pipe.is_silent = name == "stderr"
        stream.flush()
        wrapped = io.TextIOWrapper(
            io.BufferedWriter(pipe),
            encoding=stream.encoding,
            errors="replace",
            line_buffering=name == "stderr" or pipe.isatty(),
        )
        setattr(sys, name, wrapped)


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
    is_narrow = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    sys.stdout.write(escaped(json.dumps(value, indent=indent, ensure_ascii=is_narrow, allow_nan=False)) + "\n")
    sys.stdout.flush()
