"""A series on a terminal: one row for each checkpoint, with its λ_max and the overlaps with the one before."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from catalog.responses.series import SeriesView
from kronoscope.display.layer_names import shorten_all
from kronoscope.display.numbers import format_number
from kronoscope.display.printable import printable


def show_series(console: Console, series: SeriesView) -> None:
    """Print the table, and why checkpoints or comparisons failed."""
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
