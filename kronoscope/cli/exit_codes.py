"""The exit codes of the command line, and how a command ends with one.

0 done; 1 a fault of this program; 2 the input or its use is wrong; 3 the service (or the machine) cannot do it now;
4 a failure that an operator must look into; 5 stopped or cancelled; 6 done in part: one of several analyses was
refused, or a part of the model that the loss depends on was not measured, though the document names no
`collection.min_coverage` that would do.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import typer

from catalog.analyses.analysis import RefusedAnalysis
from catalog.responses.coverage import CoverageView
from catalog.responses.views import CallerFrame, JobView
from kronoscope.cli.documents import DocumentUnreadable
from kronoscope.cli.extras import NotInstalled
from kronoscope.cli.output import OutputFailed, write_error
from kronoscope.cli.run_folder import NoRun
from kronoscope.cli.serve import ServiceFailed
from kronoscope.client.client import ClientError, DownloadFailed, ServiceUnreachable

SHORT_ID = 12
"""Characters of the end of an id that are shown for the whole."""
OK, INTERNAL, USAGE, TRANSIENT, FATAL, STOPPED, PARTIAL = range(7)
CATEGORIES = {"usage": USAGE, "transient": TRANSIENT, "fatal": FATAL}
"""The exit code of a job that failed, by the category of its failure."""


def fail(code: int, lines: Sequence[str]) -> NoReturn:
    """Print each fault on standard error, and end the command."""
    raise typer.Exit(_report_errors(code, lines))


def trace_lines(trace: Sequence[CallerFrame]) -> list[str]:
    """Return a line for each call in a factory's own code that a job failed under, the innermost last."""
    return [f"  {call.module}:{call.line} in {call.function}" for call in trace]


def require_whole(measured: CoverageView | None, refused: Sequence[RefusedAnalysis] | None) -> None:
    """End the command with a code of its own where the job was done in part."""
    if refused or (measured is not None and measured.status == "partial"):
        raise typer.Exit(PARTIAL)


def end_as(job: JobView, rows: int | None = None) -> None:
    """End the command as the job has ended: with its failure, who cancelled it, or a code where it was done in part.

    Args:
        rows: Rows of layers that it has left; None where they were not counted.
    """
    if job.state == "failed" and job.failure is not None:
        pointer = f"{job.failure.pointer} " if job.failure.pointer else ""
        lines = [f"{pointer}{job.failure.message}", *trace_lines(job.failure.trace)]
        fail(CATEGORIES.get(job.failure.category, FATAL), lines)
    if job.state == "cancelled":
        fail(STOPPED, [_cancellation(job, rows)])
    if job.state == "succeeded":
        require_whole(job.coverage, job.refused)


def end_run(job: JobView, rows: int) -> None:
    """End the command as a foreground run has ended, whose folder is the id of ``job``.

    Args:
        rows: Rows of layers that it has left.
    """
    if job.state != "cancelled":
        end_as(job)
        return
    at = "" if job.finished_at is None else f" at {job.finished_at[:19].replace('T', ' ')} UTC"
    kept = f"{rows:,} rows are kept" if rows else "no layer had been measured"
    again = f"`kronoscope run DOCUMENT -o {shlex.quote(job.id)}` goes on with it"
    why = "by ctrl-C, a signal, or the end of the process that began it"
    fail(STOPPED, [f"the run was stopped before its end{at}, {why}; {kept}; {again}"])


def _cancellation(job: JobView, rows: int | None) -> str:
    """Return a sentence on who ended a job, when, what is kept and how to go on."""
    by = f", with the API key {job.cancel_requested_by}" if job.cancel_requested_by else ""
    at = "" if job.cancel_requested_at is None else f"{by}, at {job.cancel_requested_at[:19].replace('T', ' ')} UTC"
    short = job.id[-SHORT_ID:]
    many = "what it had measured is" if rows is None else f"{rows:,} rows are"
    kept = "no layer had been measured" if rows == 0 else f"{many} kept (`kronoscope results {short}`)"
    return f"the job was cancelled{at}; {kept}; `kronoscope rerun {short}` starts it again"


def run_command(command: Callable[[], object]) -> int:
    """Run a command, and turn its errors into sentences and an exit code."""
    try:
        try:
            command()
        finally:
            sys.stdout.flush()  # so that its faults are this command's, and not the interpreter's
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK
    except KeyboardInterrupt:
        return 130  # as shells have it
    except ClientError as error:
        may_pass = isinstance(error, (ServiceUnreachable, DownloadFailed)) or error.status == 429 or error.status >= 500
        return _report_errors(TRANSIENT if may_pass else USAGE, error.lines)
    except (DocumentUnreadable, NoRun, NotInstalled, OutputFailed, ServiceFailed) as error:
        return _report_errors(TRANSIENT if isinstance(error, (OutputFailed, ServiceFailed)) else USAGE, [str(error)])
    except UnicodeEncodeError as error:
        near = ascii(error.object[max(0, error.start - 40) : error.end])
        return _report_errors(USAGE, [f"{near} holds a byte that is not text in UTF-8; name it otherwise"])
    return OK


def _report_errors(code: int, lines: Sequence[str]) -> int:
    for line in lines:
        write_error(f"error: {line}")
    return code
