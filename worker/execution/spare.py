"""The spare child: imports what a job needs, waits for its job, and forks the process that computes it.

    python -P -m worker.execution.spare --answers FD --frames FD --go FD --order FD

::

    guardian ─ this process, which waits ─ the child, within the job's limits

The process that was forked has one thread, and is held to the limits before it does anything else: as another user, in
namespaces, behind the filter of system calls. It then is what a new program would be. This process keeps no descriptor,
hands SIGTERM on, and ends as the child does. It never opens a device. Where a file that was imported has changed since,
or the job's environment is another one, the child is a new program after all.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from worker.execution.resolve import resolve
from worker.process.confinement import Confinement
from worker.process.guardian import NOT_STARTED, read_order
from worker.process.namespaces import HANDED_ON, attend

_READ_LATE = {"CUDA_VISIBLE_DEVICES", "HF_DATASETS_CACHE", "HF_HOME", "HOME", "TMPDIR"}
"""Variables of which nothing that was imported here keeps a value that a job would use."""
_PR_SET_DUMPABLE = 4  # linux/prctl.h
_CLOCK_SECONDS = 0.1
"""Step of the clocks of files."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Import, wait, and fork."""
    parser = argparse.ArgumentParser(prog="worker.execution.spare", description="Wait for a job; started by a worker.")
    for name in ("answers", "frames", "go", "order"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args(arguments)
    began = time.time()
    # threads that imports start inherit it, so that this one alone hears what it waits for
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    # this process has no limits: a child of the same user is to look into it no more than into a guardian
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    run = resolve("worker.execution.__main__:run")  # what takes the time
    files = imported_files()
    said = os.read(options.go, 64)
    if not said:
        os._exit(0)  # its guardian is gone, or ends it
    held = [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    if child := os.fork():
        attend(child, held)
    order = _enter(options.order, int(said))
    os.close(options.go)
    os.close(options.order)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    pipes = ["--answers", str(options.answers), "--frames", str(options.frames)]
    why = unfit(order["changed"], files, began)
    if not why:
        _change_environment(order["changed"])
        why = _unseen_device()
    if why:
        sys.stderr.write(f"what was imported beforehand is not used: {why}\n")
        sys.stderr.flush()
        command = [sys.executable, "-P", "-m", "worker.execution", *pipes]
        os.execve(sys.executable, command, order["environment"])  # noqa: S606 - no shell
    run(pipes)
    raise AssertionError("it ends this process")


def _enter(order_file: int, file_bytes: int) -> dict[str, Any]:
    """Read the order, and be held to its limits."""
    try:
        order = read_order(order_file)
        replace(Confinement.from_text(order["confinement"]), file_bytes=file_bytes).enter()
    except Exception as error:  # noqa: BLE001 - nothing of the job runs without its limits
        sys.stderr.write(f"the job's process cannot be held to its limits: {error}\n")
        sys.stderr.flush()
        os._exit(NOT_STARTED)
    return order


def imported_files() -> dict[str, int]:
    """Return the files of all imported modules, with the moment at which each last changed in nanoseconds."""
    files = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.startswith("/"):
            with contextlib.suppress(OSError):  # within an archive
                files[path] = Path(path).stat().st_ctime_ns
    return files


def unfit(changed: Mapping[str, str | None], files: Mapping[str, int], began: float) -> str:
    """Say why a job cannot be computed with what was imported; empty where it can.

    ``changed`` are the variables that differ in the job's environment, None where it has none; ``began`` is when the
    imports began, in seconds of the machine's clock.
    """
    if sys.modules["torch"].cuda.is_initialized() or opened_devices():
        return "a device was opened meanwhile"
    if read := changed.keys() - _READ_LATE:
        return f"the job's environment has another {', '.join(sorted(read))}"
    last = (began - _CLOCK_SECONDS) * 1e9
    for path, moment in files.items():
        try:
            if Path(path).stat().st_ctime_ns != moment or moment > last:
                return f"{path} has changed"
        except OSError as error:
            return f"{path}: {error.strerror}"
    return ""


def _change_environment(changed: Mapping[str, str | None]) -> None:
    for name, value in changed.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    tempfile.tempdir = None  # it may have been chosen by a variable that is another one now


def _unseen_device() -> str:
    """Say that the job has a GPU which CUDA does not show here: a new program says why, or finds it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") and not sys.modules["torch"].cuda.is_available():
        return "the job's GPU is not seen"
    return ""


def opened_devices() -> list[str]:
    """Return the device files of GPUs that this process has open or mapped."""
    opened = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            opened.append(str(each.readlink()))
    opened += [line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()]
    return sorted({each for each in opened if each.startswith(("/dev/nvidia", "/dev/dri", "/dev/kfd"))})


if __name__ == "__main__":
    main()
