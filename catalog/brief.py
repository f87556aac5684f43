"""Brief forms of values in a notebook: a line, and a small table in HTML whose every text is escaped."""

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, ClassVar

_LINE = 160
_CELL = 80
_MOST_ROWS = 60


class Brief:
    """A record that is shown in a line, or in a table of two columns, without all that it holds."""

    _shown: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, shown: tuple[str, ...] = ()) -> None:
        """Take the fields that are shown, in order; without any, those are shown that hold a number or a text."""
        cls._shown = shown

    def facts(self) -> Mapping[str, Any]:
        """Return the values that are shown, by name: none that is None, and those of a brief record in its place."""
        fields: dict[str, Any] = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}  # type: ignore[arg-type] # a mixin of records
        wanted = self._shown or tuple(name for name, value in fields.items() if isinstance(value, (str, int, float)))
        facts: dict[str, Any] = {}
        for name in wanted:
            within = fields[name]
            facts |= within.facts() if isinstance(within, Brief) else {name: within}
        return {name: value for name, value in facts.items() if value is not None and value != ()}

    def __repr__(self) -> str:
        """Return one line: the first of the facts, and dots where there is more."""
        parts: list[str] = []
        whole = len(self.facts()) == len(dataclasses.fields(self))  # type: ignore[arg-type] # a mixin of records
        for name, value in self.facts().items():
            part = f"{name}={short_text(value)}"
            if sum(map(len, parts)) + 2 * len(parts) + len(part) > _LINE:
                whole = False
                break
            parts.append(part)
        return f"{type(self).__name__}({', '.join([*parts, *(() if whole else ('…',))])})"

    def _repr_html_(self) -> str:
        facts = self.facts()
        return html_table((type(self).__name__, ""), [(name, short_text(value)) for name, value in facts.items()])


def short_text(value: object) -> str:
    """Return a value as a text of at most 80 characters, floats with six digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return cut(f"({', '.join(short_text(each) for each in value[:_CELL])})")
    if isinstance(value, Mapping):
        return cut(f"{{{', '.join(f'{name}: {short_text(each)}' for name, each in list(value.items())[:_CELL])}}}")
    return cut(repr(value[: 2 * _CELL] if isinstance(value, str) else value))


def count_layers(layers: Sized) -> str:
    """Return how many layers there are: `1 layer`, `5 layers`."""
    return f"{len(layers)} layer{'' if len(layers) == 1 else 's'}"


def cut(text: str, width: int = _CELL) -> str:
    """Return a text, or its beginning with dots where it is longer than ``width``."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """Return a table as HTML with a note below it; texts are escaped, and beyond 60 rows a line counts the others."""
    listed = list(rows)
    more = f"and {len(listed) - _MOST_ROWS} more rows" if len(listed) > _MOST_ROWS else ""
    head = "".join(f"<th>{html.escape(each)}</th>" for each in headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in listed[:_MOST_ROWS]
    )
    below = "".join(f"<p>{html.escape(each)}</p>" for each in (more, note) if each)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
