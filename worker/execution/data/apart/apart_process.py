"""A process apart: a program of ours that reads one foreign file, bounded by the kernel and by a clock.

A library that reads a foreign file may take any memory and time, or crash, and none of that ends the job's process.
Each message is JSON after its length in 8 bytes, little-endian; each has one reply.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from worker.execution.files.open_files import ReadableFile

_LOOK_SECONDS = 0.2
_PASSED = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "VIRTUAL_ENV")


class ApartFault(Exception):
    """The file's fault, as a part of a sentence: the program refuses it, or ended, or took too long."""

    def __init__(self, message: str, *, exhausted: bool = True) -> None:
        super().__init__(message)
        self.exhausted = exhausted
        """Whether a limit has ended it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of a process apart."""

    memory_bytes: int
    reply_seconds: float
    """For one reply, on a machine that is busy with other things."""
    reply_bytes: int
    processor_seconds: int | None = None
    """Of the whole process; None sets no limit."""


class ApartProcess:
    """A program that runs apart; ``start`` makes one."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits, checkpoint: Callable[[], None]) -> None:
        self._process = process
        self._limits = limits
        self._checkpoint = checkpoint

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        module: str,
        path: ReadableFile,
        limits: Limits,
        checkpoint: Callable[[], None],
        environment: Mapping[str, str],
    ) -> "Iterator[ApartProcess]":
        """Start the program with a descriptor of a file, within the limits from its start on, and end it at last.

        ``checkpoint`` is called while a reply is awaited; ``environment`` stands beside what every program needs.
        """
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        with path.open("rb") as file:
            options = {
                "file": file.fileno(),
                "bytes": limits.memory_bytes,
                "seconds": limits.processor_seconds or 0,
                "parent": os.getpid(),
            }
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module, no shell
                (sys.executable, "-P", "-m", module, *(f"--{name}={value}" for name, value in options.items())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[file.fileno()],
                # one arena, as each thread's own would count as memory
                env={**passed, "MALLOC_ARENA_MAX": "1", **environment},
            )
        try:
            yield cls(process, limits, checkpoint)
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def ask(self, message: object) -> Any:  # noqa: ANN401 - each message has its own reply
        """Send a message, and return its reply; ``ApartFault`` if there is none, or it is an error."""
        content = json.dumps(message).encode()
        deadline = time.monotonic() + self._limits.reply_seconds
        assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
        try:
            self._process.stdin.write(len(content).to_bytes(8, "little") + content)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
        size = int.from_bytes(self._read(8, deadline), "little")
        if size > self._limits.reply_bytes:
            raise ApartFault(f"it gives {size:,} bytes at a time")
        reply = json.loads(self._read(size, deadline))
        if isinstance(reply, dict) and "error" in reply:
            raise ApartFault(reply["error"], exhausted=reply["exhausted"])
        return reply

    def _read(self, size: int, deadline: float) -> bytearray:
        assert self._process.stdout is not None  # noqa: S101 - a pipe was asked for
        descriptor = self._process.stdout.fileno()
        found = bytearray()
        while len(found) < size:
            self._checkpoint()
            if time.monotonic() > deadline:
                raise ApartFault(f"it takes more than {self._limits.reply_seconds:g} s")
            if not select.select([descriptor], [], [], _LOOK_SECONDS)[0]:
                continue
            part = os.read(descriptor, min(size - len(found), 2**20))
            if not part:
                raise self._ended()
            found += part
        return found

    def _ended(self) -> ApartFault:
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return ApartFault(f"it takes more than {self._limits.processor_seconds} s of a processor")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        most = self._limits.memory_bytes // 2**20
        return ApartFault(f"its process ended ({how}), as it does when it needs more than {most:,} MiB")
