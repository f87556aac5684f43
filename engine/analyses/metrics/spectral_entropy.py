"""Entropy of a spectrum that is known by its effective dimensions alone.

From ``x log x = ∫₀^∞ (x/(1 + s) − x/(x + s)) ds`` follows, summed over the eigenvalues,

    ``tr S log S = ∫ (tr S/(1 + eᵘ) − tr S(S + eᵘ)⁻¹) eᵘ du``.

The integrand is analytic in the strip ``|Im u| < π`` and decays at both ends, so the trapezoidal rule with step h errs
by ``e^{−2π²/h}``: 1e-17 for h = 1/2. S is taken over its trace, so that the entropy is ``−tr S log S``. Below the
smallest shift that S answers, 1e-12 of its largest eigenvalue, the integrand is at most ``n s``.

References:
    Trefethen & Weideman (2014), The exponentially convergent trapezoidal rule
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_STEP = 0.5
_LOWEST = 1e-15
"""Shifts over the trace that the integral begins at, at most; n times it is what is left out."""
_HIGHEST = 1e16
"""Over the trace, where the integrand has decayed to rounding."""


def effective_rank(trace: float, effective_dimensions: Callable[[Tensor], Tensor], lowest_shift: float) -> float | None:
    """Return exp of the entropy of λ/Σλ; None for a zero matrix.

    Args:
        trace: Σ λ.
        effective_dimensions: ``Σ λ/(λ + s)`` for positive shifts s, shape (k,) -> (k,).
        lowest_shift: What it is not asked below.
    """
    if trace <= 0:
        return None
    first, last = math.log(max(_LOWEST, lowest_shift / trace)), math.log(_HIGHEST)
    shifts = (
        torch.arange(math.ceil(first / _STEP), math.floor(last / _STEP) + 1, dtype=torch.float64).mul_(_STEP).exp_()
    )
    found = effective_dimensions(shifts * trace).to("cpu", torch.float64)
    # of the far ends the terms nearly cancel: s/(1 + s) − s·d(s), by the small difference from 1
    integrand = shifts / (1 + shifts) - shifts * found
    entropy = -float(integrand.sum()) * _STEP
    return math.exp(max(entropy, 0.0))
