"""Sums over every eigenvalue of F = G ⊗ A under damping: log det(F + λI) and Σ λᵢμⱼ/(λᵢμⱼ + λ).

The products of two condensed spectra (``condense_spectrum``) stand in for all n·m of them: some 200 nodes a
side for a spectrum over twelve decades, whatever n and m are, and the same nodes for every λ.

Where G is known by its own log-determinants alone (a structured side that is never made dense),
the sum over A's nodes is Σ_k w_k Σⱼ p(x_k μⱼ), and the inner sum is asked of G at the shift λ/x_k.

References:
    MacKay (1992), Bayesian interpolation (effective number of parameters)
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


def logdet_damped(a: SpectrumQuadrature, g: SpectrumQuadrature, damping: float) -> float | None:
    """Return log det(F + λI) = Σᵢⱼ log(λᵢμⱼ + λ), over the nodes of two condensed spectra.

    Args:
        a: Spectrum of A, of n eigenvalues.
        g: Spectrum of G, of m eigenvalues.
        damping: λ > 0.

    Returns:
        The natural logarithm; None where λ is beyond float64 beside the largest eigenvalue.

    Memory:
        At most 256 Ki products at once.
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
    """Return Σᵢⱼ λᵢμⱼ/(λᵢμⱼ + λ) at each λ, over the nodes of two condensed spectra.

    Args:
        a: Spectrum of A, of n eigenvalues.
        g: Spectrum of G, of m eigenvalues.
        dampings: Each λ > 0, in the unit of F's eigenvalues.

    Returns:
        A number between 0 and n·m for each λ; None where λ is beyond float64 beside the largest eigenvalue.

    Memory:
        At most 256 Ki products at once.
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
    """Return log det(F + λI) for a G that is never made dense.

    Args:
        g: G's own log-determinants at shifts.
        damping: λ > 0.

    Returns:
        The natural logarithm; None where G cannot answer one of the shifts λ/x of A's nodes x.
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
    """Return Σᵢⱼ λᵢμⱼ/(λᵢμⱼ + λ) at each λ for a G that is never made dense.

    Args:
        g: G's own effective dimensions at shifts.
        dampings: Each λ > 0, in the unit of F's eigenvalues.

    Returns:
        A number for each λ; None where G cannot answer one of the shifts λ/x of A's nodes x.
    """
    shifts = torch.tensor(dampings, dtype=torch.float64)[:, None] / a.values
    reached = g.reached(shifts).all(1)
    inner = g.effective_dimensions(shifts[reached].flatten())
    sums = iter((inner.view(-1, a.nodes.numel()) @ a.weights).tolist())
    return [next(sums) if each else None for each in reached.tolist()]


def _rows(a: SpectrumQuadrature, g: SpectrumQuadrature) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(1, _PRODUCTS_AT_ONCE // max(1, g.nodes.numel()))
    for start in range(0, a.nodes.numel(), rows):
        yield a.nodes[start : start + rows], a.weights[start : start + rows]


def _scaled(exponent: int, damping: float) -> float | None:
    """λ over 2^exponent, as the products are."""
    try:
        scaled = math.ldexp(damping, -exponent)
    except OverflowError:
        # beside such a λ all eigenvalues are nothing
        return math.inf
    return scaled if scaled >= sys.float_info.min else None
