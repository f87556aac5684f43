"""Layer metrics: the capacity of one layer, those that were asked for.

Of eigenvalues that are known between bounds, order statistics and counts grow with every eigenvalue, so that the lower
bounds give a lower bound, and the upper ones an upper one. A threshold is a share of the largest eigenvalue, and a
condition number a quotient: there the bounds of both are taken crosswise.

The exponent α of λ_k ∝ k^−α is fitted by least squares of log λ_k against log k at ranks spread evenly in the
logarithm, from the tenth largest eigenvalue to a quarter of the numerical rank. The first few are single directions
that follow no law, and the last ones bend down in every finite sample. A range of less than half a decade gives no
exponent; R² says how straight the line is.

References:
    Stringer et al. (2019), High-dimensional geometry of population responses in visual cortex: the same regression
    over ranks 11 to 500
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from catalog.analyses.capacity import DAMPING_GRID, CapacityParams
from catalog.analyses.capacity_metrics import (
    METRICS,
    CapacityMetrics,
    EffectiveDimensionCurve,
    Quantile,
    SpectralDecay,
    SpectralDensity,
)
from engine.analyses.metrics.kronecker_metrics import SCALARS, Sides, scalars, settled, within_tolerance
from engine.errors import NonFiniteFactor
from engine.factors.dense import Dense
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import Factors
from engine.linalg.damping import Clipping
from engine.linalg.eigensolvers import LARGEST
from engine.linalg.kronecker_quantiles import Pair, Products, histogram, quantile
from engine.linalg.linear_operator import Structured
from engine.measurement.layer_measurement import Measured
from engine.measurement.subsample_spectra import nested_capacity

_FIRST = 10
_LAST_SHARE = 4
_RANKS = 12
_FROM_ABOVE = 1000
"""Ranks up to here come from the largest products directly, which is quicker than counting."""


def decay(products: Products, rank: int) -> SpectralDecay | None:
    """Fit the exponent α of λ_k ∝ k^−α to the first quarter of a spectrum's numerical rank.

    None where the range is shorter than half a decade, or an eigenvalue in it is zero.
    """
    last = rank // _LAST_SHARE
    if last < _FIRST * math.sqrt(10):
        return None
    ratio = last / _FIRST
    ranks = sorted({round(_FIRST * ratio ** (place / (_RANKS - 1))) for place in range(_RANKS)})
    above = products.top(min(last, _FROM_ABOVE)).tolist()
    values = [above[each - 1] if each <= len(above) else products.smallest(products.size + 1 - each) for each in ranks]
    if values[-1] <= 0:
        return None
    places, heights = [math.log(each) for each in ranks], [math.log(value) for value in values]
    slope, _ = statistics.linear_regression(places, heights)
    # values that differ in their last bit alone have one logarithm
    varied = heights[0] != heights[-1]
    return SpectralDecay(
        exponent=-slope if varied else 0.0,
        first_rank=ranks[0],
        last_rank=ranks[-1],
        r_squared=statistics.correlation(places, heights) ** 2 if varied else None,
    )


Intervals = dict[str, tuple[float | None, float | None]]


def intervals(
    bounds: Sequence[tuple[Pair, Pair]], added: Sequence[float], tolerance: float, params: CapacityParams
) -> Intervals:
    """Return the bounds of the metrics that were asked for, of one layer or of all layers of a model.

    Memory:
        Some 64 Ki products, and four numbers for each row of every layer's smaller side.
    """
    wanted = params.selected
    below, above = (Products([pair[end] for pair in bounds]) for end in (0, 1))
    found: Intervals = {}
    if not below.size:
        return found
    if "rank" in wanted:
        found["rank"] = (
            float(below.size - below.at_most(tolerance * above.largest)),
            float(above.size - above.at_most(tolerance * below.largest)),
        )
    for name, shifts in (("kappa", [0.0] * len(bounds)), ("kappa_damped", list(added))):
        if name in wanted:
            found[name] = _condition(bounds, shifts)
    if "quantiles" in wanted:
        for level in params.quantile_levels:
            found[f"quantiles[{level:g}]"] = (quantile(below, level), quantile(above, level))
    if "top_eigenvalues" in wanted:
        ends = zip(below.top(params.top_k).tolist(), above.top(params.top_k).tolist(), strict=True)
        found |= {f"top_eigenvalues[{place}]": pair for place, pair in enumerate(ends)}
    return found


_DAMPED = (
    "logdet_damped", "logdet_factored", "effective_dimension", "effective_dimension_factored",
    "effective_dimension_share", "kappa_damped", "kappa_factored",
)  # fmt: skip
_UNDAMPED = "the curvature is zero, and a damping relative to it is zero too"
_DRAWN = (
    "at this damping it is decided by eigenvalues that rounding does not tell from zero; take a larger "
    "`stabilisation.damping`, or sum in `collection.dtype: float64`, with no narrower `storage_dtype`"
)


def reasons(values: Mapping[str, object], singular: Sequence[str], undamped: bool) -> dict[str, str]:
    """Return why metrics among ``values`` are null, where they are."""
    found = {}
    told = " and ".join(singular)
    for name in ("logdet", "kappa"):
        if name in values and values[name] is None and singular:
            found[name] = f"{told} {'are' if len(singular) > 1 else 'is'} singular, or not told from it"
    for name in _DAMPED:
        if name in values and values[name] is None:
            found[name] = _UNDAMPED if undamped else _DRAWN
    return found


def _condition(bounds: Sequence[tuple[Pair, Pair]], added: Sequence[float]) -> tuple[float | None, float | None]:
    ends = []
    for place in (0, 1):
        sides = [pair[place] for pair in bounds]
        ends.append(
            (
                min(float(a[0]) * float(g[0]) + own for (a, g), own in zip(sides, added, strict=True)),
                max(float(a[-1]) * float(g[-1]) + own for (a, g), own in zip(sides, added, strict=True)),
            )
        )
    (low_smallest, low_largest), (high_smallest, high_largest) = ends
    return (
        low_largest / high_smallest if high_smallest > 0 else None,
        high_largest / low_smallest if low_smallest > 0 else None,
    )


DECADES = 16
"""Decades of the density: those that float64 resolves below the largest eigenvalue."""
SCALAR_METRICS = (*SCALARS, "effective_dimension_share", "kappa_clipped", "decay")
"""Metrics that are one number, of a decay its exponent."""


def sides_of(layer: Measured, whole: FactorSet, params: CapacityParams, device: torch.device) -> Sides:
    """Gather what the metrics of one layer are computed from."""
    facts, tolerance = layer.facts, params.rank_tolerance
    if not math.isfinite(layer.A.trace * layer.G.trace):
        raise NonFiniteFactor(
            f"layer `{facts.name}`: the eigenvalues of G ⊗ A exceed float64; scale the model's inputs or loss",
            layer=facts.name,
        )
    rounding = rounding_of(layer)
    structured = None
    if params.decomposition != "none" and layer.A.spectrum is not None and layer.G.spectrum is None:
        # read again for this layer alone: no layer's factors are held
        structured = structured_side(whole.load(facts.ordinal), device)
    return Sides(
        in_dim=facts.in_dim,
        out_dim=facts.out_dim,
        spectrum_A=layer.A.spectrum,
        spectrum_G=layer.G.spectrum,
        trace_A=layer.A.trace,
        trace_G=layer.G.trace,
        frobenius_A=layer.A.frobenius,
        frobenius_G=layer.G.frobenius,
        damping=layer.damping,
        tolerance=rounding if tolerance is None else tolerance,
        rounding=rounding,
        entry_rounding=(layer.A.entry_rounding, layer.G.entry_rounding),
        structured_G=structured,
        counted_G=layer.G.counted,
    )


def rounding_of(layer: Measured) -> float:
    """Return the share of a layer's largest eigenvalue below which the others are rounding."""
    precision = torch.float64 if layer.record.accumulation_dtype == "float64" else torch.float32
    return max(layer.facts.in_dim, layer.facts.out_dim) * torch.finfo(precision).eps


def structured_side(factors: Factors, device: torch.device) -> Structured | None:
    """Return the operator that answers for a G without eigenvalues."""
    side = factors.side_G
    return None if isinstance(side, Dense) or not side.complete else side.to(device)


def scalar_metrics(sides: Sides, wanted: Iterable[str], kappa_max: float | None) -> dict[str, float | None]:
    """Compute the metrics that are one number each, but for the decay, which follows from the eigenvalues' order."""
    names = set(wanted)
    found = scalars(sides, wanted)
    if "effective_dimension_share" in names:
        effective = SCALARS["effective_dimension"](sides)
        found["effective_dimension_share"] = None if effective is None else effective / sides.dimension
    if "kappa_clipped" in names:
        right = sides.spectrum_G if sides.counted_G is None else sides.counted_G
        clipped = [
            Clipping.at(side, kappa_max, zero).kappa_clipped
            for side, zero in zip((sides.spectrum_A, right), sides.entry_rounding, strict=True)
        ]
        found["kappa_clipped"] = _product(*clipped)
    return found


def layer_metrics(layer: Measured, sides: Sides, params: CapacityParams) -> CapacityMetrics:
    """Compute every metric of one layer's F = G ⊗ A that was asked for, over all the data."""
    wanted = params.selected
    found: dict[str, Any] = dict.fromkeys(METRICS) | scalar_metrics(sides, wanted, layer.record.kappa_max)
    if "effective_dimension_curve" in wanted:
        found["effective_dimension_curve"] = curve(sides, params)
    if wanted & {"quantiles", "density", "decay", "top_eigenvalues"}:
        products = sides.products()
        if products is not None:
            rank = SCALARS["rank"](sides) if "decay" in wanted else None
            least, ends = sides.rounding * products.largest, [each.products() for each in sides.variants[1:]]
            found |= ordered(products, params, None if rank is None else int(rank), least, ends)
    return CapacityMetrics(
        form=layer.facts.form,
        dimension=sides.dimension,
        # its norm alone, which takes no eigenvalues, is already that of the sketch
        approximate=bool(layer.record.sketch_bound),
        no_spectrum=no_spectrum(layer) if params.decomposition != "none" else None,
        estimated=_estimated(layer),
        intervals=_intervals(sides, params),
        undefined=_undefined(sides, found),
        damping=sides.damping.joint,
        nested=nested_capacity(layer.nested) if layer.nested else None,
        convergence=None,
        cross_check=None,
        **found,
    )


def no_spectrum(layer: Measured) -> str | None:
    """Return why a layer that was decomposed has no eigenvalues of A or G."""
    facts = layer.facts
    if layer.A.spectrum is None:
        return f"A ({facts.in_dim} rows) has more than the {LARGEST} rows that eigensolvers take"
    if layer.G.spectrum is not None or layer.G.counted is not None:
        return None
    if facts.representation_G == "diagonal_sketch":
        return f"G ({facts.out_dim} rows) does not fit: only its diagonal and trace are kept"
    return f"G ({facts.out_dim} rows) has more than the {LARGEST} rows that eigensolvers take"


def _estimated(layer: Measured) -> str | None:
    counted = layer.G.counted
    if counted is None:
        return None
    bound = layer.record.sketch_bound
    sketched = f", and so is the sketch's bound {bound:.3g}" if bound else ""
    return (
        f"G ({layer.facts.out_dim} rows) is held as `{layer.facts.representation_G}`: its eigenvalues are estimated "
        f"between bounds that {counted.counts} inertia counts prove, which are in `intervals`{sketched}"
    )


def _intervals(sides: Sides, params: CapacityParams) -> dict[str, tuple[float | None, float | None]] | None:
    if sides.counted_G is None or sides.bounds is None:
        return None
    return intervals([sides.bounds], [sides.damping.joint or 0.0], sides.tolerance, params)


def _undefined(sides: Sides, found: Mapping[str, Any]) -> dict[str, str]:
    if sides.bounds is None:
        return {}
    singular = [
        name for name, *within in zip("AG", within_tolerance(sides), sides.singular, strict=True) if any(within)
    ]
    asked = {name: value for name, value in found.items() if name in METRICS}
    return reasons(asked, singular, undamped=sides.damping.joint is None)


def ordered(
    products: Products,
    params: CapacityParams,
    rank: int | None,
    rounding: float = 0.0,
    ends: Sequence[Products | None] = (),
) -> dict[str, Any]:
    """Compute the metrics that follow from the order of the eigenvalues; ``ends`` are those of ``Sides.variants``."""
    found: dict[str, Any] = {}
    wanted = params.selected
    if "density" in wanted:
        edges, counts, below = histogram(products, DECADES, params.density_bins)
        if edges:
            known, under = resolved_counts(edges, counts, rounding)
            found["density"] = SpectralDensity(edges=tuple(edges), counts=known, below=below + under)
    if "quantiles" in wanted:
        every = [products, *(each for each in ends if each is not None)]
        values = {level: settled([quantile(each, level) for each in every]) for level in params.quantile_levels}
        found["quantiles"] = tuple(
            Quantile(level=level, value=value) for level, value in values.items() if value is not None
        )
    if "decay" in wanted and rank is not None:
        fitted = decay(products, rank)
        if fitted is not None:
            found["decay"] = fitted
    if "top_eigenvalues" in wanted:
        found["top_eigenvalues"] = tuple(products.top(params.top_k).tolist())
    return found


def resolved_counts(
    edges: Sequence[float], counts: Sequence[int], rounding: float
) -> tuple[tuple[int | None, ...], int]:
    """Leave out the counts of what is rounding."""
    known = tuple(count if edge >= rounding else None for edge, count in zip(edges, counts, strict=False))
    return known, sum(counts) - sum(count or 0 for count in known)


def curve(sides: Sides, params: CapacityParams) -> EffectiveDimensionCurve | None:
    """Compute the effective dimension over a grid of absolute dampings."""
    grid = params.damping_grid or DAMPING_GRID
    bounds = sides.bounds
    least = 0.0 if bounds is None else sides.rounding * float(bounds[1][0][-1]) * float(bounds[1][1][-1])
    values = [
        None if damping < least else value
        for damping, value in zip(grid, sides.effective_dimensions(grid), strict=True)
    ]
    if all(value is None for value in values):
        return None
    return EffectiveDimensionCurve(damping=grid, effective_dimension=tuple(values))


def _product(left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return None
    product = left * right
    return product if product < float("inf") else None
