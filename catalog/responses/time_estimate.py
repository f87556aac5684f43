"""Time estimates: the durations of a plan that are worth showing, and their possible error.

A duration is work over pace. Its bounds are a factor of two either way where the pace was measured on a machine that
the job has to itself, of three where others used its cores meanwhile, and of twenty where it is what is usual of such a
device. `benchmarks.job_seconds` holds the first two. Below ten seconds at a usual pace the start of things counts most,
and the figure would mislead.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Paced = Literal["measured", "shared", "usual"]
"""Whether a plan's pace was measured on the machine, beside other programs, or is what is usual of such a device."""

WORTH_SECONDS = 10.0
"""From which a duration is shown at a usual pace."""
OFF_BY: dict[Paced, float] = {"measured": 2.0, "shared": 3.0, "usual": 20.0}


def pace_of(plan: Mapping[str, Any]) -> Paced:
    """Return the pace that a stored plan's seconds are by; `usual` where it says nothing that is known."""
    known: dict[Any, Paced] = {each: each for each in OFF_BY}
    return known.get(plan.get("pace"), "usual")


def seconds_range(seconds: float | None, pace: Paced) -> tuple[float, float] | None:
    """Return the bounds of a foreseen duration; None where it is not worth showing.

    Args:
        seconds: What is foreseen; None and 0 where nothing is.
        pace: What it was foreseen by.

    Returns:
        The least and the most that it may take, in seconds.
    """
    if not seconds or (pace == "usual" and seconds < WORTH_SECONDS):
        return None
    return seconds / OFF_BY[pace], seconds * OFF_BY[pace]


def written_seconds(seconds: float | None, pace: Paced) -> str:
    """Write a predicted duration with its bounds, such as ``24 s (6 to 96)``.

    Args:
        seconds: The prediction; None and 0 where there is none.
        pace: Whether the machine's pace was measured, or is the usual one.

    Returns:
        The text; empty if the duration is not worth showing.
    """
    return written_range(seconds, seconds_range(seconds, pace))


def written_range(seconds: float | None, bounds: Sequence[float] | None) -> str:
    """Write a predicted duration with bounds that are given, such as ``24 s (12 to 48)``; empty without them."""
    if bounds is None or seconds is None:
        return ""
    low, high = (rounded_seconds(bound) for bound in bounds)
    return f"{rounded_seconds(seconds)} s ({low} to {high})"


def rounded_seconds(seconds: float) -> str:
    """Write a duration with two digits, and without an exponent."""
    rounded = float(f"{seconds:.2g}")
    return f"{rounded:.0f}" if rounded >= 10 else f"{rounded:g}"
