"""The Kronecker spectrum of F = G ⊗ A: its eigenvalues are the products λᵢμⱼ, and metrics follow from the two spectra.

Traces, norms, ranks, entropies and everything under factored damping follow from A's and G's own
in O(n + m). Sums over every product, log det(F + λI) and Σ λᵢμⱼ/(λᵢμⱼ + λ), take the products of two condensed spectra
(``condense_spectrum``) in place of all n·m: some 200 nodes a side for a spectrum over twelve decades, whatever n and m
are, and the same nodes for every λ. Where G is known by its own log-determinants alone (a structured side that is never
made dense), the sum over A's nodes is Σ_k w_k Σⱼ p(x_k μⱼ), and the inner sum is asked of G at the shift λ/x_k.
Quantiles of the products are in ``kronecker_quantiles``.

``spectrum_a`` (n,) and ``spectrum_g`` (m,) are the eigenvalues λᵢ of A and μⱼ of G, float64, ascending; every damping
is ≥ 0. What is not defined is None: of a zero or singular matrix, or a ratio beyond float64.

References:
    MacKay (1992), Bayesian interpolation (effective number of parameters)
    Roy & Vetterli (2007), The effective rank: a measure of effective dimensionality
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.linalg.linear_operator import Structured
from engine.linalg.spectrum_quadrature import SpectrumQuadrature, times_power

_PRODUCTS_AT_ONCE = 2**18
_ZERO = 1e-6


def entropy_effective_rank(spectrum: Tensor) -> float | None:
    """Return exp(−Σ pᵢ log pᵢ) with pᵢ = λᵢ/Σλ, the effective rank of Roy & Vetterli, between 1 and n.

    Eigenvalues (n,) that are not positive add nothing. None for a zero matrix.
    """
    total = float(spectrum.sum())
    if total <= 0:
        return None
    share = spectrum[spectrum > 0] / total
    return math.exp(float(-(share * share.log()).sum()))


def participation_ratio(traces: tuple[float, float], norms: tuple[float | None, float | None]) -> float | None:
    """Return (Σλ)²/Σλ² over the products, from each side's trace and Frobenius norm; between 1 and n·m.

    None for a zero matrix, or where a norm is unknown.
    """
    ratio = 1.0
    for trace, norm in zip(traces, norms, strict=True):
        if norm is None or trace <= 0 or norm <= 0:
            return None
        # divided first: squares of small numbers underflow
        ratio *= (trace / norm) ** 2
    return ratio


def stable_rank(spectrum_a: Tensor, spectrum_g: Tensor) -> float | None:
    """Return ‖F‖_F²/‖F‖₂², the product of the factors' own stable ranks, between 1 and n·m; None for a zero matrix."""
    rank = 1.0
    for spectrum in (spectrum_a, spectrum_g):
        largest = float(spectrum.max())
        if largest <= 0:
            return None
        rank *= float((spectrum / largest).square().sum())
    return rank


def rank(spectrum_a: Tensor, spectrum_g: Tensor, tolerance: float) -> int:
    """Return the numerical rank of F: the number of products above ``tolerance`` < 1 times the largest."""
    if float(spectrum_a[-1]) <= 0 or float(spectrum_g[-1]) <= 0:
        return 0
    # each side scaled by its largest first: the product of two small ones underflows
    positive = spectrum_a[spectrum_a > 0] / spectrum_a[-1]
    above = torch.searchsorted(spectrum_g / spectrum_g[-1], tolerance / positive, right=True)
    return int((spectrum_g.numel() - above).sum())


def logdet(spectrum_a: Tensor, spectrum_g: Tensor) -> float | None:
    """Return log det F = m·log det A + n·log det G, the natural logarithm; None where F is singular."""
    if float(spectrum_a[0]) <= 0 or float(spectrum_g[0]) <= 0:
        return None
    return spectrum_g.numel() * float(spectrum_a.log().sum()) + spectrum_a.numel() * float(spectrum_g.log().sum())


def effective_dimension_factored(spectrum_a: Tensor, spectrum_g: Tensor, damping_a: float, damping_g: float) -> float:
    """Return Σᵢ λᵢ/(λᵢ + λ_A) · Σⱼ μⱼ/(μⱼ + λ_G), the effective dimension under (A + λ_A I) ⊗ (G + λ_G I).

    It factorises, and is another quantity than Σᵢⱼ λᵢμⱼ/(λᵢμⱼ + λ). An undamped zero eigenvalue adds nothing.
    """
    return float((spectrum_a / (spectrum_a + damping_a)).nan_to_num(0).sum()) * float(
        (spectrum_g / (spectrum_g + damping_g)).nan_to_num(0).sum()
    )


def logdet_factored(spectrum_a: Tensor, spectrum_g: Tensor, damping_a: float, damping_g: float) -> float | None:
    """Return log det of (A + λ_A I) ⊗ (G + λ_G I) = m·log det(A + λ_A I) + n·log det(G + λ_G I).

    None where the damped matrix is singular.
    """
    sides = spectrum_a + damping_a, spectrum_g + damping_g
    if float(sides[0][0]) <= 0 or float(sides[1][0]) <= 0:
        return None
    return logdet(*sides)


def kappa(spectrum_a: Tensor, spectrum_g: Tensor) -> float | None:
    """Return the condition number λ_max/λ_min of F, the product of the factors' own; None where F is singular."""
    return kappa_factored(spectrum_a, spectrum_g, 0.0, 0.0)


def kappa_damped(spectrum_a: Tensor, spectrum_g: Tensor, damping: float) -> float | None:
    """Return the condition number (λ_max + λ)/(λ_min + λ) of F + λI; None where that is singular."""
    smallest = float(spectrum_a[0]) * float(spectrum_g[0]) + damping
    return _ratio(float(spectrum_a[-1]) * float(spectrum_g[-1]) + damping, smallest)


def kappa_factored(spectrum_a: Tensor, spectrum_g: Tensor, damping_a: float, damping_g: float) -> float | None:
    """Return the condition number of (A + λ_A I) ⊗ (G + λ_G I), the product of the sides' own; None where singular."""
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


def ends_of_drawn(spectrum: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """Return a spectrum (n,) with the eigenvalues that rounding may have drawn all zero, and all as large as may be.

    The squares of the n shifts add up to ``rounding``² at most (Hoffman and Wielandt 1953): twice their mean is taken.
    What is far below it is not as large, as of a unit that is never active, but zero all the same.
    """
    least = rounding * min(1.0, 2 / math.sqrt(spectrum.numel()))
    drawn = (spectrum > 0) & (spectrum <= least)
    if not bool(drawn.any()):
        return spectrum, spectrum
    return spectrum.masked_fill(drawn, 0.0), spectrum.masked_fill(drawn & (spectrum > _ZERO * least), least)


def _ratio(above: float, below: float) -> float | None:
    if below <= 0 or not math.isfinite(above):
        return None
    ratio = above / below
    return ratio if math.isfinite(ratio) else None


def logdet_damped(a: SpectrumQuadrature, g: SpectrumQuadrature, damping: float) -> float | None:
    """Return log det(F + λI) = Σᵢⱼ log(λᵢμⱼ + λ), λ > 0, over the nodes of two condensed spectra, 256 Ki at once.

    None where λ is beyond float64 beside the largest eigenvalue.
    """
    scaled = _scaled(a.exponent + g.exponent, damping)
    if scaled is None:
        return None
    if scaled == math.inf:
        return a.size * g.size * math.log(damping)
    exponent = torch.tensor(a.exponent + g.exponent)
    total = (a.size * g.size - (a.size - a.zeros) * (g.size - g.zeros)) * math.log(damping)
    for rows, weights in _rows(a, g):
        products = torch.outer(rows, g.nodes)
        # the larger of the two in its own scale, so that nothing large is added and taken away again
        large = products.clamp(min=scaled)
        logarithms = times_power(large, exponent).log_().add_(torch.log1p(products.clamp_(max=scaled) / large))
        total += float(weights @ logarithms @ g.weights)
    return total


def effective_dimensions(a: SpectrumQuadrature, g: SpectrumQuadrature, dampings: Sequence[float]) -> list[float | None]:
    """Return Σᵢⱼ λᵢμⱼ/(λᵢμⱼ + λ) at each λ > 0, over the nodes of two condensed spectra, at most 256 Ki at once.

    Between 0 and n·m; None where λ is beyond float64 beside the largest eigenvalue.
    """
    scaled = [_scaled(a.exponent + g.exponent, damping) for damping in dampings]
    totals = [0.0] * len(dampings)
    for rows, weights in _rows(a, g):
        products = torch.outer(rows, g.nodes)
        for place, damping in enumerate(scaled):
            if damping is not None:
                totals[place] += float(weights @ (products / (products + damping)) @ g.weights)
    return [None if damping is None else total for damping, total in zip(scaled, totals, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Answering:
    """A G that answers at shifts, and what is known of it below the smallest shift that it answers."""

    side: Structured
    lowest: float
    """Least shift at which ``side`` is evaluated: below, its answers are rounding."""
    counted: SpectrumQuadrature | None
    """Its eigenvalues, as they were counted; None where nothing is known below ``lowest``."""

    def reached(self, shifts: Tensor) -> Tensor:
        """Return which shifts can be answered.

        Args:
            shifts: Positive numbers, any shape, float64 on the host.

        Returns:
            Bool, the shape of ``shifts``: all true where the counted eigenvalues are known.
        """
        return (shifts >= self.lowest) | (self.counted is not None)

    def logdets(self, shifts: Tensor) -> Tensor:
        """Return ``log det(G + s·I)`` at each shift; the change below ``lowest`` is that of the counted eigenvalues.

        Args:
            shifts: Positive shifts s that are ``reached``, shape (k,), float64 on the host.

        Returns:
            Shape (k,), float64 on the host.
        """
        found = self.side.logdets(shifts.clamp(min=self.lowest)).to("cpu", torch.float64)
        low = shifts < self.lowest
        if self.counted is not None and bool(low.any()):
            # beside eigenvalues that are far above, both shifts are nothing, and so is the difference
            own, last = shifts[low, None], self.lowest
            change = ((self.counted.values + own) / (self.counted.values + last)).log() @ self.counted.weights
            found[low] += change + self.counted.zeros * (own[:, 0] / last).log()
        return found

    def effective_dimensions(self, shifts: Tensor) -> Tensor:
        """Return ``tr G(G + s·I)⁻¹`` at each shift; the change below ``lowest`` is that of the counted eigenvalues.

        Args:
            shifts: Positive shifts s that are ``reached``, shape (k,), float64 on the host.

        Returns:
            Shape (k,), float64 on the host, each between 0 and m.
        """
        # all at once: a side may answer many shifts from few of its own
        found = self.side.effective_dimensions(shifts.clamp(min=self.lowest)).to("cpu", torch.float64)
        low = shifts < self.lowest
        if self.counted is not None and bool(low.any()):
            values, own, last = self.counted.values, shifts[low, None], self.lowest
            found[low] += (values / (values + own) - values / (values + last)) @ self.counted.weights
        return found


def logdet_damped_structured(a: SpectrumQuadrature, g: Answering, damping: float) -> float | None:
    """Return log det(F + λI), λ > 0, for a G that is never made dense.

    None where G cannot answer one of the shifts λ/x of A's nodes x.
    """
    nodes = a.values
    shifts = damping / nodes
    if not bool(g.reached(shifts).all()):
        return None
    # log det(xG + λI) = rows · log x + log det(G + (λ/x) I)
    inner = g.side.size * nodes.log() + g.logdets(shifts)
    return float(a.weights @ inner) + a.zeros * g.side.size * math.log(damping)


def effective_dimensions_structured(
    a: SpectrumQuadrature, g: Answering, dampings: Sequence[float]
) -> list[float | None]:
    """Return Σᵢⱼ λᵢμⱼ/(λᵢμⱼ + λ) at each λ > 0 for a G that is never made dense.

    None where G cannot answer one of the shifts λ/x of A's nodes x.
    """
    shifts = torch.tensor(dampings, dtype=torch.float64)[:, None] / a.values
    reached = g.reached(shifts).all(1)
    inner = g.effective_dimensions(shifts[reached].flatten())
    sums = iter((inner.view(-1, a.nodes.numel()) @ a.weights).tolist())
    return [next(sums) if each else None for each in reached.tolist()]


def _rows(a: SpectrumQuadrature, g: SpectrumQuadrature) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(1, _PRODUCTS_AT_ONCE // max(1, g.nodes.numel()))
    return zip(torch.split(a.nodes, rows), torch.split(a.weights, rows), strict=True)


def _scaled(exponent: int, damping: float) -> float | None:
    """λ over 2^exponent, as the products are."""
    try:
        scaled = math.ldexp(damping, -exponent)
    except OverflowError:
        # beside such a λ all eigenvalues are nothing
        return math.inf
    return scaled if scaled >= sys.float_info.min else None
