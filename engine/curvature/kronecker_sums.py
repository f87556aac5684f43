"""Sums over every eigenvalue of F = G ⊗ A under damping: log det(F + λI) and Σ λᵢμⱼ/(λᵢμⱼ + λ).

The products of two condensed spectra (``condensed``) stand in for all n·m of them: some 200 nodes a
side for a spectrum over twelve decades, whatever n and m are, and the same nodes for every λ.

Where G is known by its own log-determinants alone (a structured side that is never made dense),
the sum over A's nodes is Σ_k w_k Σⱼ p(x_k μⱼ), and the inner sum is asked of G at the shift λ/x_k.

References:
    MacKay (1992), Bayesian interpolation (effective number of parameters)
"""

import math
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.curvature.condensed import Condensed, times_power
from engine.curvature.structured import Structured

_PRODUCTS_AT_ONCE = 2**18


def logdet_damped(a: Condensed, g: Condensed, damping: float) -> float | None:
    """Log det(F + λI); None where λ is beyond float64 beside the largest eigenvalue.

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


def effective_dimensions(a: Condensed, g: Condensed, dampings: Sequence[float]) -> list[float | None]:
    """Σ λᵢμⱼ/(λᵢμⱼ + λ) at each λ; None where λ is beyond float64 beside the largest eigenvalue.

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


def logdet_damped_structured(a: Condensed, g: Structured, damping: float, lowest: float) -> float | None:
    """Log det(F + λI) where G answers for itself; None where it would be asked below the shift ``lowest``."""
    nodes = a.values
    shifts = damping / nodes
    if bool((shifts < lowest).any()):
        return None
    # log det(xG + λI) = rows · log x + log det(G + (λ/x) I)
    inner = g.size * nodes.log() + g.logdets(shifts).to("cpu", torch.float64)
    return float(a.weights @ inner) + a.zeros * g.size * math.log(damping)


def effective_dimensions_structured(
    a: Condensed, g: Structured, dampings: Sequence[float], lowest: float
) -> list[float | None]:
    """Σ λᵢμⱼ/(λᵢμⱼ + λ) at each λ where G answers for itself; None where it would be asked below ``lowest``."""
    shifts = torch.tensor(dampings, dtype=torch.float64)[:, None] / a.values
    reached = (shifts >= lowest).all(1)
    # all at once: a side may answer many shifts from few of its own
    inner = g.effective_dimensions(shifts[reached].flatten()).to("cpu", torch.float64)
    sums = iter((inner.view(-1, a.nodes.numel()) @ a.weights).tolist())
    return [next(sums) if each else None for each in reached.tolist()]


def _rows(a: Condensed, g: Condensed) -> Iterator[tuple[Tensor, Tensor]]:
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
