"""Numbers as they stand in tables and sentences, and fields of a service's answers."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from catalog.analyses.analysis import Text
from catalog.responses.coverage import percentage
from kronoscope.display.printable import printable

_FIELD = re.compile(r"\{([\w.|]+)(?::([^}]*))?\}")


def format_number(value: Any) -> str:  # noqa: ANN401 - metrics are of any type
    """Return a figure with four digits, a whole number below 1e7 with all: the page's `number` writes it alike."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    whole = float(value).is_integer() and abs(value) < 10**7
    shown = float(value if whole else f"{value:.4g}")
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    power = abs(value) >= 10**5 and abs(value) == float(f"1e{int(exponent)}")
    if shown == 0 or (1e-4 <= abs(shown) < 10**7 and not power):
        return f"{shown:,.10g}"
    return f"{float(mantissa):g}e{int(exponent)}"


def format_share(share: float) -> str:
    """Return a share, a part of 1, as a percentage with one decimal, which the page's `percent` writes alike.

    Below a thousandth it has two decimals, and what is not whole never reads `100.0%`.
    """
    if 0 < share < 1e-4:
        return "< 0.01%"
    if 0.9995 < share < 1:
        return "99.9%"
    return f"{share:.{2 if share != 0 and abs(share) < 1e-3 else 1}%}"


def format_bytes(size_bytes: int) -> str:
    """Return bytes as text with a binary unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{float(f'{size_bytes / size:.3g}'):g} {unit}"
    return f"{size_bytes} B" if size_bytes else "–"


def _printable(names: Iterable[str]) -> list[str]:
    return [printable(name, lines=False) for name in names]


_FORMS: Mapping[str | None, Callable[[Any], str]] = {
    "percent": format_share,
    "part": format_share,
    "portion": percentage,
    "cosine": "{:.3f}".format,
    "magnitude": "{:.0e}".format,
    "rough": "{:.1g}".format,
    "count": "{:,}".format,
    "given": "{:g}".format,
    "bytes": format_bytes,
    "unquoted": lambda text: re.sub(r'^"([^"\\]*)"$', r"\1", str(text)),
    "names": lambda names: ", ".join(_printable([names] if isinstance(names, str) else names)),
    "some": lambda names: f"{', '.join(_printable(names[:5]))}{f' and {len(names) - 5} more' if names[5:] else ''}",
}


def format_value(value: Any, form: str | None = None) -> str:  # noqa: ANN401 - metrics are of any type
    """Return a value in a form of `catalog.analyses.analysis.Column` or `Text`; a dash for none."""
    return "–" if value is None else _FORMS.get(form, format_number)(value)


def fill(texts: Text, source: Any) -> str | None:  # noqa: ANN401 - records, or mappings of analyses unknown here
    """Return the first text whose fields are all known, with the fields of ``source`` in it; None where none is."""
    filled = (_filled(text, source) for text in ((texts,) if isinstance(texts, str) else texts))
    return next((text for text in filled if text is not None), None)


def _filled(text: str, source: Any) -> str | None:  # noqa: ANN401 - as `fill`
    parts = _FIELD.split(text)
    shown = [_field(look_up(source, path), form) for path, form in zip(parts[1::3], parts[2::3], strict=True)]
    known = [each for each in shown if each is not None]
    return "".join(map("".join, zip(parts[::3], [*known, ""], strict=True))) if len(known) == len(shown) else None


def _field(value: Any, form: str | None) -> str | None:  # noqa: ANN401 - as `fill`
    if value is None or value in ((), []) or (value == 0 and form == "part"):
        return "–" if form == "-" else None
    if form is not None and form.startswith("="):
        return "" if str(value) == form[1:] else None
    if form is not None and "|" in form:
        count = value if isinstance(value, int) else len(value)
        return f"{format_number(count)} {form.split('|')[count != 1]}" if count else None
    return format_value(value, form)


def read_field(source: Any, name: str) -> Any:  # noqa: ANN401 - records, or mappings of analyses unknown here
    """Return a field of a record, or of the mapping in its place; of a list that of each element."""
    if isinstance(source, (tuple, list)):
        return [read_field(each, name) for each in source]
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def look_up(source: Any, path: str) -> Any:  # noqa: ANN401 - as `read_field`
    """Return the value at a path, such as `metrics.trace`; of several, parted by `|`, the first that is not None."""
    for way in path.split("|"):
        value = source
        for step in way.split("."):
            value = next(iter(value[int(step) :]), None) if step.isdigit() and value else read_field(value, step)
        if value is not None:
            return value
    return None
