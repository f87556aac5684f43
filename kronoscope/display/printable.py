"""Text of others on a terminal: what would move its cursor, clear it or type for its user is shown, not obeyed."""

import re

_CONTROLS = re.compile(
    r"[^\x20-\x7e\xa0-\U0010ffff]|[\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Controls of ASCII and of Latin-1 (among them the one-character form of an escape sequence), line separators that are
not a line's end, and what is invisible or turns the direction of writing."""


def printable(text: str, *, lines: bool = True) -> str:
    """Replace what a terminal would take for a command, or would not show.

    Args:
        text: Any text.
        lines: Whether ends of lines and tabs stay.

    Returns:
        The text with one replacement character for each.
    """
    return _CONTROLS.sub(lambda found: found[0] if lines and found[0] in "\n\t" else "\ufffd", text)


def escaped(text: str) -> str:
    """Escape the same in a text of JSON, whose reader gets every character back.

    Args:
        text: A text of JSON.

    Returns:
        The same value in characters that can be printed.
    """
    return _CONTROLS.sub(lambda found: found[0] if found[0] in "\n\t" else f"\\u{ord(found[0]):04x}", text)
