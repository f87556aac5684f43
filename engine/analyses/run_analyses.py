"""Runs of several analyses over one collection: what one of them refuses costs the others nothing.

::

    an error of the collection, which all share        ends the job
    other data than the collection saw                 ends the job: which of them its factors are of is unknown
    a usage error of one analysis                      its refusal; the next analysis begins
    a usage error of the only one, or of every one     ends the job, with the first
    any other error                                    ends the job
    an error of a job over several ranks               ends the job: the others may wait within the same analysis
"""

import pkgutil
import traceback
from collections.abc import Callable
from typing import Any

from catalog import ANALYSES
from catalog.analyses.analysis import LayerResult, RefusedAnalysis
from engine.analyses.layer_analysis import LayerAnalysis
from engine.collect import JobFactors
from engine.errors import DataDiffer, UsageError
from engine.workspace import Workspace


def run_analyses(
    workspace: Workspace, take_row: Callable[[LayerResult], None], take_summary: Callable[[str, Any], None]
) -> tuple[RefusedAnalysis, ...]:
    """Run the job's analyses one after another, in the order of its options.

    Args:
        workspace: The job: its model or stored factors, options, machine and ports.
        take_row: Receives each row as soon as its layer is done; of an analysis that is then refused, too.
        take_summary: Receives the kind and the summary of each analysis that is done.

    Returns:
        The analyses that were refused, in order; never all of them.

    Raises:
        EngineError: If the collection fails, or every analysis is refused; as ``engine.errors`` lists.
    """
    refused: list[RefusedAnalysis] = []
    first: UsageError | None = None
    kinds = workspace.options.kinds
    for kind in kinds:
        workspace.ports.raise_if_cancelled()
        try:
            with workspace.machine.operation(kind):
                take_summary(kind, _run(kind, workspace, take_row))
        except UsageError as error:
            if isinstance(error, DataDiffer) or not _stays_with_its_kind(workspace):
                raise
            # its frames hold generators with their buffers and threads
            traceback.clear_frames(error.__traceback__)
            first = first or error
            refused.append(refusal(kind, error))
    if first is not None and len(refused) == len(kinds):
        raise first
    for each in refused:
        workspace.ports.log("warning", f"`{each.kind}` was refused, and the other analyses are done: {each.message}")
    return tuple(refused)


def make_analysis(kind: str, workspace: Workspace) -> LayerAnalysis[Any]:
    """Return one analysis of a job, before anything is computed."""
    analysis: type[LayerAnalysis[Any]] = pkgutil.resolve_name(ANALYSES[kind].implementation)
    return analysis(workspace.options.of(kind), workspace)


def refusal(kind: str, error: UsageError) -> RefusedAnalysis:
    """Return what a job records of an analysis that was refused."""
    return RefusedAnalysis(kind=kind, code=error.code, message=error.message, pointer=error.pointer, layer=error.layer)


def _stays_with_its_kind(workspace: Workspace) -> bool:
    return workspace.machine.ranks.size == 1 and not workspace.results.of(JobFactors).failed


def _run(kind: str, workspace: Workspace, take_row: Callable[[LayerResult], None]) -> Any:  # noqa: ANN401 - its summary
    """Pull the rows of one analysis; return its summary."""
    rows = make_analysis(kind, workspace).rows()
    while True:
        try:
            take_row(next(rows))
        except StopIteration as end:
            return end.value
