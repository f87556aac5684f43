"""The program of a process apart: it enters its limits, and then answers messages until its input ends."""

import argparse
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MOST_MESSAGE_CHARACTERS = 300
Answer = Callable[[Any], Any]


class Start(NamedTuple):
    """How a program was started."""

    descriptor: int
    """The open file."""
    memory_bytes: int


def enter_limits(limit: int) -> Start:
    """Read the command line, and bind this process to its limits; ``SystemExit`` if the parent has ended already.

    ``limit`` is ``RLIMIT_AS`` for the whole address space, or ``RLIMIT_DATA`` for what is mapped beyond what there is.
    """
    parser = argparse.ArgumentParser(description="Read a foreign file; started by the child of a job.")
    parser.add_argument("--file", type=int, required=True, help="descriptor of the file")
    parser.add_argument("--bytes", type=int, required=True, help="most bytes of memory")
    parser.add_argument("--seconds", type=int, required=True, help="most seconds of a processor; 0 sets no limit")
    parser.add_argument("--parent", type=int, required=True, help="the process that it ends with")
    given = parser.parse_args()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != given.parent:
        raise SystemExit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if given.seconds:
        _lower(resource.RLIMIT_CPU, given.seconds)
    if sys.platform == "linux":
        _lower(limit, given.bytes + (_data_bytes() if limit == resource.RLIMIT_DATA else 0))
    return Start(descriptor=given.file, memory_bytes=given.bytes)


def serve(first: Answer, then: Answer, memory_bytes: int) -> int:
    """Answer the first message, and all others, until the standard input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # what a library prints is not a message
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answer = first
    while (message := _message(sys.stdin.buffer)) is not None:
        content = _answered(answer, message, memory_bytes)
        replies.write(len(content).to_bytes(8, "little"))
        replies.write(content)
        replies.flush()
        answer = then
    return 0


def end(code: int) -> None:
    """End this process; nothing of a library has a say in how."""
    sys.stdout.flush()
    os._exit(code)


def _lower(limit: int, most: int) -> None:
    hard = resource.getrlimit(limit)[1]
    most = most if hard == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(limit, (most, most))


def _data_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmData"].split()[0]) * 1024


def _answered(answer: Answer, message: Any, memory_bytes: int) -> bytes:  # noqa: ANN401 - decoded from JSON
    try:
        return json.dumps(answer(message), ensure_ascii=False).encode()
    except BaseException as error:  # noqa: BLE001 - a panic of Rust is not an Exception
        what = str(error)[:_MOST_MESSAGE_CHARACTERS] or type(error).__name__
        exhausted = isinstance(error, MemoryError) or "bad_alloc" in what
        if exhausted:
            what = f"it needs more than {memory_bytes // 2**20:,} MiB"
        return json.dumps({"error": what, "exhausted": exhausted}).encode()


def _message(stream: BinaryIO) -> Any:  # noqa: ANN401 - decoded from JSON
    size = stream.read(8)
    return json.loads(stream.read(int.from_bytes(size, "little"))) if len(size) == 8 else None
