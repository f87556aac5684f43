"""The child: computes one job and tells its parent about it in frames; writes nothing but artifacts.

    python -P -m worker.execution --answers FD --frames FD        (the assignment comes on standard input)

The last frame is ``finished`` (exit code 0), ``failed`` (2 usage, 3 transient, 4 fatal),
``stopped`` (5) or ``divided`` (6: it goes on when its pieces have ended). SIGTERM stops it at its next
checkpoint: a batch, a layer, a training step.
"""

import gc

gc.disable()  # modules that are loaded are no garbage: to look for some takes a seventh of the start

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from catalog.analyses.analysis import RefusedAnalysis
from catalog.frames import Divided, Failed, Finished, Stopped, Summarised, layer_frame
from catalog.record import plain
from catalog.requests.assignment import Assignment, read_assignment
from engine.analyses.layer_analysis import run_analyses
from engine.distributed import group
from engine.errors import StopRequested
from worker.execution.attempt import Attempt, StopFlag, begin_attempt
from worker.execution.failures import CallerCode, failure_of
from worker.execution.frame_pipe import FramePipe
from worker.execution.input_digests import factors_digest
from worker.execution.pieces.division import compute_piece
from worker.execution.ranks.rank_link import connect, read_assignment_text
from worker.execution.sources import open_inputs
from worker.process.crash import EXIT_CODES, exit_code

gc.freeze()
gc.enable()


def execute(assignment: Assignment, pipe: FramePipe, checkpoint: StopFlag) -> Finished | Divided:
    """Open the inputs of an attempt, analyse them, and return how that ended; the rows are sent as frames."""
    attempt = begin_attempt(assignment, pipe, checkpoint)
    opened = open_inputs(attempt)
    last = opened if isinstance(opened, (Finished, Divided)) else opened(_analyse(attempt))
    if isinstance(last, Finished):
        last = replace(last, **attempt.notes.as_frame())
    # an attempt that ends otherwise leaves it to the next; one that knows that there is none clears it
    shutil.rmtree(attempt.assignment.scratch, ignore_errors=True)
    group.stop()
    return last


def _analyse(attempt: Attempt) -> Finished:
    """Run all analyses of the document, or compute the attempt's piece."""
    workspace, pipe, piece = attempt.workspace, attempt.pipe, attempt.assignment.piece
    refused: tuple[RefusedAnalysis, ...] = ()
    with contextlib.ExitStack() as ending:
        if workspace.ports.cache is not None:
            ending.callback(workspace.ports.cache.close)
        if piece is not None:
            compute_piece(attempt, piece)
        else:
            refused = run_analyses(
                workspace,
                lambda row: pipe.send(layer_frame(row)),
                lambda kind, summary: pipe.send(Summarised(kind=kind, summary=plain(summary))),
            )
    for line in workspace.machine.curve.stages.exceeded():
        pipe.log("warning", line)
    curve = workspace.machine.curve.as_json(workspace.machine.device)
    workspace.ports.artifacts.save_json("memory_curve.json", curve)
    return Finished(
        refused=refused,
        factors_sha256=factors_digest(workspace.inputs.stored),
        against_sha256=factors_digest(workspace.inputs.stored_against),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute the job whose assignment stands on standard input."""
    parser = argparse.ArgumentParser(prog="worker.execution", description="Compute one job; started by its parent.")
    parser.add_argument("--frames", type=int, required=True, help="descriptor that frames are written to")
    parser.add_argument("--answers", type=int, help="descriptor that answers come from")
    descriptors = parser.parse_args(arguments)
    stop = StopFlag()
    stop.install()
    ranked = connect(descriptors.answers)
    pipe = ranked or FramePipe(descriptors.frames, descriptors.answers)
    callers = CallerCode()
    try:
        text = sys.stdin.buffer.read() if ranked is None else read_assignment_text()
        assignment = read_assignment(text)
        callers = CallerCode.of(assignment)
        last: Finished | Failed | Stopped | Divided = execute(assignment, pipe, stop)
    except StopRequested:
        last = Stopped()
    except BrokenPipeError:
        # the reader is gone: the parent has ended, and the guardian is about to end this process
        return EXIT_CODES["fatal"]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the parent gets it
        last = failure_of(error, callers)
    pipe.send(last)
    return exit_code(last)


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Compute the job and end this process."""
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    # frames are out and files are synced; a caller's threads and exit hooks have no say in how this ends
    os._exit(code)


if __name__ == "__main__":
    run()
