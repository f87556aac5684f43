"""A duration as people write it: a number with its unit, such as ``90s``, ``10m``, ``4h`` or ``2d``."""

import re

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhd])")


def duration_seconds(text: str) -> float | None:
    """Read a number with its unit, such as ``90s`` or ``1.5h``, as seconds; None if the text is not a duration."""
    found = _DURATION.fullmatch(text.strip())
    return None if found is None else float(found[1]) * _UNITS[found[2]]
