"""The spectra of K-FAC and EK-FAC: of each layer exactly, and of the model, whose eigenvalues are those of all layers.

K-FAC's eigenvalues are the products of those of A and of G, which are counted and ordered without being made; EK-FAC's
were collected. A layer's counts stand on the lattice of all layers, so that those of the model are their sums.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from catalog.analyses.spectrum import SpectrumParams
from catalog.analyses.spectrum_metrics import (
    BoundedEigenvalue,
    CurvatureSpectrum,
    DensityCurve,
    EigenvalueCounts,
    LayerSpectrum,
    LogDensity,
)
from engine.analyses.metrics.layer_metrics import resolved_counts, rounding_of
from engine.analyses.spectra.log_density import Lattice, LogCounts
from engine.factors.factor_set import Corrected
from engine.linalg.kronecker_quantiles import Pair, Products
from engine.linalg.kronecker_spectrum import ends_of_drawn
from engine.measurement.layer_measurement import Measured

_AT_ONCE = 2**20
_SAME_POINT = 1e-9


@dataclass(frozen=True, kw_only=True)
class BlockSpectrum:
    """One layer's part of the model's spectrum."""

    ordinal: int
    dimension: int
    of_layer: LayerSpectrum
    top: float
    """The largest eigenvalue."""
    rounding: float
    """Magnitude below which eigenvalues are rounding of the factors."""
    counts: LogCounts
    """Fine counts; none without a density."""


def kfac_block(layer: Measured, params: SpectrumParams) -> BlockSpectrum:
    """Measure the spectrum of one layer's G ⊗ A, with no more than some 64 Ki products at once, as ``Products``."""
    if layer.A.spectrum is None:
        raise ValueError("a layer without eigenvalues of A has no spectrum")
    counted = layer.G.counted
    if layer.G.spectrum is not None:
        pair = (layer.A.spectrum, layer.G.spectrum)
        (low_a, high_a), (low_g, high_g) = (
            ends_of_drawn(own, side.entry_rounding) for own, side in zip(pair, (layer.A, layer.G), strict=True)
        )
        bounds = None if low_a is high_a and low_g is high_g else ((low_a, low_g), (high_a, high_g))
    elif counted is not None:
        pair = (layer.A.spectrum, counted.values)
        bounds = (layer.A.spectrum, counted.lower), (layer.A.spectrum, counted.upper)
    else:
        raise ValueError("a layer without eigenvalues of G has no spectrum")
    products = Products([pair])
    density = _counted(products.largest, params, products.at_most, products.size, rounding_of(layer))
    largest, smallest = _ends(products, bounds, params)
    of_layer = LayerSpectrum(
        trace=layer.A.trace * layer.G.trace,
        largest=largest,
        smallest=smallest,
        zeros=products.at_most(rounding_of(layer) * products.largest),
        density=density,
    )
    counts = LogCounts.of_products(pair) if density is not None else LogCounts.none()
    return BlockSpectrum(
        ordinal=layer.facts.ordinal,
        dimension=products.size,
        of_layer=of_layer,
        top=products.largest,
        rounding=rounding_of(layer) * products.largest,
        counts=counts,
    )


def ekfac_block(layer: Measured, corrected: Corrected, params: SpectrumParams) -> BlockSpectrum:
    """Measure the spectrum of one layer with EK-FAC's eigenvalues, held in float64, and a mebi of them once more."""
    values = corrected.eigenvalues.reshape(-1).to(torch.float64)
    largest = float(values.max()) if values.numel() else 0.0
    ends = min(params.count, values.numel())

    def at_most(threshold: float) -> int:
        return sum(int((part <= threshold).sum()) for part in torch.split(values, _AT_ONCE))

    density = _counted(largest, params, at_most, values.numel(), rounding_of(layer))
    of_layer = LayerSpectrum(
        trace=float(values.sum()),
        largest=_exact(values.topk(ends).values.tolist()) if params.end != "smallest" else (),
        smallest=_exact(values.topk(ends, largest=False).values.tolist()) if params.end != "largest" else (),
        zeros=at_most(rounding_of(layer) * largest),
        density=density,
    )
    counts = LogCounts.of_values(values) if density is not None else LogCounts.none()
    return BlockSpectrum(
        ordinal=layer.facts.ordinal,
        dimension=values.numel(),
        of_layer=of_layer,
        top=largest,
        rounding=rounding_of(layer) * largest,
        counts=counts,
    )


@dataclass(kw_only=True)
class BlockSpectra:
    """The spectrum of one approximation over all layers, which arrive one by one."""

    of: Literal["kfac", "ekfac"]
    params: SpectrumParams
    blocks: dict[int, BlockSpectrum] = field(default_factory=dict)
    """By ordinal."""
    missing: dict[str, str] = field(default_factory=dict)
    """Layers without eigenvalues, by name, with the reason."""
    traces: dict[int, float] = field(default_factory=dict)
    """Trace of every layer, by ordinal."""

    def take(self, ordinal: int, block: BlockSpectrum) -> LayerSpectrum:
        """Add one layer."""
        self.blocks[ordinal] = block
        self.traces[ordinal] = block.of_layer.trace
        return block.of_layer

    def lack(self, ordinal: int, name: str, trace: float, why: str) -> None:
        """Note a layer without eigenvalues."""
        self.missing[name] = why
        self.traces[ordinal] = trace

    def of_model(self, dimension: int) -> CurvatureSpectrum:
        """Return the spectrum of all layers together, in the model's order."""
        ordered = [self.blocks[ordinal] for ordinal in sorted(self.blocks)]
        params = self.params
        known = not self.missing
        why = "; ".join(f"`{name}`: {reason}" for name, reason in self.missing.items())
        asked = {"largest": params.end != "smallest", "smallest": params.end != "largest", "density": params.density}
        return CurvatureSpectrum(
            of=self.of,
            dimension=dimension,
            largest=self._merged("largest", ordered) if known and asked["largest"] else None,
            smallest=self._merged("smallest", ordered) if known and asked["smallest"] else None,
            trace=math.fsum(self.traces.values()),
            trace_low=None,
            trace_high=None,
            negative_share=None,
            negative_low=None,
            negative_high=None,
            density=self._density(ordered, dimension) if known and asked["density"] else None,
            missing={name: why for name, wanted in asked.items() if wanted and not known},
            products=0,
            passes=0,
        )

    def _merged(
        self, end: Literal["largest", "smallest"], ordered: Sequence[BlockSpectrum]
    ) -> tuple[BoundedEigenvalue, ...]:
        several = [getattr(block.of_layer, end) for block in ordered]
        sign = -1 if end == "largest" else 1
        merged = heapq.merge(*several, key=lambda each: sign * each.value)
        return tuple(each for each, _ in zip(merged, range(self.params.count), strict=False))

    def _density(self, ordered: Sequence[BlockSpectrum], dimension: int) -> LogDensity | None:
        counted = [block.of_layer.density for block in ordered if block.of_layer.density is not None]
        if not counted:
            return None
        top = max(block.top for block in ordered)
        lattice = Lattice.below(top, self.params.points_per_decade, self.params.decades)
        counts = LogCounts.none()
        for block in ordered:
            counts = counts.plus(block.counts)
        points = lattice.points.tolist()
        beyond = [sum(_beyond(each, point) for each in counted) / dimension for point in points]
        least = max(block.rounding for block in ordered)
        smoothed = counts.smoothed(lattice, dimension).tolist()
        known = [magnitude >= least for magnitude in lattice.magnitudes]
        curve = DensityCurve(
            density=tuple(value if own else None for value, own in zip(smoothed, known, strict=True)),
            density_low=None,
            density_high=None,
            beyond=tuple(beyond),
            beyond_low=None,
            beyond_high=None,
            resolved_log10=None if all(known) else points[known.index(True)],
        )
        return LogDensity(log10=tuple(points), width=lattice.width, positive=curve, negative=None)


def _counted(
    largest: float, params: SpectrumParams, at_most: Callable[[float], int], size: int, rounding: float
) -> EigenvalueCounts | None:
    """Counts between the points of the lattice, over the decades below the largest eigenvalue."""
    if not params.density or largest <= 0:
        return None
    each = params.points_per_decade
    lattice = Lattice.below(largest, each, params.decades)
    counted = [at_most(magnitude) for magnitude in lattice.magnitudes]
    # the points above the largest eigenvalue are for the smoothing's tail
    needed = next(place for place, count in enumerate(counted) if count == size) + 1
    between = [right - left for left, right in itertools.pairwise(counted[:needed])]
    counts, under = resolved_counts(lattice.magnitudes, between, rounding * largest)
    return EigenvalueCounts(
        log10_edges=tuple(lattice.points[:needed].tolist()), counts=counts, below=counted[0] + under
    )


def _beyond(counted: EigenvalueCounts, point: float) -> int:
    """Eigenvalues above a point of the lattice, which is none below the counts' first edge."""
    return sum(
        count or 0
        for edge, count in zip(counted.log10_edges, counted.counts, strict=False)
        if edge >= point - _SAME_POINT
    )


def _ends(
    products: Products, bounds: tuple[Pair, Pair] | None, params: SpectrumParams
) -> tuple[tuple[BoundedEigenvalue, ...], tuple[BoundedEigenvalue, ...]]:
    ranks = range(1, min(params.count, products.size) + 1)
    largest = products.top(params.count).tolist() if params.end != "smallest" else []
    smallest = [products.smallest(rank) for rank in ranks] if params.end != "largest" else []
    if bounds is None:
        return _exact(largest), _exact(smallest)
    below, above = (Products([each]) for each in bounds)
    tops = zip(largest, below.top(params.count).tolist(), above.top(params.count).tolist(), strict=False)
    bottoms = (
        (value, below.smallest(rank), above.smallest(rank)) for rank, value in zip(ranks, smallest, strict=False)
    )
    return tuple(_between(*each) for each in tops), tuple(_between(*each) for each in bottoms)


def _exact(values: Sequence[float]) -> tuple[BoundedEigenvalue, ...]:
    return tuple(BoundedEigenvalue(value=value, bound=None, converged=True) for value in values)


def _between(value: float, low: float, high: float) -> BoundedEigenvalue:
    bound = max(value - low, high - value, 0.0)
    return BoundedEigenvalue(value=value, bound=bound or None, converged=not bound)
