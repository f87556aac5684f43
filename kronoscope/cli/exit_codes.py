"""The exit codes of the command line, and how a command ends with one.

0 done; 1 a fault of this program; 2 the input or its use is wrong; 3 the service (or the machine) cannot do it now;
4 a failure that an operator must look into; 5 stopped or cancelled; 6 done in part: one of several analyses was
refused, or a part of the model that the loss depends on was not measured, though the document names no
`collection.min_coverage` that would do.
"""

from collections.abc import Callable, Sequence
from typing import NoReturn

import typer

from catalog.analyses.analysis import RefusedAnalysis
from catalog.responses.caller_frame import CallerFrame
from catalog.responses.coverage import CoverageView
from kronoscope.cli.documents import DocumentUnreadable
from kronoscope.cli.extras import NotInstalled
from kronoscope.cli.output import write_error
from kronoscope.cli.run_folder import NoRun
from kronoscope.cli.serve import ServiceFailed
from kronoscope.client.client import ClientError, DownloadFailed, ServiceUnreachable

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


def run_command(command: Callable[[], object]) -> int:
    """Run a command, and turn its errors into sentences and an exit code."""
    try:
        command()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK
    except ClientError as error:
        may_pass = isinstance(error, (ServiceUnreachable, DownloadFailed)) or error.status == 429 or error.status >= 500
        return _report_errors(TRANSIENT if may_pass else USAGE, error.lines)
    except (DocumentUnreadable, NoRun, NotInstalled, ServiceFailed) as error:
        return _report_errors(TRANSIENT if isinstance(error, ServiceFailed) else USAGE, [str(error)])
    return OK


def _report_errors(code: int, lines: Sequence[str]) -> int:
    for line in lines:
        write_error(f"error: {line}")
    return code
