"""Time estimates: the durations of a plan that are worth showing, and their possible error.

A duration is work over pace. Its bounds are a factor of four either way where the pace was measured on the machine, of
a job that has its cores to itself, and of twenty where it is what is usual of such a device. The factors are assumed;
no benchmark holds them, and on cores that others use a stage took up to sixteen times as long. Below ten
seconds at a usual pace most of a duration is the start of things, which no plan counts, and the figure would
mislead.
"""

from typing import Literal

Paced = Literal["measured", "usual"]
"""Whether a plan's pace was measured on the machine, or is what is usual of such a device."""

WORTH_SECONDS = 10.0
"""From which a duration is shown at a usual pace, and a machine's pace is worth measuring."""
OFF_BY: dict[Paced, float] = {"measured": 4.0, "usual": 20.0}


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
    bounds = seconds_range(seconds, pace)
    if bounds is None or seconds is None:
        return ""
    low, high = (_rounded(bound) for bound in bounds)
    return f"{_rounded(seconds)} s ({low} to {high})"


def _rounded(seconds: float) -> str:
    """Two digits, without an exponent."""
    rounded = float(f"{seconds:.2g}")
    return f"{rounded:.0f}" if rounded >= 10 else f"{rounded:g}"
