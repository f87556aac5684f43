"""Extrapolation of a metric to an infinite sample, and whether the metric has converged to that limit.

A smooth function of a sample covariance is off by c/N to leading order, so two sizes give the
value at infinitely many examples: v∞ = (N·v(N) − M·v(M))/(N − M), which for M = N/2 is the value
at N plus once more what the last doubling added. While N is below the dimension the error falls
more slowly, and v∞ is then still on the near side of the truth. Reruns with other examples agree
with one another and say nothing of this: spectra of power laws keep their effective rank 20 to 30
per cent too low at N near the dimension.

References:
    Richardson (1911), The approximate arithmetical solution by finite differences
"""

import math
from collections.abc import Sequence

TOLERANCE = 0.05
"""A metric whose extrapolation lies further from it than this share has not converged."""


def extrapolated(
    examples: Sequence[int],
    values: Sequence[float | None],
    *,
    floor: float | None = None,
    ceiling: float | None = None,
) -> float | None:
    """Return v∞ = v(N) + (v(N) − v(M))·M/(N − M), the value at infinitely many examples, from the last two sizes.

    Args:
        examples: Sizes, ascending.
        values: The metric at each; None where it has no value.
        floor: What it cannot fall below; None if it has no lower bound.
        ceiling: What it cannot exceed; None if it has no upper bound.

    Returns:
        v∞ in the metric's unit, within the bounds; None with fewer than two values, or beyond float64.
    """
    if len(values) < 2 or values[-1] is None or values[-2] is None or examples[-1] <= examples[-2]:
        return None
    # the difference first: the products of large values with large sizes would overflow
    found = values[-1] + (values[-1] - values[-2]) * examples[-2] / (examples[-1] - examples[-2])
    if not math.isfinite(found):
        return None
    found = found if floor is None else max(found, floor)
    return found if ceiling is None else min(found, ceiling)


def not_converged(value: float | None, limit: float | None, scale: float | None = None) -> bool | None:
    """Return whether a metric differs from its limit by more than ``TOLERANCE``.

    Args:
        value: The metric at the largest size; None if it has no value.
        limit: Its extrapolation (``extrapolated``); None if there is none.
        scale: Unit that the difference is measured in; None is the size of the limit itself.

    Returns:
        Whether |limit − value| > 0.05·scale; None where either is unknown.
    """
    if value is None or limit is None:
        return None
    return abs(limit - value) > TOLERANCE * (abs(limit) if scale is None else scale)
