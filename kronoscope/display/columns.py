"""Columns of a layer table: those that the analysis's record names, or its first figures where it names none."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from catalog import ANALYSES
from catalog.analyses.analysis import Column, Heading
from kronoscope.client.responses import Layer
from kronoscope.display.numbers import format_value, look_up, read_field

ShownColumn = tuple[str, Callable[[Layer], str]]
_MOST_REPEATED = 2
"""Elements of a list that have several columns each; the results have all of them."""
_MOST_GENERIC = 5


def layer_columns(kind: str, rows: Sequence[Layer]) -> list[ShownColumn]:
    """Return the headings of an analysis's columns, each with the function that shows a row."""
    columns = [column for column in ANALYSES[kind].columns if column.short] if kind in ANALYSES else []
    # without the metric that a table is mostly read for, others were asked for
    if not columns or (rows and all(getattr(row.metrics, "effective_rank", 0) is None for row in rows)):
        return _generic_columns(rows)
    stated: list[tuple[Column, ShownColumn]] = []
    for each, group in itertools.groupby(columns, lambda column: column.each):
        repeated = list(group)
        if each is None:
            stated += [(column, (str(column.short), _shown(column))) for column in repeated]
            continue
        path, _, name = each.rpartition(".")
        keys = list(dict.fromkeys(read_field(one, name) for row in rows for one in look_up(row, path) or ()))
        stated += [
            (column, (heading, _shown(column, key)))
            for key in (keys[:_MOST_REPEATED] if len(repeated) > 1 else keys)
            for column in repeated
            if (heading := _heading(column.short, key, len(keys))) is not None
        ]
    return [shown for column, shown in stated if not column.optional or any(shown[1](row) != "–" for row in rows)]


def _heading(heading: Heading, key: float | str, count: int) -> str | None:
    text = heading[count > 1] if isinstance(heading, tuple) else heading
    return text and text.replace("{}", key if isinstance(key, str) else f"{key:g}")


def _shown(column: Column, key: float | str | None = None) -> Callable[[Layer], str]:
    """Return the function that shows a row's value; with a key that of the element of the list."""

    def shown(row: Layer) -> str:
        source: Any = row
        if column.each is not None:
            path, _, name = column.each.rpartition(".")
            source = next((one for one in look_up(row, path) or () if read_field(one, name) == key), None)
        value = column.value(row) if callable(column.value) else look_up(source, column.value)
        if value is None:
            return "∞" if column.counted is not None and look_up(source, column.counted) is not None else "–"
        if column.form == "fraction":
            return f"{value:,}/{look_up(source, str(column.whole)):,}"
        return f"{format_value(value, column.form)}{'*' if column.converging and _is_late(column, row) else ''}"

    return shown


def _is_late(column: Column, row: Layer) -> bool:
    """Whether the metric has not converged over the sample sizes."""
    name = str(column.value).rpartition(".")[2]
    followed = look_up(row, "metrics.convergence") or ()
    return any(read_field(one, "metric") == name and read_field(one, "not_converged") for one in followed)


def _generic_columns(rows: Sequence[Layer]) -> list[ShownColumn]:
    """Return columns of the first figures of the metrics."""
    metrics: Any = next((row.metrics for row in rows if row.metrics is not None), {})
    named = vars(metrics) if dataclasses.is_dataclass(metrics) else metrics
    figures = [name for name, value in named.items() if isinstance(value, (int, float)) and not isinstance(value, bool)]
    columns = [(name, _shown(Column(f"metrics.{name}", name))) for name in figures[:_MOST_GENERIC]]
    return columns or [("status", lambda row: row.status)]
