"""A tenant's model whose code attacks whoever is beside it, each job in another way, and then computes or dies."""

import contextlib
import glob
import os
import signal
import time
from pathlib import Path

from torch import nn

FIRST_OF_JOBS = 20_000
_SECONDS = 2.0


def _others() -> list[int]:
    """Processes of other jobs, and of the service."""
    found = []
    for each in glob.glob("/proc/[0-9]*/cmdline"):  # noqa: PTH207 - as short as an attacker writes
        with contextlib.suppress(OSError):
            if b"kronoscope" in (text := Path(each).read_bytes()) or b"worker" in text:
                found.append(int(each.split("/")[2]))
    return [each for each in found if each not in (os.getpid(), os.getppid())]


def _end_everybody(_: str) -> None:
    for process in (-1, *_others()):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _stop_everybody(_: str) -> None:
    for process in _others():
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGSTOP)
            os.setpriority(os.PRIO_PROCESS, process, 19)


def _write_into_everything(root: str) -> None:
    """Zeros over whatever can be reached of files of others: checkpoints, artifacts, objects, caches."""
    for place in (root, *(f"/proc/{process}/cwd" for process in _others())):
        for folder, _, names in os.walk(place):
            for name in names:
                with contextlib.suppress(OSError), Path(folder, name).open("r+b") as file:
                    file.write(bytes(64))
            with contextlib.suppress(OSError):
                Path(folder).rename(f"{folder}-moved")


def _flood(_: str) -> None:
    """Whatever descriptor takes it: frames, output, a lock of somebody's."""
    for number in range(3, 64):
        for _ in range(200):
            with contextlib.suppress(OSError):
                os.set_blocking(number, False)
                os.write(number, b'{"frame": "finished"}\n' + bytes(1000))


def _start_processes(_: str) -> None:
    children = []
    with contextlib.suppress(OSError):
        for _ in range(200):
            child = os.fork()
            if child == 0:
                os.setsid()
                time.sleep(60)
                os._exit(0)
            children.append(child)


_ATTACKS = (_end_everybody, _stop_everybody, _write_into_everything, _flood, _start_processes)


def make(number: int, root: str) -> nn.Module:
    if os.getuid() < FIRST_OF_JOBS:
        raise PermissionError("this runs as a job's own user alone: as any other it would end what is not the test's")
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        _ATTACKS[number % len(_ATTACKS)](root)
        time.sleep(0.1)
    if number % 3 == 0:
        os.abort()
    return nn.Linear(12, 5)
