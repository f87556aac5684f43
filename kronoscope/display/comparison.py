"""The comparison of two curvatures on a terminal: its columns and sentences."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from kronoscope.client.responses import Layer
from kronoscope.display.layer_names import shorten, shorten_all
from kronoscope.display.numbers import format_number, read_field

_MOST_LISTED = 5


def comparison_columns(rows: Sequence[Layer]) -> tuple[tuple[str, Callable[[Layer], str]], ...]:
    """Return the columns of G ⊗ A: the overlap at each k, distances and the divergence."""
    sizes = dict.fromkeys(
        read_field(each, "k")
        for row in rows
        for each in read_field(read_field(row.metrics, "product"), "overlaps") or ()
    )
    return (
        ("A×G", _shape),
        *((f"k={k}", _overlap(k)) for k in sizes),
        ("distance", _product("relative_distance")),
        ("of A", _side("A", "relative_distance")),
        ("of G", _side("G", "relative_distance")),
        ("cosine", _product("cosine")),
        ("KL", _product("divergence")),
    )


def comparison_notes(summary: Any) -> list[str]:  # noqa: ANN401 - a record, or what a service sends in its place
    """Return what a comparison says of both sets: overlaps, distance, what is missing, and how they were collected."""
    if read_field(summary, "against_sha256") is None and read_field(summary, "only_against") is None:
        return []
    overlaps = [
        f"{format_number(read_field(each, 'overlap'))} at {read_field(each, 'k')}"
        for each in read_field(summary, "overlaps") or ()
        if read_field(each, "overlap") is not None
    ]
    notes = [f"mean overlap of leading eigenspaces {', '.join(overlaps)}"] if overlaps else []
    distance, farthest = read_field(summary, "relative_distance"), read_field(summary, "farthest")
    if distance is not None:
        most = "" if farthest is None or not distance else f", farthest {shorten(farthest)}"
        notes.append(f"relative distance {format_number(distance)}{most}")
    for name, which in (("only_first", "only in the first set"), ("only_against", "only in the set compared with")):
        notes += _listed(which, read_field(summary, name) or ())
    notes += _listed(
        "of another size", [read_field(each, "layer") for each in read_field(summary, "other_sizes") or ()]
    )
    differences = [
        f"{read_field(each, 'option')} {_plain(read_field(each, 'first'))} against "
        f"{_plain(read_field(each, 'against'))}"
        for each in read_field(summary, "differences") or ()
    ]
    return notes + ([f"collected with {', '.join(differences)}"] if differences else [])


def _listed(what: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return [f"{what}: {', '.join(shorten_all(list(names[:_MOST_LISTED])))}{more}"] if names else []


def _plain(value: Any) -> str:  # noqa: ANN401 - JSON text, as the summary has it
    """A text without its quotes."""
    try:
        return str(json.loads(value)) if str(value).startswith('"') else str(value)
    except ValueError:
        return str(value)


def _shape(row: Layer) -> str:
    if row.record is None or row.record.in_dim is None:
        return "–"
    return f"{row.record.in_dim}×{row.record.out_dim}"


def _overlap(k: int) -> Callable[[Layer], str]:
    def shown(row: Layer) -> str:
        overlaps = read_field(read_field(row.metrics, "product"), "overlaps") or ()
        return format_number(
            next((read_field(each, "overlap") for each in overlaps if read_field(each, "k") == k), None)
        )

    return shown


def _side(side: str, name: str) -> Callable[[Layer], str]:
    return lambda row: format_number(read_field(read_field(row.metrics, side), name))


def _product(name: str) -> Callable[[Layer], str]:
    return _side("product", name)
