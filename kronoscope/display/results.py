"""A job's results on a terminal: one table for each analysis, and the planned and measured figures of its stages."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from catalog.analyses.analysis import RefusedAnalysis, Text
from catalog.responses.coverage import CoverageView
from catalog.responses.views import JobView
from kronoscope.client.artifact_files import MEMORY_CURVE
from kronoscope.client.responses import Layer
from kronoscope.display.coverage import coverage_lines, refused_lines
from kronoscope.display.numbers import fill, format_number, read_field
from kronoscope.display.plan_tables import measured_stage_table
from kronoscope.display.printable import printable
from kronoscope.display.progress import Display
from kronoscope.display.tables import layer_table, not_covered_lines, reuse_lines, summary_line

_NAMES = {"kfac": "K-FAC", "ekfac": "EK-FAC", "ggn": "GGN", "fisher": "Fisher", "empirical": "empirical Fisher",
          "hessian": "Hessian"}  # fmt: skip
_COLUMNS: tuple[tuple[str, Text], ...] = (
    ("λ_max", ("{largest.0.converged:=False}{largest.0.value}*", "{largest.0.value}")),
    ("±", "{largest.0.bound:rough}"),
    ("λ_min", ("{smallest.0.converged:=False}{smallest.0.value}*", "{smallest.0.value}")),
    ("±", "{smallest.0.bound:rough}"),
    ("trace", "{trace}"),
    ("95%", "{trace_low} to {trace_high}"),
    ("negative", "{negative_share:percent}"),
    ("products", ("{products:=0}–", "{products}")),
)


def curvature_table(summary: Any) -> Table | None:  # noqa: ANN401 - a record, or what a service sends in its place
    """Tabulate the curvatures of a summary."""
    curvatures = read_field(summary, "curvatures") or ()
    if not curvatures:
        return None
    rows = [(_NAMES.get(read_field(each, "of"), str(read_field(each, "of"))), each) for each in curvatures]
    columns = [(heading, [fill(texts, each) or "–" for _, each in rows]) for heading, texts in _COLUMNS]
    dimension = format_number(read_field(rows[0][1], "dimension"))
    table = Table(title=f"curvatures of {dimension} parameters", title_justify="left", pad_edge=False, show_edge=False)
    table.add_column("curvature", no_wrap=True)
    shown = [column for column in columns if any(text != "–" for text in column[1])]
    for heading, _ in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for place, (name, _) in enumerate(rows):
        table.add_row(name, *(texts[place] for _, texts in shown))
    if any("*" in text for _, texts in columns for text in texts):
        table.caption = "* the bound is above spectrum.tolerance: more of spectrum.most_products would lower it"
        table.caption_justify = "left"
    return table


def missing_lines(summary: Any) -> list[str]:  # noqa: ANN401 - a record, or what a service sends in its place
    """Return lines on what a curvature's spectrum lacks."""
    lines = []
    for each in read_field(summary, "curvatures") or ():
        reasons: dict[str, list[str]] = {}
        for name, why in (read_field(each, "missing") or {}).items():
            reasons.setdefault(why, []).append(name.replace("_", " "))
        of = _NAMES.get(read_field(each, "of"), str(read_field(each, "of")))
        lines += [f"{of} without {', '.join(names)}: {why}" for why, names in reasons.items()]
    return lines


_UNPLACED = {
    "no_device": "no device can hold the job",
    "no_worker": "no worker can take the job up",
    "reserved": "a device is reserved for the job",
    "waiting": "queued",
}


def show_results(
    console: Console,
    rows: Sequence[Layer],
    summary: Mapping[str, Any],
    kinds: Sequence[str] = (),
    curve: Mapping[str, Any] | None = None,
    measured: CoverageView | None = None,
    *,
    refused: Sequence[RefusedAnalysis] | None = None,
) -> None:
    """Print one table for each analysis, and the stages.

    The tables follow the order of ``kinds``; the stages are those of ``curve``, planned and measured, and ``measured``
    is the share of the model that was measured, None where no model was given.
    """
    present = dict.fromkeys([row.kind for row in rows])
    for kind in dict.fromkeys([*(kind for kind in kinds if kind in present), *present]):
        chosen = [row for row in rows if row.kind == kind]
        console.print(layer_table(kind, chosen, console.width, measured))
        for line in not_covered_lines(chosen):
            console.print(line, markup=False, soft_wrap=True)
        if kind in summary:
            console.print(summary_line(kind, summary[kind], measured), markup=False, soft_wrap=True)
            if (curvatures := curvature_table(summary[kind])) is not None:
                console.print(curvatures)
            for line in missing_lines(summary[kind]):
                console.print(line, markup=False, soft_wrap=True)
        console.print()
    if curve is not None and curve.get("stages"):
        console.print(measured_stage_table(curve))
        console.print()
    for line in (*reuse_lines(rows), *coverage_lines(measured), *refused_lines(refused)):
        console.print(line, markup=False, soft_wrap=True)


def read_memory_curve(folder: Path) -> Mapping[str, Any] | None:
    """Return the memory curve in a folder of artifacts, as JSON; None where there is none that can be read."""
    try:
        curve: Mapping[str, Any] = json.loads((folder / MEMORY_CURVE).read_bytes())
    except (OSError, ValueError):
        return None
    return curve


def show_progress(job: JobView, display: Display) -> None:
    """Show the progress of a job, and why a queued one has not begun."""
    progress = job.progress
    display.head(_heading(job))
    if job.pieces and progress is not None and job.state == "waiting":
        last = job.pieces[-1]  # of the round that is under way
        stage = f"{last.round}, {last.count} pieces"
        display.update(stage, progress.done or 0, progress.total, progress.unit or "", progress.eta_seconds)
    elif progress is not None and progress.stage is not None and not job.ended:
        display.update(progress.stage, progress.done or 0, progress.total, progress.unit or "", progress.eta_seconds)
    elif not job.ended:
        tried = f", after {job.failures} failed attempt{'' if job.failures == 1 else 's'}" if job.failures else ""
        display.update(f"{job.state}{tried}", 0, None, "")
    elif job.state == "succeeded" and progress is not None and progress.stage is not None and progress.total:
        display.update(progress.stage, progress.total, progress.total, progress.unit or "")
    note = placement_problem(job)
    if note is not None:
        display.line(note)


def _heading(job: JobView) -> str:
    """Return the name, the end of the id and the per cent that are done."""
    percent = None if job.progress is None else job.progress.percent
    parts = [printable(job.name, lines=False) if job.name else None, job.id[-12:]]
    return " ".join(filter(None, [*parts, None if percent is None else f"{percent:.0f}%"]))


def placement_problem(job: JobView) -> str | None:
    """Return a sentence on why a queued job has not begun; None where it is not queued."""
    if job.state != "queued" or job.placement is None or job.placement.status not in _UNPLACED:
        return None
    return f"{_UNPLACED[job.placement.status]}: {job.placement.message}"
