"""Numbers as they stand in tables, and fields of a service's answers."""

from collections.abc import Mapping
from typing import Any


def format_number(value: Any) -> str:  # noqa: ANN401 - metrics are of any type
    """Return a figure in at most nine characters."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) and abs(value) < 10**7:
        return f"{value:,}"
    digits = f"{value:.4g}"
    if "e" not in digits:
        return digits
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def read_field(source: Any, name: str) -> Any:  # noqa: ANN401 - records, or mappings of analyses unknown here
    """Return a field of a record, or of the mapping in its place."""
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
