"""A job's results on a terminal: one table for each analysis, and what its stages took beside what was planned."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from catalog.responses import JobView
from kronoscope.client.client import MEMORY_CURVE
from kronoscope.client.responses import Layer
from kronoscope.display.plan_tables import taken_table
from kronoscope.display.progress import Display
from kronoscope.display.tables import declared_lines, layer_table, reuse_lines, summary_line

_UNPLACED = {"no_device": "no device can hold the job", "no_worker": "no worker can take the job up"}


def show_results(
    console: Console,
    rows: Sequence[Layer],
    summary: Mapping[str, Any],
    kinds: Sequence[str] = (),
    curve: Mapping[str, Any] | None = None,
) -> None:
    """One table for each analysis, in the order they were asked for; at last the stages, where ``curve`` has them."""
    there = dict.fromkeys([row.kind for row in rows])
    for kind in dict.fromkeys([*(kind for kind in kinds if kind in there), *there]):
        chosen = [row for row in rows if row.kind == kind]
        console.print(layer_table(kind, chosen, console.width))
        for line in declared_lines(chosen):
            console.print(line, markup=False, soft_wrap=True)
        if kind in summary:
            console.print(summary_line(kind, summary[kind]), markup=False, soft_wrap=True)
        console.print()
    if curve is not None and curve.get("stages"):
        console.print(taken_table(curve["stages"], curve.get("pace")))
        console.print()
    for line in reuse_lines(rows):
        console.print(line, markup=False, soft_wrap=True)


def curve_in(folder: Path) -> Mapping[str, Any] | None:
    """The memory curve among a run's files, if it has one."""
    try:
        found: Mapping[str, Any] = json.loads((folder / MEMORY_CURVE).read_bytes())
    except (OSError, ValueError):
        return None
    return found


def show_progress(job: JobView, display: Display) -> None:
    """How far the job is; one that waits says for what, where it is more than its turn."""
    progress = job.progress
    if progress is not None and progress.stage is not None and not job.ended:
        display.update(progress.stage, progress.done or 0, progress.total, progress.unit or "")
    elif not job.ended:
        display.update(job.state, 0, None, "")
        note = unplaced(job)
        if note is not None:
            display.line(note)
    elif job.state == "succeeded" and progress is not None and progress.stage is not None and progress.total:
        display.update(progress.stage, progress.total, progress.total, progress.unit or "")


def unplaced(job: JobView) -> str | None:
    """Why no worker takes the job up, where none that is there can."""
    if job.state != "queued" or job.placement is None or job.placement.status not in _UNPLACED:
        return None
    return f"{_UNPLACED[job.placement.status]}: {job.placement.message}"
