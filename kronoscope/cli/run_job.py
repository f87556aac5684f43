"""A job in the foreground: start the worker's runner as a process, follow its frames, end it cleanly.

The runner's standard input is its lifeline: when this process ends, however it ends, the runner
stops the job and everything it started.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from catalog.analyses.analysis import RefusedAnalysis
from catalog.frames import (
    Failed,
    Finished,
    Frame,
    LayerDone,
    LogLine,
    Planned,
    Progress,
    Stopped,
    Summarised,
    decode,
)
from catalog.responses.remaining_time import RemainingTime
from kronoscope.cli.exit_codes import CATEGORIES, FATAL, STOPPED, fail, trace_lines
from kronoscope.cli.extras import require_extra
from kronoscope.cli.output import write_error
from kronoscope.display.progress import Display

_RUNNER = (sys.executable, "-P", "-m", "worker.foreground")
_END_SECONDS = 20.0


@dataclass
class Outcome:
    """The outcome of a run."""

    remaining: RemainingTime
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    """The plan of memory and seconds; empty before it is made."""
    failure: Failed | None = None
    refused: tuple[RefusedAnalysis, ...] = ()
    """Analyses that were refused while others were done."""
    finished: bool = False
    stopped: bool = False
    interrupted: bool = False
    last_output: list[str] = field(default_factory=list)
    """The last lines of the runner's own output, shown when it ends without a final frame."""


def run_job(request: Mapping[str, Any], output: Path, display: Display, *, verbose: bool = False) -> Outcome:
    """Run one job in a process of its own, and wait for it.

    Ctrl-C asks it to stop, a second one ends it at once; either way nothing runs on afterwards.
    """
    require_extra("worker", command="kronoscope plan" if request.get("estimate") else "kronoscope run")
    existed = os.path.lexists(output)
    outcome = Outcome(remaining=RemainingTime(_kinds(request["document"])))
    runner = subprocess.Popen(  # noqa: S603 - our own interpreter and module, no shell
        [*_RUNNER, "--output", str(output), "--frames-to-stdout"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # ctrl-C reaches us alone, and we say what happens
    )
    listener = threading.Thread(target=_listen, args=(runner.stderr, display, outcome, verbose), daemon=True)
    listener.start()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in previous:
            signal.signal(number, lambda *_: _interrupt(runner, outcome))
        _hand_over(runner, request)
        for frame in _frames(runner.stdout):
            _handle_frame(frame, display, outcome, verbose=verbose)
    finally:
        _end_runner(runner)
        for number, handler in previous.items():
            signal.signal(number, handler)
        listener.join(timeout=2)
    if _left_nothing(outcome) and not existed:
        shutil.rmtree(output, ignore_errors=True)
    return outcome


def _kinds(document: Mapping[str, Any]) -> list[str]:
    """Return the analyses of a document that is not checked yet."""
    kinds = document.get("kind")
    return [each for each in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(each, str)]


def _hand_over(runner: subprocess.Popen[bytes], request: Mapping[str, Any]) -> None:
    """Write the request and keep the pipe open: closing it stops the job."""
    if runner.stdin is not None:
        # closed by ctrl-C, or by a runner that has ended, which its frames report
        with contextlib.suppress(OSError, ValueError):
            runner.stdin.write(json.dumps(request, allow_nan=False).encode() + b"\n")
            runner.stdin.flush()


def _interrupt(runner: subprocess.Popen[bytes], outcome: Outcome) -> None:
    """Handle ctrl-C; in a signal handler no lock may be taken."""
    if outcome.interrupted:
        with contextlib.suppress(ProcessLookupError):
            runner.send_signal(signal.SIGINT)
        return
    outcome.interrupted = True
    os.write(2, b"\nstopping: the job ends at its next checkpoint (ctrl-C again: at once)\n")
    _close_lifeline(runner)


def _handle_frame(frame: Frame, display: Display, outcome: Outcome, *, verbose: bool) -> None:
    match frame:
        case Planned():
            outcome.plan = frame.plan
            outcome.remaining.take_plan(frame.plan)
        case Progress():
            left = outcome.remaining.take(frame.stage, frame.done, frame.total, time.monotonic())
            display.update(frame.stage, frame.done, frame.total, frame.unit, left)
        case LayerDone():
            outcome.rows.append({**frame.outcome, "observed": dict(frame.observed)})
        case Summarised():
            outcome.summary[frame.kind] = frame.summary
        case LogLine():
            if frame.level == "warning" or verbose:
                display.line(f"{frame.level}: {frame.message}")
        case _:
            _note_end(frame, outcome)


def _note_end(frame: Frame, outcome: Outcome) -> None:
    match frame:
        case Failed():
            outcome.failure = frame
        case Finished():
            outcome.finished = True
            outcome.refused = frame.refused
        case Stopped():
            outcome.stopped = True
        case _:
            pass


def _frames(pipe: IO[bytes] | None) -> Iterator[Frame]:
    """Yield frames until the pipe closes; lines that are not frames are skipped."""
    while pipe is not None and (line := pipe.readline()):
        with contextlib.suppress(ValueError):
            yield decode(line)


def _listen(pipe: IO[bytes] | None, display: Display, outcome: Outcome, verbose: bool) -> None:
    """Read the output of factories; it is shown on request, and kept in case of a crash."""
    while pipe is not None and (line := pipe.readline(8192)):
        text = line.decode(errors="replace").rstrip()
        outcome.last_output = [*outcome.last_output[-39:], text]
        if verbose:
            display.line(text)


def _close_lifeline(runner: subprocess.Popen[bytes]) -> None:
    if runner.stdin is not None:
        # a write that was interrupted half-way holds the buffer's lock
        with contextlib.suppress(OSError, RuntimeError):
            runner.stdin.close()


def _end_runner(runner: subprocess.Popen[bytes]) -> None:
    """Close the lifeline, wait, then kill the whole process group."""
    _close_lifeline(runner)
    try:
        runner.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        # the guardian sees its supervisor die and ends the computing group itself
        with contextlib.suppress(ProcessLookupError):
            os.killpg(runner.pid, signal.SIGKILL)
        runner.wait()


def _left_nothing(outcome: Outcome) -> bool:
    """Return whether the job was refused, so that a folder made for it is empty, unless another run fills it."""
    failure = outcome.failure
    return failure is not None and failure.category == "usage" and failure.code != "output_in_use" and not outcome.rows


def run_request(document: dict[str, Any], store: Path | None, *, offline: bool) -> dict[str, Any]:
    """Return the runner's request; every folder and factory may be named in the foreground.

    ``UnicodeEncodeError`` if the document names a path with bytes that no JSON holds.
    """
    json.dumps(document, ensure_ascii=False).encode()
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {
        "document": document,
        "paths": [str(Path.cwd())],
        "allowed": {"factories": ["*"], "directories": ["*"]},
        "store": str((store or cached / "kronoscope").absolute()),
        "offline": offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
    }


def require_success(outcome: Outcome, *, verbose: bool = False) -> None:
    """End the command where a run has not succeeded."""
    if (failure := outcome.failure) is not None:
        pointer = f"{failure.pointer} " if failure.pointer and "\n" not in failure.message else ""
        lines = [f"{pointer}{line}" for line in failure.message.split("\n")]
        # a caller's own code is shown whole on request, else by its calls alone
        whole = failure.category == "fatal" or (verbose and failure.trace)
        if whole and failure.detail:
            write_error(failure.detail)
        more = ["  (--verbose shows the whole traceback)"] if failure.trace and not whole else []
        fail(CATEGORIES[failure.category], [*lines, *trace_lines(failure.trace), *more])
    if outcome.stopped or outcome.interrupted:
        fail(STOPPED, ["the job was stopped; nothing runs on"])
    if not outcome.finished:
        said = [f"  {line}" for line in outcome.last_output[-15:]]
        fail(FATAL, ["the runner ended without a result; its last lines:", *said])
