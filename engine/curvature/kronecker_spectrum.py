"""Metrics of F = G ⊗ A from the two spectra: the eigenvalues of F are the products λᵢμⱼ.

Traces, norms, ranks and entropies follow from A's and G's own in O(n + m); `log det(F + λI)` and
the effective dimension Σ λᵢμⱼ/(λᵢμⱼ + λ) need every product and are summed in float64, a chunk of
A's eigenvalues at a time. Undefined values are None.

References:
    Roy & Vetterli (2007), The effective rank: a measure of effective dimensionality
    MacKay (1992), Bayesian interpolation (effective number of parameters)
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_PRODUCTS_AT_ONCE = 2**22


def entropy_effective_rank(spectrum: Tensor) -> float | None:
    """Exp of the Shannon entropy of the normalised eigenvalues (n,); None for a zero matrix."""
    total = float(spectrum.sum())
    if total <= 0:
        return None
    share = spectrum[spectrum > 0] / total
    return math.exp(float(-(share * share.log()).sum()))


def participation_ratio(spectrum_a: Tensor, spectrum_g: Tensor) -> float | None:
    """(Σλ)²/Σλ² of the products, which is the product of the factors' own ratios."""
    ratio = 1.0
    for spectrum in (spectrum_a, spectrum_g):
        largest = float(spectrum.max())
        if largest <= 0:
            return None
        # scaled first: squares of small eigenvalues underflow
        scaled = spectrum / largest
        ratio *= float(scaled.sum()) ** 2 / float(scaled.square().sum())
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


def logdet_damped(spectrum_a: Tensor, spectrum_g: Tensor, damping: float) -> float:
    """Log det(F + λI) over every product.

    Memory:
        At most 4 Mi products at once.
    """
    # log λ + log1p(λᵢμⱼ/λ) keeps the digits of products far below λ
    constant = spectrum_a.numel() * spectrum_g.numel() * math.log(damping)
    return constant + sum(
        float(torch.log1p(products).sum()) for products in _products(spectrum_a / damping, spectrum_g)
    )


def effective_dimension(spectrum_a: Tensor, spectrum_g: Tensor, damping: float) -> float:
    """Σ λᵢμⱼ/(λᵢμⱼ + λ) over every product.

    Memory:
        At most 4 Mi products at once.
    """
    return sum(float((products / (products + 1)).sum()) for products in _products(spectrum_a / damping, spectrum_g))


def effective_dimension_factored(spectrum_a: Tensor, spectrum_g: Tensor, damping_a: float, damping_g: float) -> float:
    """The same under (A + λ_A I) ⊗ (G + λ_G I), which is another quantity: it factorises."""
    return float((spectrum_a / (spectrum_a + damping_a)).nan_to_num(0).sum()) * float(
        (spectrum_g / (spectrum_g + damping_g)).nan_to_num(0).sum()
    )


def _products(spectrum_a: Tensor, spectrum_g: Tensor) -> Iterator[Tensor]:
    rows = max(1, _PRODUCTS_AT_ONCE // spectrum_g.numel())
    for start in range(0, spectrum_a.numel(), rows):
        yield torch.outer(spectrum_a[start : start + rows], spectrum_g)
