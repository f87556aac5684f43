"""Views of local measurements in a notebook: rows by layer, tables in HTML and of pandas, figures of matplotlib."""

import math
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from catalog.analyses.analysis import LayerResult
from catalog.brief import count_layers, cut, html_table, short_text
from catalog.field_errors import near_names
from kronoscope.local_inputs import OptionRefused

if TYPE_CHECKING:
    from pandas import DataFrame

T = TypeVar("T")

_MOST_NAMES = 60
"""Layers up to which each has its name beneath the figure."""
_LOG_FROM = 100.0
"""Largest over smallest value from which an axis has a scale of logarithms."""
_FIGURES = 4


class NamedLayers(dict[str, T]):
    """Values by layer name; where a name is missing, the error says which names are near it."""

    def __init__(self, verb: str, values: Mapping[str, T]) -> None:
        """Take values in the model's order; ``verb`` ends the sentence on a missing layer, such as `has rows`."""
        super().__init__(values)
        self._verb = verb

    def __getitem__(self, layer: object) -> T:
        # a list cannot be hashed, and is not a name
        return super().__getitem__(layer) if isinstance(layer, str) else self.__missing__(layer)

    def __missing__(self, layer: object) -> T:
        raise KeyError(f"no layer {layer!r} {self._verb}{near_names(layer, self)}")

    def __repr__(self) -> str:
        """Return one line: how many layers there are, and the first names."""
        return f"<{count_layers(self)}: {cut(', '.join(map(repr, self)))}>"


class Rows(NamedLayers[LayerResult]):
    """The rows of one analysis by layer name: ``rows["conv1"].metrics.trace``."""

    def __init__(self, kind: str, values: Mapping[str, LayerResult]) -> None:
        """Take the rows of an analysis of this kind."""
        super().__init__(f"has a row of `{kind}`", values)

    def _repr_html_(self) -> str:
        return rows_html([*self.values()])

    def to_frame(self) -> "DataFrame":
        """Return the rows as a table of pandas: a column for each number or text of the metrics.

        Raises:
            ModuleNotFoundError: If pandas is not installed.
        """
        return make_frame(_columns([*self.values()]))

    def plot(self, metric: str = "trace", axes: Any = None) -> Any:  # noqa: ANN401 - matplotlib's
        """Draw a metric of every layer over the depth of the model, on a scale of logarithms where values need it.

        Args:
            metric: A number of the metrics.
            axes: Axes of matplotlib; new ones where they are left out.

        Returns:
            The axes.

        Raises:
            ModuleNotFoundError: If axes are left out and matplotlib is not installed.
            OptionRefused: If no row has such a number.
        """
        columns = _columns([*self.values()])
        numbers = [name for name, values in columns.items() if any(map(_is_number, values))]
        if metric not in numbers:
            raise OptionRefused(f"`metric` is {metric!r}, which no row has as a number{near_names(metric, numbers)}")
        return draw_depth([*self], columns[metric], metric, axes)


class MeasurementViews:
    """Tables and figures of a measurement."""

    layers: Sequence[LayerResult]

    def _repr_html_(self) -> str:
        kinds = dict.fromkeys(row.kind for row in self.layers)
        tables = (rows_html([row for row in self.layers if row.kind == kind], f"{kind} of {{}}") for kind in kinds)
        return "".join(tables)

    def to_frame(self) -> "DataFrame":
        """Return all rows as a table of pandas, as ``Rows.to_frame`` does."""
        return make_frame(_columns(self.layers))

    def plot(self, metric: str = "trace", axes: Any = None) -> Any:  # noqa: ANN401 - matplotlib's
        """Draw a metric over the depth of the model, of the first analysis that has it, as ``Rows.plot`` does."""
        kinds = dict.fromkeys(row.kind for row in self.layers)
        tables = [Rows(kind, {row.layer: row for row in self.layers if row.kind == kind}) for kind in kinds]
        having = (table for table in tables if any(metric in [*_numbers(row)] for row in table.values()))
        found = next(having, Rows("any", {f"{row.kind} {row.layer}": row for row in self.layers}))
        return found.plot(metric, axes)


def rows_html(rows: Sequence[LayerResult], note: str = "") -> str:
    """Return rows of one analysis as a table in HTML, with first figures; ``{}`` in ``note`` is the count of layers."""
    names = list(dict.fromkeys(name for row in rows for name in list(_numbers(row))[:_FIGURES]))[:_FIGURES]
    cells = [
        [row.layer, row.module, row.reason or row.status, f"{row.parameter_count:,}"]
        + [short_text(value) if (value := _numbers(row).get(name)) is not None else "–" for name in names]
        for row in rows
    ]
    count = f"{len(rows)} layer{'' if len(rows) == 1 else 's'}"
    return html_table(("layer", "module", "status", "parameters", *names), cells, note.format(count))


def find_optional(name: str, message: str) -> Any:  # noqa: ANN401 - of a library without types
    """Return an object of a package that few need; ``ModuleNotFoundError`` with a message where it is missing."""
    try:
        return pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(message) from error


def make_frame(columns: Mapping[str, Sequence[Any]]) -> "DataFrame":
    """Return columns as a table of pandas; ``ModuleNotFoundError`` if pandas is not installed."""
    frame = find_optional("pandas:DataFrame", "pandas is not installed; `pip install pandas` brings its tables")
    made: DataFrame = frame(dict(columns))
    return made


def draw_depth(names: Sequence[str], values: Sequence[float | None], metric: str, axes: Any) -> Any:  # noqa: ANN401 - matplotlib's
    """Draw values over the places of their layers; one that is None, or is not finite, leaves a gap."""
    axes = axes or _new_axes()
    drawn = [math.nan if value is None or not _is_number(value) else float(value) for value in values]
    axes.plot(range(len(names)), drawn, marker="o")
    if _needs_log(drawn):
        axes.set_yscale("log")
    if len(names) <= _MOST_NAMES:
        axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_xlabel("layer")
    axes.set_ylabel(metric)
    return axes


def draw_spectra(sides: Mapping[str, Tensor], layer: str, axes: Any) -> Any:  # noqa: ANN401 - matplotlib's
    """Draw eigenvalues of each side, shape (n,), from the largest; those that are not positive are left out."""
    axes = axes or _new_axes()
    for side, eigenvalues in sides.items():
        ordered = sorted((value for value in eigenvalues.tolist() if value > 0), reverse=True)
        axes.plot(range(1, len(ordered) + 1), ordered, label=f"{side}: {len(ordered)} of {len(eigenvalues)} positive")
    axes.set_yscale("log")
    axes.set_xlabel("place")
    axes.set_ylabel("eigenvalue")
    axes.set_title(layer)
    axes.legend()
    return axes


def _new_axes() -> Any:  # noqa: ANN401 - matplotlib's
    message = "matplotlib is not installed; `pip install matplotlib` brings its figures, or give `axes`"
    return find_optional("matplotlib.pyplot:subplots", message)()[1]


def _columns(rows: Sequence[LayerResult]) -> dict[str, list[Any]]:
    own = ("kind", "layer", "module", "status", "reason", "parameter_count")
    facts = [{} if row.metrics is None else dict(row.metrics.facts()) for row in rows]
    names = dict.fromkeys(name for each in facts for name in each)
    return {name: [getattr(row, name) for row in rows] for name in own} | {
        name: [each.get(name) for each in facts] for name in names if name not in own
    }


def _numbers(row: LayerResult) -> dict[str, Any]:
    facts: Iterable[tuple[str, Any]] = () if row.metrics is None else row.metrics.facts().items()
    return {name: value for name, value in facts if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _needs_log(values: Sequence[float]) -> bool:
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= _LOG_FROM
