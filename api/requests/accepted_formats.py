"""The *accepted format* of an answer: the media type that the header `Accept` prefers (RFC 9110, section 12.5.1).

::

    the weight of a type     that of the most specific range it is in: `text/csv` before `text/*` before `*/*`
    the type that is chosen  the one of the largest weight; of equal ones the most specific, then the first named
    a weight of 0            the type is not chosen
"""

import re
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T", bound=str)

_WEIGHT = re.compile(r"0(?:\.\d{0,3})?|1(?:\.0{0,3})?")


def preferred(accept: str | None, served: Mapping[str, T], default: T) -> T:
    """Return the format that a caller prefers.

    Args:
        accept: The header's value; None where it was not sent.
        served: The formats by their media types, in the order that decides where the header leaves them equal.
        default: The format where none of them is accepted.

    Returns:
        A format that the header does not give a weight of 0, or the default.
    """
    ranges = _ranges(accept or "")
    best: tuple[float, int, int] = (0.0, 0, 0)
    chosen = default
    for media_type, name in served.items():
        for specificity, named in enumerate((media_type, f"{media_type.partition('/')[0]}/*", "*/*")):
            if named in ranges:
                weight, place = ranges[named]
                rank = (weight, -specificity, -place)
                if weight > 0 and (best[0] == 0 or rank > best):
                    best, chosen = rank, name
                break
    return chosen


def _ranges(accept: str) -> Mapping[str, tuple[float, int]]:
    """Return the weight and the place of each range of a header; one whose weight cannot be read is left out."""
    ranges: dict[str, tuple[float, int]] = {}
    for place, part in enumerate(accept.split(",")):
        named, *parameters = (each.strip().lower() for each in part.split(";"))
        weights = [each.partition("=")[2].strip() for each in parameters if each.partition("=")[0].strip() == "q"]
        weight = weights[0] if weights else "1"
        if _WEIGHT.fullmatch(weight):
            ranges.setdefault(named, (float(weight), place))
    return ranges
