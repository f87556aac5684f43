"""Progress of a job: bars on a terminal, a line now and then elsewhere, nothing for machines."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text
from typing_extensions import override

from catalog.responses.remaining_time import written_remaining

_QUIET_SECONDS = 1.0
"""A command that takes less time shows no bar."""
_LINE_SECONDS = 10.0


class Display:
    """An output for the progress of a command, of texts without markup; this one shows nothing, for machines."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None

    def update(self, stage: str, done: int, total: int | None, unit: str, eta_seconds: float | None = None) -> None:
        """Show the progress of a stage.

        Args:
            stage: Its name.
            done: Units that are done.
            total: Units in all; None where unknown.
            unit: Plural noun of the units.
            eta_seconds: Remaining seconds of the whole job; None where unknown.
        """

    def head(self, text: str) -> None:
        """Set the words that every line begins with: which job it is, and how far."""

    def line(self, text: str) -> None:
        """Show a line of text."""


class _RemainingColumn(ProgressColumn):
    """How long the whole job will still take, counting down since it was last said."""

    def render(self, task: Task) -> Text:
        ends = task.fields.get("ends")
        left = None if ends is None or task.finished else max(0.0, ends - time.monotonic())
        return Text("" if left is None else f"job: {written_remaining(left)} left", style="progress.remaining")


class BarDisplay(Display):
    """A display with a bar per stage, for terminals."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.fields[head]}"),
            _RemainingColumn(),
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            console=console,
            transient=False,
        )
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._begun = time.monotonic()
        self._shown = False
        self._head = ""

    @override
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shown:
            self._bars.stop()

    @override
    def update(self, stage: str, done: int, total: int | None, unit: str, eta_seconds: float | None = None) -> None:
        # one of unknown length pulses
        if stage not in self._tasks:
            for other in self._bars.tasks:
                # its last update may be from before its end
                total_units = max(other.completed, 1) if other.total is None else other.total
                self._bars.update(other.id, total=total_units, completed=total_units)
            self._tasks[stage] = self._bars.add_task(escape(stage), total=total, unit=unit, head="")
        ends = None if eta_seconds is None else time.monotonic() + eta_seconds
        self._bars.update(self._tasks[stage], completed=done, total=total, unit=unit, ends=ends, head=self._head)
        if not self._shown and time.monotonic() - self._begun > _QUIET_SECONDS:
            self._bars.start()
            self._shown = True

    @override
    def head(self, text: str) -> None:
        self._head = escape(text)

    @override
    def line(self, text: str) -> None:
        (self._bars.console if self._shown else self._console).print(
            escape(text), style="dim", soft_wrap=True, highlight=False
        )


class LineDisplay(Display):
    """A display with a line when a stage begins and every ten seconds, for logs and pipes."""

    def __init__(self, console: Console, quiet_seconds: float = 0.0) -> None:
        """Set up the display, which shows nothing in the first ``quiet_seconds``."""
        self._console = console
        self._stage: str | None = None
        self._ended = False
        self._said = 0.0
        self._from = time.monotonic() + quiet_seconds
        self._head = ""

    @override
    def update(self, stage: str, done: int, total: int | None, unit: str, eta_seconds: float | None = None) -> None:
        # if the stage is new or has ended, or ten seconds have passed since the last one
        now = time.monotonic()
        ended = total is not None and done >= total
        known = stage == self._stage and (self._ended or (not ended and now - self._said < _LINE_SECONDS))
        if now < self._from or known:
            return
        self._stage, self._said, self._ended = stage, now, ended
        # before anything is counted, a stage's name says more than "0"
        counted = f": {done}/{total} {unit}" if total is not None else f": {done} {unit}" if done else ""
        left = "" if eta_seconds is None or ended else f"{written_remaining(eta_seconds)} left"
        head = ", ".join(filter(None, [self._head, left if self._head else ""]))
        after = f", job: {left}" if left and not self._head else ""
        self.line(f"{head}{head and ' · '}{stage}{counted}{after}")

    @override
    def head(self, text: str) -> None:
        self._head = text

    @override
    def line(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True, highlight=False)


def display_for(console: Console, *, silent: bool = False) -> Display:
    """Return the display for a console, a context manager: bars on a terminal, else lines; or nothing if ``silent``."""
    if silent:
        return Display()
    return BarDisplay(console) if console.is_terminal else LineDisplay(console)


def notebook_display(*, silent: bool) -> Display:
    """Return the display for work in the caller's own process: nothing at all in its first second.

    Then bars where stderr is a terminal, lines in a notebook, nothing anywhere else.
    """
    console = Console(stderr=True)
    if silent or not (console.is_terminal or console.is_jupyter):
        return Display()
    if console.is_jupyter:
        return LineDisplay(Console(stderr=True, force_jupyter=False), _QUIET_SECONDS)
    return BarDisplay(console)
