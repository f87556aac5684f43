"""A spectrum as results hold it: eigenvalues with bounds, a trace, and a density with its band.

Of each probe the quadrature knows nodes θ and weights w, ``Σ_j w_j f(θ_j) ≈ tr f(F) / n``. With f a Gaussian in
log10 |θ| over the eigenvalues of one sign, that is the density at a point. A quadrature of few nodes shows a smooth
density as single peaks where the nodes lie further apart than two widths of the Gaussian (at two the ripple is
``2 exp(−2π²/4)``, 1.4 %). At the large magnitudes nodes are apart because eigenvalues are; at the small ones because
the steps do not suffice. So from the smallest magnitude upwards nothing is said up to the first two nodes that are
near enough, in the probe where they are largest.

References:
    Ubaru, Chen & Saad (2017), Fast estimation of tr(f(A)) via stochastic Lanczos quadrature
    Ghorbani, Krishnan & Xiao (2019), An investigation into neural net optimization via Hessian eigenvalue density
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from catalog.analyses.spectrum_metrics import BoundedEigenvalue, CurvatureSpectrum, DensityCurve, LogDensity
from engine.analyses.spectra.log_density import Lattice, gaussian
from engine.analyses.spectra.spectrum_search import SpectrumSearch
from engine.operators.extreme_eigenvalues import Eigenvalue
from engine.operators.quadrature import Quadrature

_ROUNDING = 16
"""Units of the last place of the largest magnitude below which an eigenvalue is not distinguished from zero."""
_APART = 2.0
"""Widths between two nodes beyond which a smooth density is not resolved."""


def found_spectrum(of: str, search: SpectrumSearch) -> CurvatureSpectrum:
    """Return the results of a search."""
    params, ends = search.params, search.ends.result()
    trace = None if search.trace is None else search.trace.result()
    quadrature = None if search.quadrature is None else search.quadrature.result()
    signed = of == "hessian"
    negative: Sequence[float | None] = (None, None, None)
    density = None
    if quadrature is not None:
        density = _density(quadrature, search, signed=signed)
        if signed:
            zero = torch.zeros(1, dtype=torch.float64)
            negative = [float(each[0]) for each in quadrature.cumulative(zero)]
    return CurvatureSpectrum(
        of=of,
        dimension=search.size,
        largest=None if params.end == "smallest" else _bounded(ends.largest),
        smallest=None if params.end == "largest" else _bounded(ends.smallest),
        trace=None if trace is None else trace.value,
        trace_low=None if trace is None else trace.low,
        trace_high=None if trace is None else trace.high,
        negative_share=negative[0],
        negative_low=negative[1],
        negative_high=negative[2],
        density=density,
        missing={"density": "the matrix is zero"} if quadrature is not None and density is None else {},
        products=search.products,
        passes=search.passes,
    )


def read_spectrum(stored: Mapping[str, Any]) -> CurvatureSpectrum:
    """Build the results of a search from JSON."""
    known = dict(stored)
    for end in ("largest", "smallest"):
        if known[end] is not None:
            known[end] = tuple(BoundedEigenvalue(**each) for each in known[end])
    if known["density"] is not None:
        density = dict(known["density"])
        for sign in ("positive", "negative"):
            density[sign] = None if density[sign] is None else DensityCurve(**_tuples(density[sign]))
        known["density"] = LogDensity(**_tuples(density))
    return CurvatureSpectrum(**known)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()}


def _bounded(found: Sequence[Eigenvalue]) -> tuple[BoundedEigenvalue, ...]:
    return tuple(BoundedEigenvalue(value=each.value, bound=each.bound, converged=each.converged) for each in found)


def _density(quadrature: Quadrature, search: SpectrumSearch, *, signed: bool) -> LogDensity | None:
    largest = float(quadrature.nodes.abs().max())
    if largest <= 0:
        return None
    params = search.params
    lattice = Lattice.below(largest, params.points_per_decade, params.decades)
    rounding = _ROUNDING * torch.finfo(search.dtype).eps * largest
    found = search.ends.result()
    sides = ((1.0, found.largest), (-1.0, found.smallest))[: 2 if signed else 1]
    curves = [_curve(quadrature, sign, ends, lattice, rounding) for sign, ends in sides]
    return LogDensity(
        log10=tuple(lattice.points.tolist()),
        width=lattice.width,
        positive=curves[0],
        negative=curves[1] if signed else None,
    )


def _curve(
    quadrature: Quadrature, sign: float, ends: Sequence[Eigenvalue], lattice: Lattice, rounding: float
) -> DensityCurve:
    """Density and counts of the eigenvalues of one sign; ``ends`` are the outermost, as far as they were searched."""
    magnitudes = sign * quadrature.nodes
    shown = magnitudes > rounding
    logarithms = magnitudes.clamp_min(rounding).log10()
    resolved = _resolved(logarithms, shown, lattice)
    found = [_density_at(quadrature, sign, point, lattice.width, rounding) for point in lattice.points.tolist()]
    known = [point >= resolved for point in lattice.points.tolist()]
    points = sign * torch.tensor(lattice.magnitudes, dtype=torch.float64)
    ordered = points if sign > 0 else points.flip(0)
    below = quadrature.cumulative(ordered)
    value, low, high = (part if sign > 0 else part.flip(0) for part in below)
    if sign > 0:
        value, low, high = 1 - value, 1 - high, 1 - low
    value, low, high = _narrowed((value, low, high), sign, ends, lattice, quadrature.size)
    return DensityCurve(
        density=_where(known, [each[0] for each in found]),
        density_low=_where(known, [max(each[1], 0.0) for each in found]),
        density_high=_where(known, [each[2] for each in found]),
        beyond=tuple(value.tolist()),
        beyond_low=tuple(low.tolist()),
        beyond_high=tuple(high.tolist()),
        resolved_log10=_first(lattice, resolved),
    )


def _narrowed(
    shares: tuple[Tensor, Tensor, Tensor], sign: float, ends: Sequence[Eigenvalue], lattice: Lattice, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Shares beyond each point with their band, which the eigenvalues at this end narrow where their places are known.

    The i-th of them lies within its bound of its value, so that counts follow; beyond the last there are no others.
    """
    value, low, high = shares
    if not ends or not all(each.converged for each in ends):
        return shares
    points = torch.tensor(lattice.magnitudes, dtype=torch.float64)
    values = torch.tensor([sign * each.value for each in ends], dtype=torch.float64)
    bounds = torch.tensor([each.bound for each in ends], dtype=torch.float64)
    least, most = (
        (found[:, None] > points).to(torch.float64).sum(0) / size for found in (values - bounds, values + bounds)
    )
    outside = points >= values[-1] + bounds[-1]
    low, high = torch.maximum(low, least), torch.where(outside, torch.minimum(high, most), high)
    high = torch.maximum(high, low)
    return torch.minimum(torch.maximum(value, low), high), low, high


def _resolved(logarithms: Tensor, shown: Tensor, lattice: Lattice) -> float:
    """The logarithm from which on the nodes of every probe are near enough to each other."""
    found = []
    for own, seen in zip(logarithms, shown, strict=True):
        ascending = own[seen].sort().values
        near = (ascending.diff() <= _APART * lattice.width).nonzero()
        found.append(float(ascending[int(near[0])]) if near.numel() else math.inf)
    return max(found)


def _first(lattice: Lattice, resolved: float) -> float | None:
    """The first point at which there is a density; null where that is the first of all."""
    points: list[float] = lattice.points.tolist()
    known = [point for point in points if point >= resolved]
    if not known:
        return points[-1]
    return None if known[0] == points[0] else known[0]


def _density_at(
    quadrature: Quadrature, sign: float, point: float, width: float, rounding: float
) -> tuple[float, float, float]:
    """The density of log10 |λ| over the eigenvalues of one sign at a point, and the ends of its band."""

    def kernel(values: Tensor) -> Tensor:
        magnitudes = sign * values
        smooth = gaussian(point - magnitudes.clamp_min(rounding).log10(), width)
        return torch.where(magnitudes > rounding, smooth, 0.0)

    value, low, high = quadrature.trace_of(kernel)
    return value / quadrature.size, low / quadrature.size, high / quadrature.size


def _where(known: Sequence[bool], values: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(value if shown else None for value, shown in zip(values, known, strict=True))
