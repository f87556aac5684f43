"""The spectrum's summary as a table: one row for each curvature, with its ends, trace and negative part."""

from typing import Any

from rich.table import Table

from catalog.analyses.analysis import Text
from kronoscope.display.numbers import fill, format_number, read_field

_NAMES = {"kfac": "K-FAC", "ekfac": "EK-FAC", "ggn": "GGN", "fisher": "Fisher", "empirical": "empirical Fisher",
          "hessian": "Hessian"}  # fmt: skip
_COLUMNS: tuple[tuple[str, Text], ...] = (
    ("λ_max", ("{largest.0.converged:=False}{largest.0.value}*", "{largest.0.value}")),
    ("±", "{largest.0.bound:rough}"),
    ("λ_min", ("{smallest.0.converged:=False}{smallest.0.value}*", "{smallest.0.value}")),
    ("±", "{smallest.0.bound:rough}"),
    ("trace", "{trace}"),
    ("95 %", "{trace_low} to {trace_high}"),
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
