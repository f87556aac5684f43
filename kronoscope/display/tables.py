"""Results as tables that fit 100 columns: one row per layer, one summary line per analysis."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from catalog import ANALYSES
from catalog.responses.coverage import CoverageView, percentage
from catalog.responses.layer_record import WHOLE_MODEL
from catalog.responses.series import SeriesView
from kronoscope.client.responses import Layer
from kronoscope.display.columns import layer_columns
from kronoscope.display.coverage import part_note
from kronoscope.display.layer_names import shorten_all
from kronoscope.display.numbers import fill, format_number, look_up
from kronoscope.display.numbers import read_field as _field
from kronoscope.display.printable import printable

_WIDTH = 100
_LEAST_NAME = 16
_MOST_LISTED = 12


def layer_table(kind: str, rows: Sequence[Layer], width: int = _WIDTH, measured: CoverageView | None = None) -> Table:
    """Tabulate the covered layers of one analysis."""
    # measured largest first, and shown in the model's order
    covered = sorted((row for row in rows if row.status != "declared"), key=lambda row: row.ordinal)
    columns = layer_columns(kind, covered)
    headings = ["parameters", *(heading for heading, _ in columns)]
    figures = [[format_number(row.parameter_count), *(show(row) for _, show in columns)] for row in covered]
    widths = [max(len(text) for text in column) for column in zip(headings, *figures, strict=True)]
    shown = 0
    names = min(_LEAST_NAME, max((len(row.layer or WHOLE_MODEL) for row in covered), default=0))
    while len(widths) - shown > 1 and sum(widths[shown:]) + 3 * len(widths[shown:]) + names > width:
        shown += 1
    left_out, headings, widths = headings[:shown], headings[shown:], widths[shown:]
    figures = [texts[shown:] for texts in figures]
    left = width - sum(widths) - 3 * len(widths)
    longest = max(_LEAST_NAME, left)
    title = f"{kind}: {_counted(kind, len(covered))}{part_note(measured, ', {} of the model')}"
    table = Table(title=Text(title), title_justify="left", pad_edge=False, show_edge=False)
    table.add_column(_unit(kind), no_wrap=True)
    for heading, least in zip(headings, widths, strict=True):
        table.add_column(heading, justify="right", no_wrap=True, min_width=least)
    names_shown = shorten_all([row.layer or WHOLE_MODEL for row in covered], longest)
    for name, texts in zip(names_shown, figures, strict=True):
        table.add_row(Text(name), *(Text(text) for text in texts))
    if left_out:
        table.caption = f"too narrow for {', '.join(left_out)}"
        table.caption_justify = "left"
    return table


def not_covered_lines(rows: Sequence[Layer]) -> list[str]:
    """Return lines about the layers that are not covered, and those with a status of their own."""
    not_covered = [row for row in rows if row.status == "declared"]
    if len(not_covered) <= _MOST_LISTED:
        lines = [
            f"not covered: {name}, {row.parameter_count or 0:,} parameters, {row.reason}{_named(row)}"
            for row, name in zip(not_covered, _names(not_covered), strict=True)
        ]
    else:
        lines = [_line_of_reason(reason, not_covered) for reason in dict.fromkeys(row.reason for row in not_covered)]
    for status in dict.fromkeys(row.status for row in rows if row.status not in ("covered", "declared")):
        concerned = _names([row for row in rows if row.status == status])
        more = f" and {len(concerned) - _MOST_LISTED} more" if len(concerned) > _MOST_LISTED else ""
        lines.append(f"{status}: {', '.join(concerned[:_MOST_LISTED])}{more}")
    return lines


def _names(rows: Sequence[Layer]) -> list[str]:
    return [printable(row.layer or WHOLE_MODEL, lines=False) for row in rows]


def _named(row: Layer) -> str:
    """Return the parameters of a row that is not covered, and the operation that keeps them out, or their module."""
    why = None if row.record is None or row.record.why == row.reason else row.record.why
    module = "" if row.module is None else f" ({row.module})"
    return printable(f": {', '.join(row.parameters)}{f'; {why}' if why else module}", lines=False)


def _line_of_reason(reason: str | None, not_covered: Sequence[Layer]) -> str:
    """Return one line for all layers that are not covered for ``reason``."""
    rows = [row for row in not_covered if row.reason == reason]
    (first,) = _names(rows[:1])
    more = f"; and {len(rows) - 1} more" if len(rows) > 1 else ""
    numbers = sum(row.parameter_count or 0 for row in rows)
    return f"not covered: {numbers:,} parameters, {reason}: {first}{_named(rows[0])}{more}"


def summary_line(kind: str, summary: Any, measured: CoverageView | None = None) -> str:  # noqa: ANN401 - each analysis has its own record
    """Return the summary of one analysis as one line."""
    coverage = _field(summary, "coverage")
    parts = [f"{kind}: {_counted(kind, _field(summary, f'{_unit(kind)}s'))}"]
    # a matrix from a file belongs to no model, so that there is nothing to cover
    if coverage is not None and _field(coverage, "trainable_parameters"):
        share = (
            percentage(_field(coverage, "covered_share")) if measured is None else f"{measured.measured_percent:.1f}%"
        )
        parts.append(f"{share} of {_field(coverage, 'trainable_parameters'):,} trainable parameters covered")
        reasons = sorted((_field(coverage, "reasons") or {}).items(), key=lambda item: -item[1])
        if reasons:
            parts.append("not covered: " + ", ".join(f"{count:,} {reason}" for reason, count in reasons))
        parts += filter(None, [fill("gradient identity to {gradient_identity:rough}", coverage)])
    figures = "; ".join(_figures(kind, summary))
    return "; ".join(
        [*parts, *([f"{part_note(measured, 'of the {} that was measured: ')}{figures}"] if figures else [])]
    )


def _figures(kind: str, summary: Any) -> list[str]:  # noqa: ANN401 - each analysis has its own record
    """Return the figures of the whole model, each with its name."""
    parts: list[str] = []
    for figure in ANALYSES[kind].figures if kind in ANALYSES else ():
        sources = (summary,) if figure.each is None else look_up(summary, figure.each) or ()
        lines = [line for source in sources if (line := fill(figure.line, source))]
        parts += [figure.joined.replace("{}", ", ".join(lines))] if lines and figure.joined else lines
    return parts


def reuse_lines(rows: Sequence[Layer]) -> list[str]:
    """Return a line for each earlier job with cached factors that the results are based on."""
    sources = dict.fromkeys(row.observed.factors_from for row in rows if row.observed is not None)
    return [f"factors from the cache: those of job {source}" for source in sources if source]


def _counted(kind: str, count: Any) -> str:  # noqa: ANN401 - as summaries of analyses unknown here have it
    return f"{format_number(count)} {_unit(kind)}{'' if count == 1 else 's'}"


def _unit(kind: str) -> str:
    return ANALYSES[kind].unit if kind in ANALYSES else "layer"


def show_series(console: Console, series: SeriesView) -> None:
    """Print a row for each checkpoint, with λ_max and overlaps with the one before, and why some failed."""
    curvatures = list(dict.fromkeys(of for point in series.points for of in point.largest))
    counts = list(dict.fromkeys(k for pair in series.overlaps for k in pair.overlaps))
    pairs = {pair.index: pair for pair in series.overlaps}
    table = Table("checkpoint", "state", pad_edge=False, show_edge=False)
    for heading in (*(f"λ_max {of}" for of in curvatures), "2/η", *(f"k={k}" for k in counts), "distance"):
        table.add_column(heading, justify="right", no_wrap=True)
    names = shorten_all([printable(point.model, lines=False) for point in series.points], 40)
    for place, (name, point) in enumerate(zip(names, series.points, strict=True)):
        pair = pairs.get(place)
        cells = [*(point.largest.get(of) for of in curvatures), point.stable_below]
        cells += [None if pair is None else pair.overlaps.get(k) for k in counts]
        cells.append(None if pair is None else pair.relative_distance)
        table.add_row(*map(Text, (name, point.state, *map(format_number, cells))))
    console.print(table)
    said = [(f"{point.state}: {point.model}", point.failure) for point in series.points]
    said += [(f"{pair.state}: checkpoints {pair.index} and {pair.index + 1}", pair.failure) for pair in series.overlaps]
    for what, failure in said:
        if failure is not None:
            console.print(printable(f"{what}: {failure}", lines=False), markup=False, soft_wrap=True)
