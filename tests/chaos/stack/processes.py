"""One process of a stack, that can be killed, paused and started again, and what /proc tells of those below it."""

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tests.machine.stopwatch import Stopwatch

T = TypeVar("T")

END_SECONDS = 300


class Part:
    """An API or a worker: a command, its environment, and the process that runs it now, in a session of its own."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.environment = dict(environment)
        self.started = 0
        self._command = list(command)
        self._folder = folder
        self._log_from = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def run_with(self, command: Sequence[str], more: Mapping[str, str]) -> None:
        """Run another command at the next start, with more in its environment."""
        self._command = list(command)
        self.environment |= more

    def start(self, **more: str) -> None:
        """Start a process; ``more`` of its environment stays for later starts."""
        assert not self.alive, f"{self.name} runs already"
        self.environment |= more
        self._log_from = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self.environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.started += 1

    def send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9; returns when the process is gone."""
        self.send(signal.SIGKILL)
        self.ended(END_SECONDS)

    def pause(self) -> None:
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def terminate(self) -> None:
        self.send(signal.SIGTERM)

    def restart(self, **more: str) -> None:
        self.kill()
        self.start(**more)

    def ended(self, seconds: float) -> int:
        """Its exit code, once it has ended by itself."""
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {seconds:g} s; it said\n{self.tail()}") from None

    def said(self, text: str) -> int:
        """How many lines of the process that runs now hold this."""
        return sum(text in line for line in self.lines(self._log_from))

    def lines(self, start: int = 0) -> list[str]:
        """What it has logged, of every process it ever was."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace").splitlines()

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.lines()[-lines:])

    def close(self) -> None:
        """End it whatever state it is in; its children's guardians see that."""
        for number in (signal.SIGCONT, signal.SIGKILL):
            self.send(number)
        if self._process is not None:
            self._process.wait(END_SECONDS)


def below(pid: int) -> list[int]:
    """Every descendant's pid, parents first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                if int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == pid:
                    found += [int(entry.name), *below(int(entry.name))]
    return found


def command_of(pid: int) -> str:
    """Its command line; empty for one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def gone(pids: Sequence[int], seconds: float) -> bool:
    """Whether all of them end within the time."""
    watch = Stopwatch()
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            while not select.select([handle], [], [], min(0.1, seconds))[0]:
                if watch.seconds() > seconds:
                    return False
        finally:
            os.close(handle)
    return True
