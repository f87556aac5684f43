"""One job in the foreground, without a service: what ``kronoscope run`` starts.

    python -P -m worker.foreground --output DIR [--frames-to-stdout]

Standard input carries one line, a JSON object ``{"document", "paths", "allowed", "threads", "store",
"offline"}``, and is the *lifeline* from then on: the process that starts a run keeps it open, and its end (or
SIGINT, SIGTERM, or the death of the parent) stops the job. A line without its newline at end-of-file
is taken too; then only signals and the parent's death stop it.

Every frame is written into the folder and, with ``--frames-to-stdout``, echoed as a line of JSON. The
last one is ``finished`` (exit code 0), ``failed`` (2 usage, 3 transient, 4 fatal) or ``stopped`` (5).
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from catalog.frames import Divided, Failed, Finished, Frame, LogLine, Stopped, encode
from catalog.record import FieldError
from catalog.record_reader import read
from catalog.requests.assignment import Assignment
from catalog.requests.schedule import Schedule
from catalog.responses.reproduction import name_inputs
from worker.foreground.child_run import Stopper, run_child, trouble
from worker.foreground.output_folder import OutputFolder, OutputRefused, read_original
from worker.foreground.piece_runs import PieceRuns
from worker.process.attended_child import Last
from worker.process.child_process import EXECUTION
from worker.process.crash import EXIT_CODES, exit_code, failure_frame

_MAX_REQUEST_BYTES = 4 * 2**20
_CHECKPOINT_SECONDS = 60.0
_PASSED_ON = (
    "threads",
    "paths",
    "allowed",
    "store",
    "offline",
    "factors_path",
    "checkpoint_seconds",
    "cache_bytes",
    "estimate",
    "device",
)


class Echo:
    """Frames as lines on standard output, until they are no longer read."""

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


def _refused_at_once(document: Any, seconds: float | None, *, estimate: bool) -> tuple[str, str] | None:  # noqa: ANN401
    """Code and message of what no child needs to look at."""
    if seconds is not None and seconds <= 0:
        return "in_the_past", "the deadline in `schedule` has passed; give a later one, or none"
    if isinstance(document, Mapping) and document.get("series") is not None and not estimate:
        remedy = "submit it there, or leave `series` out"
        return "series_refused", f"`series` makes a job for each checkpoint, which a service does; {remedy}"
    return None


def run(request: Mapping[str, Any], output: Path, stopper: Stopper, echo: Echo, command: Sequence[str]) -> int:
    """Run one job into a folder."""
    document, schedule = _apart(request.get("document"))
    seconds = _seconds_left(schedule, time.time())
    refused = _refused_at_once(document, seconds, estimate=bool(request.get("estimate")))
    if refused is not None:
        return _refuse(echo, refused[1], code=refused[0])
    stated = {
        "allowed": {"factories": ["*"], "directories": ["*"]},
        "offline": False,
        "checkpoint_seconds": _CHECKPOINT_SECONDS,
        # as for a worker: pieces run one after another here, so that `auto` never takes it
        "decompose_round": os.environ.get("KRONOSCOPE_DECOMPOSE_ROUND", "auto"),
        "choose_threads": request.get("threads") is None,
        **{name: request[name] for name in _PASSED_ON if request.get(name) is not None},
        "document": document,
        "artifacts": output,
        "scratch": output,
    }
    try:
        assignment: Assignment = read(Assignment, stated, "")
        original = read_original(document, output)
        folder = OutputFolder(output, request, document, echo)
    except FieldError as error:
        return _refuse(echo, str(error), code="invalid_request")
    except OutputRefused as error:
        return _refuse(echo, str(error), code=error.code)
    folder.original = original
    if original is not None:
        threads = assignment.threads or original.manifest["environment"]["threads"]
        assignment = replace(assignment, threads=threads, choose_threads=False)
    assignment = replace(assignment, artifacts=folder.artifacts, scratch=folder.scratch, cache=folder.cache.told())
    overdue = threading.Event()

    def end_at_deadline() -> None:
        overdue.set()
        stopper.stop()

    timer = threading.Timer(seconds or 0, end_at_deadline)
    timer.daemon = True
    if seconds is not None:
        timer.start()
    attempt = partial(run_child, stopper=stopper, command=command)
    rounds = PieceRuns(folder, assignment, attempt)
    # what a killed run was divided into stays so
    last: Last | None = rounds.run()
    while last is None:
        told = replace(assignment, **rounds.finished(), plan=folder.plan or (original and original.plan))
        ended = attempt(told, folder.take)
        if isinstance(ended, Divided):
            folder.write(ended)
        last = rounds.run() if isinstance(ended, Divided) else ended
    stopper.ended()
    timer.cancel()
    folder.cache.close()
    if overdue.is_set() and isinstance(last, Stopped):
        message = "the job was stopped at its deadline; run it again with a later one, or none"
        last = failure_frame("usage", "deadline_exceeded", message, "/schedule")
    return _end(folder, last, echo)


def _end(folder: OutputFolder, last: Last, echo: Echo) -> int:
    if isinstance(last, Failed) and last.category == "usage" and folder.original is not None:
        last = replace(last, message=last.message + name_inputs(folder.original.manifest))
    if isinstance(last, Failed) and last.pointer == "/factors" and folder.pieces:
        damage = f"what a piece of the job has stored is damaged: {last.message.partition('; collect')[0]}"
        remedy = "run the document again, with --force where rows are left: all pieces are computed anew"
        last = replace(last, message=f"{damage}; {remedy}", pointer=None)
    failure = last if isinstance(last, Failed) else None
    state = "succeeded" if isinstance(last, Finished) else "failed" if failure else "cancelled"
    try:
        if isinstance(last, Finished):
            folder.write(last)
        folder.end(state, failure)
    except OSError as error:
        last = trouble(error)
    echo(last)
    return exit_code(last)


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


def _refuse(echo: Echo, message: str, code: str) -> int:
    echo(failure_frame("usage", code, message))
    return EXIT_CODES["usage"]


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
    """Run the job that one line on standard input describes."""
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
