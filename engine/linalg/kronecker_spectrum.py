"""The Kronecker spectrum of F = G ⊗ A: its eigenvalues are the products λᵢμⱼ, and metrics follow from the two spectra.

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
    """Return exp(−Σ pᵢ log pᵢ) with pᵢ = λᵢ/Σλ, the effective rank of Roy & Vetterli.

    Args:
        spectrum: Eigenvalues, shape (n,), float64; those that are not positive add nothing.

    Returns:
        Between 1 and n; None for a zero matrix.
    """
    total = float(spectrum.sum())
    if total <= 0:
        return None
    share = spectrum[spectrum > 0] / total
    return math.exp(float(-(share * share.log()).sum()))


def participation_ratio(traces: tuple[float, float], norms: tuple[float | None, float | None]) -> float | None:
    """Return (Σλ)²/Σλ² over the products, from each side's trace and Frobenius norm.

    Args:
        traces: tr A and tr G.
        norms: ‖A‖_F and ‖G‖_F; None where one is unknown.

    Returns:
        Between 1 and n·m; None for a zero matrix, or where a norm is unknown.
    """
    ratio = 1.0
    for trace, norm in zip(traces, norms, strict=True):
        if norm is None or trace <= 0 or norm <= 0:
            return None
        # divided first: squares of small numbers underflow
        ratio *= (trace / norm) ** 2
    return ratio


def stable_rank(spectrum_a: Tensor, spectrum_g: Tensor) -> float | None:
    """Return ‖F‖_F²/‖F‖₂², the product of the factors' own stable ranks.

    Args:
        spectrum_a: Eigenvalues of A, shape (n,), float64.
        spectrum_g: Eigenvalues of G, shape (m,), float64.

    Returns:
        Between 1 and n·m; None for a zero matrix.
    """
    rank = 1.0
    for spectrum in (spectrum_a, spectrum_g):
        largest = float(spectrum.max())
        if largest <= 0:
            return None
        rank *= float((spectrum / largest).square().sum())
    return rank


def rank(spectrum_a: Tensor, spectrum_g: Tensor, tolerance: float) -> int:
    """Return the numerical rank of F: the number of products above ``tolerance`` times the largest.

    Args:
        spectrum_a: Eigenvalues of A, shape (n,), float64, ascending.
        spectrum_g: Eigenvalues of G, shape (m,), float64, ascending.
        tolerance: Share of the largest product, below 1.

    Returns:
        Between 0, for a zero matrix, and n·m.
    """
    if float(spectrum_a[-1]) <= 0 or float(spectrum_g[-1]) <= 0:
        return 0
    # each side scaled by its largest first: the product of two small ones underflows
    positive = spectrum_a[spectrum_a > 0] / spectrum_a[-1]
    above = torch.searchsorted(spectrum_g / spectrum_g[-1], tolerance / positive, right=True)
    return int((spectrum_g.numel() - above).sum())


def logdet(spectrum_a: Tensor, spectrum_g: Tensor) -> float | None:
    """Return log det F = m·log det A + n·log det G.

    Args:
        spectrum_a: Eigenvalues of A, shape (n,), float64, ascending.
        spectrum_g: Eigenvalues of G, shape (m,), float64, ascending.

    Returns:
        The natural logarithm; None where F is singular.
    """
    if float(spectrum_a[0]) <= 0 or float(spectrum_g[0]) <= 0:
        return None
    return spectrum_g.numel() * float(spectrum_a.log().sum()) + spectrum_a.numel() * float(spectrum_g.log().sum())


def effective_dimension_factored(spectrum_a: Tensor, spectrum_g: Tensor, damping_a: float, damping_g: float) -> float:
    """Return Σᵢ λᵢ/(λᵢ + λ_A) · Σⱼ μⱼ/(μⱼ + λ_G), the effective dimension under (A + λ_A I) ⊗ (G + λ_G I).

    It factorises, and is another quantity than Σᵢⱼ λᵢμⱼ/(λᵢμⱼ + λ).

    Args:
        spectrum_a: Eigenvalues λᵢ of A, shape (n,), float64.
        spectrum_g: Eigenvalues μⱼ of G, shape (m,), float64.
        damping_a: λ_A ≥ 0.
        damping_g: λ_G ≥ 0.

    Returns:
        Between 0 and n·m; an undamped zero eigenvalue adds nothing.
    """
    return float((spectrum_a / (spectrum_a + damping_a)).nan_to_num(0).sum()) * float(
        (spectrum_g / (spectrum_g + damping_g)).nan_to_num(0).sum()
    )


def logdet_factored(spectrum_a: Tensor, spectrum_g: Tensor, damping_a: float, damping_g: float) -> float | None:
    """Return log det of (A + λ_A I) ⊗ (G + λ_G I) = m·log det(A + λ_A I) + n·log det(G + λ_G I).

    Args:
        spectrum_a: Eigenvalues of A, shape (n,), float64, ascending.
        spectrum_g: Eigenvalues of G, shape (m,), float64, ascending.
        damping_a: λ_A ≥ 0.
        damping_g: λ_G ≥ 0.

    Returns:
        The natural logarithm; None where the damped matrix is singular.
    """
    sides = spectrum_a + damping_a, spectrum_g + damping_g
    if float(sides[0][0]) <= 0 or float(sides[1][0]) <= 0:
        return None
    return logdet(*sides)


def kappa(spectrum_a: Tensor, spectrum_g: Tensor) -> float | None:
    """Return the condition number λ_max/λ_min of F, the product of the factors' own.

    Args:
        spectrum_a: Eigenvalues of A, shape (n,), float64, ascending.
        spectrum_g: Eigenvalues of G, shape (m,), float64, ascending.

    Returns:
        At least 1; None where F is singular or the ratio is beyond float64.
    """
    return kappa_factored(spectrum_a, spectrum_g, 0.0, 0.0)


def kappa_damped(spectrum_a: Tensor, spectrum_g: Tensor, damping: float) -> float | None:
    """Return the condition number (λ_max + λ)/(λ_min + λ) of F + λI.

    Args:
        spectrum_a: Eigenvalues of A, shape (n,), float64, ascending.
        spectrum_g: Eigenvalues of G, shape (m,), float64, ascending.
        damping: λ ≥ 0.

    Returns:
        At least 1; None where the matrix is singular or the ratio is beyond float64.
    """
    smallest = float(spectrum_a[0]) * float(spectrum_g[0]) + damping
    return _ratio(float(spectrum_a[-1]) * float(spectrum_g[-1]) + damping, smallest)


def kappa_factored(spectrum_a: Tensor, spectrum_g: Tensor, damping_a: float, damping_g: float) -> float | None:
    """Return the condition number of (A + λ_A I) ⊗ (G + λ_G I), the product of the sides' own.

    Args:
        spectrum_a: Eigenvalues of A, shape (n,), float64, ascending.
        spectrum_g: Eigenvalues of G, shape (m,), float64, ascending.
        damping_a: λ_A ≥ 0.
        damping_g: λ_G ≥ 0.

    Returns:
        At least 1; None where a side is singular or the ratio is beyond float64.
    """
    left = _ratio(float(spectrum_a[-1]) + damping_a, float(spectrum_a[0]) + damping_a)
    right = _ratio(float(spectrum_g[-1]) + damping_g, float(spectrum_g[0]) + damping_g)
    return None if left is None or right is None else _ratio(left * right, 1.0)


def effective_rank_of_blocks(traces: Sequence[float], ranks: Sequence[float | None]) -> float | None:
    """Return the entropy effective rank of a block-diagonal matrix from each block's trace and effective rank.

    With p_l = tr_l/Σ tr the entropies add up to H = Σ_l p_l (H_l − log p_l); a zero block adds nothing.

    Args:
        traces: tr_l of each block.
        ranks: exp(H_l) of each block; None where it is unknown.

    Returns:
        exp(H); None for a zero matrix, or if the rank of a block that is not zero is unknown.
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
