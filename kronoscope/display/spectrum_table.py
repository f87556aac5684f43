"""The spectrum's summary as a table: one row for each curvature, with its ends, trace and negative part."""

from typing import Any

from rich.table import Table

from kronoscope.display.numbers import format_number, read_field

_NAMES = {"kfac": "K-FAC", "ekfac": "EK-FAC", "ggn": "GGN", "fisher": "Fisher", "empirical": "empirical Fisher",
          "hessian": "Hessian"}  # fmt: skip


def curvature_table(summary: Any) -> Table | None:  # noqa: ANN401 - a record, or what a service sends in its place
    """Tabulate the curvatures of a `spectrum` job."""
    curvatures = read_field(summary, "curvatures") or ()
    if not curvatures:
        return None
    rows = [(_NAMES.get(read_field(each, "of"), str(read_field(each, "of"))), each) for each in curvatures]
    columns: list[tuple[str, list[str]]] = [
        ("λ_max", [_eigenvalue(read_field(each, "largest")) for _, each in rows]),
        ("±", [_bound(read_field(each, "largest")) for _, each in rows]),
        ("λ_min", [_eigenvalue(read_field(each, "smallest")) for _, each in rows]),
        ("±", [_bound(read_field(each, "smallest")) for _, each in rows]),
        ("trace", [format_number(read_field(each, "trace")) for _, each in rows]),
        ("95 %", [_interval(each) for _, each in rows]),
        ("negative", [_share(read_field(each, "negative_share")) for _, each in rows]),
        ("products", [format_number(read_field(each, "products") or None) for _, each in rows]),
    ]
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


def _eigenvalue(ends: Any) -> str:  # noqa: ANN401 - a tuple of records or of mappings
    """The outermost eigenvalue."""
    if not ends:
        return "–"
    star = "" if read_field(ends[0], "converged") or read_field(ends[0], "bound") is None else "*"
    return f"{format_number(read_field(ends[0], 'value'))}{star}"


def _bound(ends: Any) -> str:  # noqa: ANN401 - a tuple of records or of mappings
    bound = read_field(ends[0], "bound") if ends else None
    return "–" if bound is None else f"{bound:.1g}"


def _interval(curvature: Any) -> str:  # noqa: ANN401 - a record or a mapping
    low, high = read_field(curvature, "trace_low"), read_field(curvature, "trace_high")
    return "–" if low is None or high is None else f"{format_number(low)} to {format_number(high)}"


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
