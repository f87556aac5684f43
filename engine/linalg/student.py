"""Student's distribution: the quantile that makes a 95 % interval of a mean out of a sample's own deviation.

``P(|T| ≤ t) = 0.95`` for ν degrees of freedom. With ``t = √ν tan φ`` that probability is proportional to
``∫₀^φ cos^(ν−1)``, which is smooth on a bounded interval.

References:
    Student (1908), The probable error of a mean
"""

import math
from functools import cache

CONFIDENCE = 0.95


@cache
def student_quantile(freedom: int) -> float:
    """Return the t with ``P(|T| ≤ t) = 0.95`` of Student's distribution.

    The integral is summed by Simpson's rule, its upper end bisected.

    Args:
        freedom: The degrees of freedom ν, at least 1.

    Returns:
        The two-sided quantile, such as 12.7 for ν = 1.
    """
    scale = 2 * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def within(angle: float) -> float:
        steps = 256
        width = angle / steps
        weights = [1, *([4, 2] * (steps // 2))[: steps - 1], 1]
        ordinates = (weight * math.cos(step * width) ** (freedom - 1) for step, weight in enumerate(weights))
        return scale * width / 3 * math.fsum(ordinates)

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
