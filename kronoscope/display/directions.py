"""The directions of `natural_gradient` in figures: columns of the layer table, and the summary's line."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kronoscope.client.responses import Layer

Column = tuple[str, Callable[[Layer], str]]
_MOST_POWERS = 2
"""Powers that the table has columns for; the results have all of them."""


def direction_columns(rows: Sequence[Layer], show: Callable[[Any], str]) -> tuple[Column, ...]:
    """Return the columns of `natural_gradient`: the gradient's norm, and for each power what becomes of it."""
    powers = next((_powers(row) for row in rows if _powers(row)), [])
    columns: list[Column] = [("‖g‖", lambda row: show(_field(row.metrics, "gradient_norm")))]
    for place, power in enumerate(powers[:_MOST_POWERS]):
        mark = "" if len(powers) == 1 else f" α={power:g}"
        columns += [
            (f"‖d‖{mark}", _figure(place, "norm", show)),
            (f"cos{mark}", _figure(place, "cosine", _cosine)),
            (f"step{mark}", _figure(place, "effective_step", show)),
        ]
        if power == 1:
            columns.append(
                ("residual", _figure(place, "residual", lambda value: "–" if value is None else f"{value:.0e}"))
            )
    return tuple(columns)


def direction_notes(summary: Any, show: Callable[[Any], str]) -> list[str]:  # noqa: ANN401 - a record, or a mapping
    """Return what the summary's line says of the directions."""
    directions = _field(summary, "directions")
    if not directions:
        return []
    found = [f"‖g‖ {show(_field(summary, 'gradient_norm'))}"]
    for each in directions:
        power = _field(each, "power")
        found.append(f"α = {power:g}: cosine {_cosine(_field(each, 'cosine'))}, gᵀd {show(_field(each, 'inner'))}")
    share = _field(summary, "uncovered_share")
    if share:
        found.append(f"{share:.1%} of ‖g‖² in parameters that are not covered, where there is no direction")
    coarse = _field(summary, "below_rounding")
    if coarse:
        found.append(f"λ below the precision of the factors in {len(coarse)} layer{'' if len(coarse) == 1 else 's'}")
    return found


def _powers(row: Layer) -> list[float]:
    return [_field(each, "power") for each in _field(row.metrics, "directions") or ()]


def _figure(place: int, name: str, show: Callable[[Any], str]) -> Callable[[Layer], str]:
    def shown(row: Layer) -> str:
        directions = _field(row.metrics, "directions") or ()
        return show(_field(directions[place], name)) if place < len(directions) else "–"

    return shown


def _cosine(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _field(source: Any, name: str) -> Any:  # noqa: ANN401 - records, or mappings of analyses unknown here
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
