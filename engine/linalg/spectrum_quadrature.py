"""A spectrum condensed to few nodes: Σᵢ p(λᵢ) as Σ_k w_k p(x_k), for any p smooth in the logarithm.

What damping does to an eigenvalue, x/(x + λ) or log(x + λ), is analytic in log x but for poles
π away from the real axis. On a panel of half-width h in log x, interpolation in K Chebyshev nodes
errs by (π/h + √(1 + (π/h)²))^−K, so K = ⌈36/asinh(π/h)⌉ reaches e⁻³⁶, which is float64's rounding.
Interpolating and then summing over the eigenvalues is the same as weighing the nodes by
w_k = Σᵢ ℓ_k(log λᵢ), which knows neither p nor λ: one condensation serves a whole curve over λ,
and two serve Σᵢⱼ p(λᵢμⱼ).

One panel over the whole range would err relative to p's largest value there, and drown many small
eigenvalues beside one large one. Panels of six octaves keep the error relative to each eigenvalue's
own term. They begin at powers of two, so that an eigenvalue's place in its panel is exact to
rounding. A panel with fewer eigenvalues than nodes keeps them as they are: small spectra are exact.

References:
    Trefethen (2013), Approximation theory and approximation practice, theorem 8.2
    Berrut & Trefethen (2004), Barycentric Lagrange interpolation
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_OCTAVES = 6
_HALF_WIDTH = _OCTAVES / 2 * math.log(2)
_AT_ONCE = 2**12
NODES = math.ceil(36 / math.asinh(math.pi / _HALF_WIDTH))


def times_power(values: Tensor, exponents: Tensor) -> Tensor:
    """Return ``values · 2^exponents``, rounded once even where that is denormal.

    Args:
        values: Any shape, float64.
        exponents: Integers, a shape that broadcasts with it, within ±2100.

    Returns:
        Float64, the common shape.
    """
    # torch.ldexp takes its power in float32 of an integer; exponents reach ±2100
    half = torch.div(exponents, 2, rounding_mode="floor")
    return values * torch.exp2(half.to(torch.float64)) * torch.exp2((exponents - half).to(torch.float64))


@dataclass(frozen=True, kw_only=True)
class SpectrumQuadrature:
    """Nodes and weights in place of the positive eigenvalues of one side."""

    nodes: Tensor
    """(K,) float64, over 2^exponent: between 0 and 1."""
    weights: Tensor
    """(K,) float64, some of them negative; they add up to the positive eigenvalues' number."""
    exponent: int
    """Power of two just above the largest eigenvalue."""
    zeros: int
    """Eigenvalues that are zero."""
    size: int
    """All eigenvalues."""

    @property
    def values(self) -> Tensor:
        """The nodes in the spectrum's own scale, shape (K,), float64."""
        return times_power(self.nodes, torch.tensor(self.exponent))


def condense_spectrum(spectrum: Tensor) -> SpectrumQuadrature:
    """Condense a spectrum to nodes and weights.

    Args:
        spectrum: Eigenvalues, shape (n,), float64, ascending, nonnegative.

    Returns:
        At most ``NODES`` nodes for each panel of six octaves; the eigenvalues themselves where a panel has fewer.

    Memory:
        A few times n numbers.
    """
    positive = spectrum[spectrum > 0]
    zeros = spectrum.numel() - positive.numel()
    if positive.numel() == 0:
        return SpectrumQuadrature(nodes=positive, weights=positive, exponent=0, zeros=zeros, size=spectrum.numel())
    mantissas, exponents = torch.frexp(positive)
    top = int(exponents[-1])
    # panel 0 ends at 2^top, which the largest eigenvalue lies below
    panels = torch.div(top - exponents, _OCTAVES, rounding_mode="floor")
    counts = torch.bincount(panels).tolist()
    nodes, weights = [], []
    stop = positive.numel()
    for panel, count in enumerate(counts):
        # ascending eigenvalues: the first panel is the last stretch
        start, last = stop - count, stop
        stop = start
        if count == 0:
            continue
        centre = top - _OCTAVES * panel - _OCTAVES // 2
        places = torch.log2(mantissas[start:last]) + (exponents[start:last] - centre)
        if count <= NODES:
            nodes.append(times_power(mantissas[start:last], exponents[start:last] - top))
            weights.append(torch.ones(count, dtype=torch.float64))
        else:
            nodes.append(times_power(_NODE_VALUES, torch.tensor(centre - top)))
            weights.append(_weights(places / (_OCTAVES / 2)))
    return SpectrumQuadrature(
        nodes=torch.cat(nodes), weights=torch.cat(weights), exponent=top, zeros=zeros, size=spectrum.numel()
    )


def _weights(places: Tensor) -> Tensor:
    """Σᵢ ℓ_k(xᵢ) of each node for places (n,) in [−1, 1], by the barycentric formula.

    Memory:
        About 4 Ki times the number of nodes.
    """
    total = torch.zeros(NODES, dtype=torch.float64)
    for some in torch.split(places[:, None], _AT_ONCE):
        distances = some - _NODES
        hit = distances == 0
        shares = _BARYCENTRIC / distances
        shares = torch.where(hit.any(1, keepdim=True), hit.to(torch.float64), shares)
        total += (shares / shares.sum(1, keepdim=True)).sum(0)
    return total


_ANGLES = (torch.arange(NODES, dtype=torch.float64) + 0.5) * (math.pi / NODES)
_NODES = torch.cos(_ANGLES)
_NODE_VALUES = torch.exp2(_NODES * (_OCTAVES / 2))
_BARYCENTRIC = torch.sin(_ANGLES) * (1 - 2 * (torch.arange(NODES) % 2))
