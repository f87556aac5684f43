"""One job in the foreground, without a service: what ``kronoscope run`` starts.

    python -P -m worker.foreground --output DIR [--frames-to-stdout]

Standard input carries one line, a JSON object ``{"document", "paths", "allowed", "threads", "store",
"offline"}``, and is the *lifeline* from then on: whoever starts a run keeps it open, and its end (or
SIGINT, SIGTERM, or the death of the parent) stops the job. A line without its newline at end-of-file
is taken too; then only signals and the parent's death stop it.

Every frame is written into the folder and, with ``--frames-to-stdout``, echoed as a line of JSON. The
last one is ``finished`` (exit code 0), ``failed`` (2 usage, 3 transient, 4 fatal) or ``stopped`` (5).
"""

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from catalog.cgroups import oom_kills
from catalog.frames import Failed, Finished, Frame, LogLine, Stopped, encode
from catalog.record import FieldError
from catalog.schedule import Schedule
from worker.foreground.output_folder import OutputFolder, OutputRefused
from worker.process.artifact_check import ArtifactMismatch
from worker.process.child_process import EXECUTION, STOP_GRACE_SECONDS, Child, MalformedFrame
from worker.process.crash import LastPosition, Signature, crash_failure, ending
from worker.process.log_lines import LogFormatter

EXIT_STOPPED = 5
_EXIT_CODES = {"usage": 2, "transient": 3, "fatal": 4}
_MAX_REQUEST_BYTES = 4 * 2**20
_PARENT_POLL_SECONDS = 0.5
_CHECKPOINT_SECONDS = 60.0
_PASSED_ON = (
    "document",
    "threads",
    "paths",
    "allowed",
    "store",
    "offline",
    "factors_path",
    "checkpoint_seconds",
    "cache",
    "cache_bytes",
    "job",
    "estimate",
    "device",
)


Last = Finished | Failed | Stopped


class Stopper:
    """The one clean stop of the child, on the end of the lifeline, on a signal or on the parent's death."""

    def __init__(self, lifeline: int | None) -> None:
        """Set up the stop; nothing is watched before `install`.

        Args:
            lifeline: A descriptor that ends when the parent is gone; None to go by signals and the parent's id alone.
        """
        self.asked = threading.Event()
        self._lifeline = lifeline
        self._parent = os.getppid()
        self._signalled, self._signal = os.pipe()
        self._child: Child | None = None
        self._ended = threading.Event()

    def install(self) -> None:
        """Take SIGINT and SIGTERM; a handler only writes into a pipe, so it can never meet a held lock."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os.write(self._signal, b"!"))
        threading.Thread(target=self._watch, name="stopper", daemon=True).start()

    def guard(self, child: Child) -> None:
        """Name the child to stop; if a stop was asked for earlier, the child is stopped at once.

        Args:
            child: The child.
        """
        self._child = child
        if self.asked.is_set():
            child.terminate()

    def ended(self) -> None:
        """There is nothing left to stop."""
        self._ended.set()

    def stop(self) -> None:
        """Ask the child to stop; end it when it does not."""
        if self.asked.is_set():
            return
        self.asked.set()
        if self._child is not None:
            self._child.terminate()
        threading.Thread(target=self._insist, name="insist", daemon=True).start()

    def _insist(self) -> None:
        if not self._ended.wait(STOP_GRACE_SECONDS) and self._child is not None:
            self._child.kill()

    def _watch(self) -> None:
        sources = [self._signalled] if self._lifeline is None else [self._signalled, self._lifeline]
        while not self._ended.is_set():
            readable, _, _ = select.select(sources, [], [], _PARENT_POLL_SECONDS)
            if self._signalled in readable:
                os.read(self._signalled, 16)
                if self.asked.is_set() and self._child is not None:
                    self._child.kill()  # asked twice: now
                self.stop()
            if self._lifeline in readable and not os.read(self._lifeline or 0, 4096):
                sources = [self._signalled]
                self.stop()
            if os.getppid() != self._parent:
                self.stop()


class Echo:
    """Frames as lines on standard output, until nobody reads them any more."""

    def __init__(self, stopper: Stopper, *, wanted: bool) -> None:
        self._stopper = stopper
        self._wanted = wanted
        self._gone = False

    def __call__(self, frame: Frame) -> None:
        """Write one frame; a reader who is gone stops the run."""
        if not self._wanted:
            if isinstance(frame, LogLine) and frame.level != "debug":
                sys.stderr.write(f"{frame.level}: {frame.message}\n")
            if isinstance(frame, Failed):
                sys.stderr.write(f"error: {frame.message}\n")
            return
        if self._gone:
            return
        line = memoryview(encode(frame))
        try:
            while line:
                line = line[os.write(1, line) :]
        except OSError:
            self._gone = True
            self._stopper.stop()


def run(request: Mapping[str, Any], output: Path, stopper: Stopper, echo: Echo, command: Sequence[str]) -> int:
    """Run one job into a folder.

    Args:
        request: The document, and what the run may use.
        output: The folder for the results.
        stopper: The stop of the child.
        echo: Receives every frame.
        command: The child's program.

    Returns:
        The exit code.
    """
    document, schedule = _apart(request.get("document"))
    seconds = _seconds_left(schedule, time.time())
    if seconds is not None and seconds <= 0:
        return _refuse(echo, "the deadline in `schedule` has passed; give a later one, or none", code="in_the_past")
    try:
        folder = OutputFolder(output, document, replace=request.get("replace") is True)
    except OutputRefused as error:
        return _refuse(echo, str(error), code="output_refused")
    assignment = {
        "completed": [],
        "paths": [],
        "allowed": {"factories": ["*"], "directories": ["*"]},
        "threads": None,
        "offline": False,
        "factors_path": None,
        "checkpoint_seconds": _CHECKPOINT_SECONDS,
        **{name: request[name] for name in _PASSED_ON if name in request},
        "document": document,
        "artifacts": str(folder.artifacts),
        "scratch": str(folder.scratch),
        "plan": folder.plan,
    }
    overdue = threading.Event()

    def end_at_deadline() -> None:
        overdue.set()
        stopper.stop()

    timer = threading.Timer(seconds or 0, end_at_deadline)
    timer.daemon = True
    last_position, kills = LastPosition(), oom_kills()
    with contextlib.closing(Child.start(assignment, sys.stderr.fileno(), os.environ, command)) as child:
        stopper.guard(child)
        if seconds is not None:
            timer.start()
        try:
            last = _follow(child, folder, echo, last_position, LogFormatter(document))
        except (MalformedFrame, ArtifactMismatch, OSError) as error:
            child.kill()
            last = _trouble(error)
        code = child.wait()
    stopper.ended()
    timer.cancel()
    if overdue.is_set() and (last is None or isinstance(last, Stopped)):
        last = _overdue()
    if last is None and stopper.asked.is_set():
        last = Stopped()
    if last is None:
        signature = Signature(signal=ending(code), stage=last_position.stage, layer=last_position.layer)
        last = replace(crash_failure(signature, None, exhausted=oom_kills() > kills), category="fatal")
    return _end(folder, last, echo)


def _follow(
    child: Child, folder: OutputFolder, echo: Echo, last_position: LastPosition, formatter: LogFormatter
) -> Last | None:
    """Write and echo every frame; return the last one, which is echoed when the folder is complete."""
    last: Last | None = None
    for frame in child.frames():
        last_position.follow(frame)
        if isinstance(frame, (Finished, Failed, Stopped)):
            last = frame
            continue
        folder.take(frame)
        echo(frame)
        for line in formatter.lines(frame):
            echo(line)
    return last


def _end(folder: OutputFolder, last: Last, echo: Echo) -> int:
    failure = last if isinstance(last, Failed) else None
    state = "succeeded" if isinstance(last, Finished) else "failed" if failure else "cancelled"
    try:
        if isinstance(last, Finished):
            folder.take(last)
        folder.end(state, failure)
    except OSError as error:
        last = _trouble(error)
    echo(last)
    if isinstance(last, Failed):
        return _EXIT_CODES[last.category]
    return 0 if isinstance(last, Finished) else EXIT_STOPPED


def _apart(document: Any) -> tuple[Any, Schedule]:  # noqa: ANN401 - the child has not judged it yet
    """The document as a service stores it, and its schedule; one that is refused stays for the child to refuse."""
    if not isinstance(document, dict) or "schedule" not in document:
        return document, Schedule()
    try:
        schedule = Schedule(**document["schedule"])
    except (TypeError, AttributeError, FieldError):
        return document, Schedule()
    return {name: value for name, value in document.items() if name != "schedule"}, schedule


def _seconds_left(schedule: Schedule, now: float) -> float | None:
    """Until the deadline, from ``now`` in seconds since 1970; None without one."""
    moment = schedule.deadline_at
    return schedule.within_seconds if moment is None else moment.timestamp() - now


def _overdue() -> Failed:
    message = "the job was stopped at its deadline; run it again with a later one, or none"
    return Failed(
        category="usage", code="deadline_exceeded", message=message, pointer="/schedule", layer=None, detail=None
    )


def _trouble(error: Exception) -> Failed:
    """What went wrong on our side of the pipe."""
    if isinstance(error, OSError):
        code, message = "output_failed", f"the output folder refused a write: {error.strerror}; make room in it"
    elif isinstance(error, ArtifactMismatch):
        code, message = "artifact_damaged", f"{error}; run the job again"
    else:
        code, message = "malformed_frame", f"{error}; a factory that writes to foreign file descriptors would do this"
    return Failed(category="fatal", code=code, message=message, pointer=None, layer=None, detail=None)


def _refuse(echo: Echo, message: str, code: str) -> int:
    echo(Failed(category="usage", code=code, message=message, pointer=None, layer=None, detail=None))
    return _EXIT_CODES["usage"]


def _read_request(descriptor: int) -> tuple[bytes, bool]:
    """The first line, read without buffering so that what follows stays the lifeline's; and whether it ended."""
    raw = bytearray()
    while len(raw) <= _MAX_REQUEST_BYTES:
        chunk = os.read(descriptor, 65_536)
        if not chunk:
            return bytes(raw), False
        raw += chunk
        if b"\n" in chunk:
            return bytes(raw).partition(b"\n")[0], True
    raise ValueError(f"the request is longer than {_MAX_REQUEST_BYTES:,} bytes")


def main(arguments: Sequence[str] | None = None, command: Sequence[str] = EXECUTION) -> int:
    """Run the job that one line on standard input describes.

    Args:
        arguments: The command line without the program's name; None for that of the process.
        command: The child's program.

    Returns:
        The exit code, as `run` returns it; that of a usage error if the line is not a request.
    """
    parser = argparse.ArgumentParser(prog="worker.foreground", description="Run one job into a folder.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--frames-to-stdout", action="store_true")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the stopper stands there is nothing to stop cleanly
    try:
        raw, open_still = _read_request(0)
        request = json.loads(raw)
        if not isinstance(request, dict) or "document" not in request:
            raise ValueError("it must be one line with a JSON object that has `document`")  # noqa: TRY301 - one sentence below serves every fault of the line
    except (ValueError, RecursionError) as error:
        echo = Echo(Stopper(None), wanted=options.frames_to_stdout)
        return _refuse(echo, f"standard input holds no request: {error}", code="invalid_request")
    stopper = Stopper(0 if open_still else None)
    stopper.install()
    return run(request, options.output, stopper, Echo(stopper, wanted=options.frames_to_stdout), command)


if __name__ == "__main__":
    sys.exit(main())
