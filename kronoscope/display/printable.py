"""Printable text: what a terminal would obey in place of showing it is replaced.

Such characters are those of the Unicode categories below: controls (among them the one-character form of an escape
sequence), formats (which turn the direction of writing or are invisible), separators of lines, and halves of pairs.
"""

import unicodedata
from collections.abc import Callable

_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")


class _Replacements(dict[int, int | str]):
    """Table for `str.translate` that is filled as characters come."""

    def __init__(self, replacement: Callable[[int], str], spared: str) -> None:
        super().__init__({ord(each): each for each in spared})
        self._replacement = replacement

    def __missing__(self, code: int) -> int | str:
        obeyed = unicodedata.category(chr(code)) in _CATEGORIES
        self[code] = self._replacement(code) if obeyed else code
        return self[code]


_LINES = _Replacements(lambda _: "\ufffd", spared="\n\t")
_WORDS = _Replacements(lambda _: "\ufffd", spared="")
_JSON = _Replacements(lambda code: "".join(f"\\u{unit:04x}" for unit in _utf16(code)), spared="\n\t")


def printable(text: str, *, lines: bool = True) -> str:
    """Replace each character that a terminal would obey by U+FFFD; ends of lines and tabs stay with ``lines``."""
    return text.translate(_LINES if lines else _WORDS)


def escaped(text: str) -> str:
    """Escape the same characters in JSON, to JSON of the same value."""
    return text.translate(_JSON)


def _utf16(code: int) -> tuple[int, ...]:
    """Return the code units of a character, which JSON's escapes name."""
    if code < 0x10000:
        return (code,)
    return 0xD800 + (code - 0x10000 >> 10), 0xDC00 + (code - 0x10000 & 0x3FF)
