"""Estimates from sums: the exact trace with its standard error, and the variance of a factor over batches.

Both are functions of sums over examples or batches, so they are the same whether one collection made the sums or
several did. The trace of a layer's block is the ratio estimator ``R = Σ s_n / Σ m_n`` with the standard error
``√(N/(N−1) · Σ (s_n − R m_n)²) / Σ m_n``. The variance of a factor over batches is Welford's, and two sets of batches
with the counts ``w`` and ``v`` and the factors ``A`` and ``B`` are joined by

    S = S_A + S_B + w v / (w + v) ‖A − B‖²_F.

References:
    Cochran (1977), Sampling techniques, chapter 6: the ratio estimator
    Chan, Golub & LeVeque (1983), Algorithms for computing the sample variance: joining two samples
"""

import math
from collections.abc import Sequence

from engine.factors.factor_set import VarianceSums


def exact_trace(sums: Sequence[float], weight: float, examples: int) -> tuple[float | None, float | None]:
    """Return the trace of a layer's block of the curvature of the mean loss, and its standard error.

    The error is that over the N examples as a sample. ``sums`` are ``Σ s, Σ s², Σ s m, Σ m²`` over them; ``weight`` is
    ``Σ m``, above 0, decayed where the first sum is. None stands for each that is not a number.
    """
    total, squared, crossed, weights_squared = sums
    ratio = total / weight
    residual = squared - 2 * ratio * crossed + ratio**2 * weights_squared
    degrees = examples - 1
    error = math.sqrt(max(residual, 0.0) * examples / degrees) / weight if degrees else math.nan
    return ratio if math.isfinite(ratio) else None, error if math.isfinite(error) else None


def joined_variance(
    first: VarianceSums, second: VarianceSums, weights: tuple[float, float], gap: float
) -> VarianceSums:
    """Join the sums of two sets of batches."""
    total = sum(weights)
    between = weights[0] * weights[1] / total * gap if total > 0 else 0.0
    return VarianceSums(
        squares=first.squares + second.squares + between,
        batches=first.batches + second.batches,
        weights=first.weights + second.weights,
    )


def missing_variance(batches: int) -> str:
    """Return the reason, as the end of a sentence, why a factor has no variance over batches.

    ``batches`` counts those that had a factor of their own.
    """
    if batches > 1:
        return "it is zero, or overflows"
    return f"{'one batch' if batches else 'no batch'} entered, and two are needed"


def relative_variance(
    sums: VarianceSums, counts: float, weight: float, squared_norm: float
) -> tuple[float | None, float | None]:
    """Return the variance of one batch's factor, and the standard error of the factor of all, relative to its norm.

    ``counts`` is ``P``, the number of batches, decayed under a moving average; ``weight`` is ``W``, the factor's own
    count; ``squared_norm`` is ``‖A‖²_F`` of the factor. None where fewer than two batches had a factor, or one of the
    two is not a number.
    """
    variance = error = math.nan
    if sums.batches > 1 and squared_norm > 0:
        unit = sums.squares / (counts - sums.weights / weight) / squared_norm
        variance, error = unit * counts / weight, math.sqrt(unit * sums.weights) / weight
    return variance if math.isfinite(variance) else None, error if math.isfinite(error) else None
