"""Metrics of F = G ⊗ A from the two spectra: the eigenvalues of F are the products λᵢμⱼ.

Traces, norms, ranks, entropies and everything under factored damping follow from A's and G's own
in O(n + m). What needs every product is in ``kronecker_sums`` and ``kronecker_order``. Undefined
values are None.

References:
    Roy & Vetterli (2007), The effective rank: a measure of effective dimensionality
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def entropy_effective_rank(spectrum: Tensor) -> float | None:
    """Exp of the Shannon entropy of the normalised eigenvalues (n,); None for a zero matrix."""
    total = float(spectrum.sum())
    if total <= 0:
        return None
    share = spectrum[spectrum > 0] / total
    return math.exp(float(-(share * share.log()).sum()))


def participation_ratio(traces: tuple[float, float], norms: tuple[float | None, float | None]) -> float | None:
    """(Σλ)²/Σλ² of the products from each side's trace and Frobenius norm; None for a zero matrix, or without one."""
    ratio = 1.0
    for trace, norm in zip(traces, norms, strict=True):
        if norm is None or trace <= 0 or norm <= 0:
            return None
        # divided first: squares of small numbers underflow
        ratio *= (trace / norm) ** 2
    return ratio


def stable_rank(spectrum_a: Tensor, spectrum_g: Tensor) -> float | None:
    """‖F‖_F²/‖F‖₂², the product of the factors' own."""
    rank = 1.0
    for spectrum in (spectrum_a, spectrum_g):
        largest = float(spectrum.max())
        if largest <= 0:
            return None
        rank *= float((spectrum / largest).square().sum())
    return rank


def rank(spectrum_a: Tensor, spectrum_g: Tensor, tolerance: float) -> int:
    """Products above ``tolerance`` times the largest, for ascending spectra."""
    if float(spectrum_a[-1]) <= 0 or float(spectrum_g[-1]) <= 0:
        return 0
    # each side scaled by its largest first: the product of two small ones underflows
    positive = spectrum_a[spectrum_a > 0] / spectrum_a[-1]
    above = torch.searchsorted(spectrum_g / spectrum_g[-1], tolerance / positive, right=True)
    return int((spectrum_g.numel() - above).sum())


def logdet(spectrum_a: Tensor, spectrum_g: Tensor) -> float | None:
    """Log det F = m·log det A + n·log det G; None where F is singular."""
    if float(spectrum_a[0]) <= 0 or float(spectrum_g[0]) <= 0:
        return None
    return spectrum_g.numel() * float(spectrum_a.log().sum()) + spectrum_a.numel() * float(spectrum_g.log().sum())


def effective_dimension_factored(spectrum_a: Tensor, spectrum_g: Tensor, damping_a: float, damping_g: float) -> float:
    """The same under (A + λ_A I) ⊗ (G + λ_G I), which is another quantity: it factorises."""
    return float((spectrum_a / (spectrum_a + damping_a)).nan_to_num(0).sum()) * float(
        (spectrum_g / (spectrum_g + damping_g)).nan_to_num(0).sum()
    )


def logdet_factored(spectrum_a: Tensor, spectrum_g: Tensor, damping_a: float, damping_g: float) -> float | None:
    """Log det of (A + λ_A I) ⊗ (G + λ_G I) = m·log det(A + λ_A I) + n·log det(G + λ_G I); None where singular."""
    sides = spectrum_a + damping_a, spectrum_g + damping_g
    if float(sides[0][0]) <= 0 or float(sides[1][0]) <= 0:
        return None
    return logdet(*sides)


def kappa(spectrum_a: Tensor, spectrum_g: Tensor) -> float | None:
    """λ_max/λ_min of F, the product of the factors' own; None where F is singular."""
    return kappa_factored(spectrum_a, spectrum_g, 0.0, 0.0)


def kappa_damped(spectrum_a: Tensor, spectrum_g: Tensor, damping: float) -> float | None:
    """Condition (λ_max + λ)/(λ_min + λ) of F + λI; None where float64 does not reach it."""
    smallest = float(spectrum_a[0]) * float(spectrum_g[0]) + damping
    return _ratio(float(spectrum_a[-1]) * float(spectrum_g[-1]) + damping, smallest)


def kappa_factored(spectrum_a: Tensor, spectrum_g: Tensor, damping_a: float, damping_g: float) -> float | None:
    """Condition of (A + λ_A I) ⊗ (G + λ_G I), the product of the sides' own."""
    left = _ratio(float(spectrum_a[-1]) + damping_a, float(spectrum_a[0]) + damping_a)
    right = _ratio(float(spectrum_g[-1]) + damping_g, float(spectrum_g[0]) + damping_g)
    return None if left is None or right is None else _ratio(left * right, 1.0)


def effective_rank_of_blocks(traces: Sequence[float], ranks: Sequence[float | None]) -> float | None:
    """Entropy effective rank of a block-diagonal matrix from each block's trace and effective rank.

    With p_l = tr_l/Σ tr the entropies add up to H = Σ_l p_l (H_l − log p_l); a zero block adds nothing.
    """
    total = math.fsum(traces)
    if total <= 0:
        return None
    entropy = 0.0
    for trace, rank in zip(traces, ranks, strict=True):
        if trace > 0:
            if rank is None:
                return None
            share = trace / total
            entropy += share * (math.log(rank) - math.log(share)) if share > 0 else 0.0
    return math.exp(entropy)


def _ratio(above: float, below: float) -> float | None:
    if below <= 0 or not math.isfinite(above):
        return None
    ratio = above / below
    return ratio if math.isfinite(ratio) else None
