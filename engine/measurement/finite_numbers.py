"""Finite numbers: what float64 cannot hold is null in a result, and the result says which numbers those are.

Curvature spans any magnitude: the square of 1e300 is beyond float64, and so is the quotient of two
numbers of 1e-310. JSON has no word for either, and a job must not end for one of its many numbers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

Record = TypeVar("Record")
_PLAIN = (int, float, str, type(None))


def nullify(record: Record) -> tuple[Record, tuple[str, ...]]:
    """Replace NaN and infinities by null."""
    names: list[str] = []
    return _finite(record, "", names), tuple(names)


def reason(names: tuple[str, ...]) -> str:
    """Describe the fields that were replaced."""
    listed = ", ".join(f"`{name}`" for name in names)
    return f"null, since float64 does not hold it: {listed}" if names else ""


def finite_summary(summary: Record, log: Callable[[str, str], None]) -> Record:
    """Replace what is not finite in a summary by null, and log the names of those numbers.

    Args:
        summary: The summary of an analysis.
        log: The job's log, ``log(level, message)``.

    Returns:
        A copy, of numbers that JSON can hold.
    """
    finite, names = nullify(summary)
    if names:
        log("warning", f"summary: {reason(names)}")
    return finite


def _finite(value: Any, name: str, names: list[str]) -> Any:  # noqa: ANN401 - any record's field
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else [value]
    if any(isinstance(part, float) and not math.isfinite(part) for part in parts):
        names.append(name)
        return None
    if all(isinstance(part, _PLAIN) for part in parts):
        # most fields, and the densities of thousands of layers
        return value
    if isinstance(value, dict):
        return {key: _finite(part, f"{name}.{key}", names) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_finite(part, f"{name}[{place}]", names) for place, part in enumerate(value)])
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    before = len(names)
    fields = {
        field.name: _finite(getattr(value, field.name), f"{name}.{field.name}".lstrip("."), names)
        for field in dataclasses.fields(value)
    }
    return value if len(names) == before else dataclasses.replace(value, **fields)
