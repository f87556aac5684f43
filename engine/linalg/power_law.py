"""The power law of a spectrum: the exponent α of λ_k ∝ k^−α, fitted over a stated range of ranks.

Ordinary least squares of log λ_k against log k at ranks spread evenly in the logarithm, from the
tenth largest eigenvalue to a quarter of the numerical rank. The first few are single directions
that follow no law, and the last ones bend down in every finite sample. A range of less than half
a decade gives no exponent; R² says how straight the line is.

References:
    Stringer et al. (2019), High-dimensional geometry of population responses in visual cortex:
    the same regression over ranks 11 to 500
"""

import math
import statistics
from dataclasses import dataclass

from engine.linalg.kronecker_quantiles import Products

_FIRST = 10
_LAST_SHARE = 4
_RANKS = 12
_FROM_ABOVE = 1000
"""Ranks up to here come from the largest products directly, which is quicker than counting."""


@dataclass(frozen=True, kw_only=True)
class Decay:
    """A fitted power law."""

    exponent: float
    first_rank: int
    """Of the range that the fit is over, from 1 for the largest eigenvalue."""
    last_rank: int
    r_squared: float | None
    """Share of the variance of log λ that the line explains; None where all are equal."""


def decay(products: Products, rank: int) -> Decay | None:
    """Fit the exponent α of λ_k ∝ k^−α to a spectrum.

    Args:
        products: The eigenvalues.
        rank: Numerical rank; the fit ends at a quarter of it.

    Returns:
        The fit; None where the range is shorter than half a decade, or an eigenvalue in it is zero.
    """
    last = rank // _LAST_SHARE
    if last < _FIRST * math.sqrt(10):
        return None
    ratio = last / _FIRST
    ranks = sorted({round(_FIRST * ratio ** (place / (_RANKS - 1))) for place in range(_RANKS)})
    above = products.top(min(last, _FROM_ABOVE)).tolist()
    values = [above[each - 1] if each <= len(above) else products.smallest(products.size + 1 - each) for each in ranks]
    if values[-1] <= 0:
        return None
    places, heights = [math.log(each) for each in ranks], [math.log(value) for value in values]
    slope, _ = statistics.linear_regression(places, heights)
    # values that differ in their last bit alone have one logarithm
    varied = heights[0] != heights[-1]
    return Decay(
        exponent=-slope if varied else 0.0,
        first_rank=ranks[0],
        last_rank=ranks[-1],
        r_squared=statistics.correlation(places, heights) ** 2 if varied else None,
    )
