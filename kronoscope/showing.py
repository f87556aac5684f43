"""A job's results on a terminal: one table for each analysis, and what its stages took beside what was planned."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kronoscope.client import MEMORY_CURVE
from kronoscope.plan_tables import taken_table
from kronoscope.tables import declared_lines, layer_table, reuse_lines, summary_line
from kronoscope.views import Layer


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
        console.print(taken_table(curve["stages"]))
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
