"""A refusal of a job: who must act, which field is wrong, and the remedy."""

from typing import Any, Literal, NoReturn

Category = Literal["usage", "transient", "fatal"]


class Refusal(Exception):
    """A job that cannot be done as asked; the message is for its sender."""

    category: Category = "usage"

    def __init__(self, message: str, *, pointer: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.pointer = pointer
        self.code = code


class Unavailable(Refusal):
    """Something outside did not answer; the same job may succeed later."""

    category: Category = "transient"


def storable_text(text: str) -> str:
    """Return text that UTF-8 and every database can hold."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def is_storable(text: str) -> bool:
    """Return whether UTF-8 can hold a text: whether it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's fields, for ``object_pairs_hook``: of two with one name Python would keep the last."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"two fields are called {names([name])}")
        found[name] = value
    return found


def no_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, for ``parse_constant`` of JSON."""
    raise ValueError(name)


def names(found: list[str], most: int = 5) -> str:
    """Return a list of names for a sentence.

    Names come from files that others wrote, so control characters are shown and length is bounded.
    """
    shown = ", ".join(f"`{name[:120]!s}`" if name.isprintable() else repr(name[:120]) for name in found[:most])
    rest = len(found) - most
    return f"{shown} and {rest} more" if rest > 0 else shown
