"""Show how far a job is: bars on a terminal, a line now and then elsewhere, nothing for machines."""

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

_QUIET_SECONDS = 1.0
"""What is over sooner needs no bar."""
_LINE_SECONDS = 10.0


class Display(Protocol):
    """What a command tells while it waits."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def update(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """A stage is so far; ``total`` may be unknown."""

    def line(self, text: str) -> None:
        """Something worth a line of its own."""


class BarDisplay:
    """A bar per stage, on a terminal."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=False,
        )
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._begun = time.monotonic()
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shown:
            self._bars.stop()

    def update(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """Move the stage's bar; one of unknown length pulses."""
        if stage not in self._tasks:
            for other in self._bars.tasks:
                # what was seen of it last may lie some time back
                whole = max(other.completed, 1) if other.total is None else other.total
                self._bars.update(other.id, total=whole, completed=whole)
            self._tasks[stage] = self._bars.add_task(escape(stage), total=total, unit=unit)
        self._bars.update(self._tasks[stage], completed=done, total=total, unit=unit)
        if not self._shown and time.monotonic() - self._begun > _QUIET_SECONDS:
            self._bars.start()
            self._shown = True

    def line(self, text: str) -> None:
        """Print above the bars."""
        (self._bars.console if self._shown else self._console).print(
            escape(text), style="dim", soft_wrap=True, highlight=False
        )


class LineDisplay:
    """A line when a stage begins and every ten seconds: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage: str | None = None
        self._said = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None

    def update(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """Say it if it is news."""
        now = time.monotonic()
        ended = total is not None and done >= total
        if stage == self._stage and not ended and now - self._said < _LINE_SECONDS:
            return
        self._stage, self._said = stage, now
        # before anything is counted, a stage's name says more than "0"
        counted = f" {done}/{total} {unit}" if total is not None else f" {done} {unit}" if done else ""
        self.line(f"{stage}:{counted}")

    def line(self, text: str) -> None:
        """One line, whatever it holds."""
        self._console.print(escape(text), soft_wrap=True, highlight=False)


class SilentDisplay:
    """Nothing: the output is for a machine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None

    def update(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """Keep quiet."""

    def line(self, text: str) -> None:
        """Keep quiet."""


def display_for(console: Console, *, silent: bool = False) -> Display:
    """The display that fits where the output goes."""
    if silent:
        return SilentDisplay()
    return BarDisplay(console) if console.is_terminal else LineDisplay(console)
