"""One layer's capacity metrics, those that were asked for."""

import math
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
from engine.analyses.metrics.kronecker_metrics import SCALARS, Sides, scalars, within_tolerance
from engine.analyses.metrics.quantile_bounds import intervals, reasons
from engine.errors import NonFiniteFactor
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import Factors
from engine.linalg.damping import Clipping
from engine.linalg.eigensolvers import LARGEST
from engine.linalg.kronecker_quantiles import Products, histogram, quantile
from engine.linalg.linear_operator import Structured
from engine.linalg.power_law import decay
from engine.measurement.layer_measurement import Measured
from engine.measurement.subsample_spectra import nested_capacity

DECADES = 16
"""Decades of the density: those that float64 resolves below the largest eigenvalue."""
SCALAR_METRICS = (*SCALARS, "effective_dimension_share", "kappa_clipped", "decay")
"""Metrics that are one number, of a decay its exponent."""


def sides_of(layer: Measured, whole: FactorSet, params: CapacityParams, device: torch.device) -> Sides:
    """Gather what the metrics of one layer are computed from."""
    facts, tolerance = layer.facts, params.rank_tolerance
    if not math.isfinite(layer.trace_A * layer.trace_G):
        raise NonFiniteFactor(
            f"layer `{facts.name}`: the eigenvalues of G ⊗ A exceed float64; scale the model's inputs or loss",
            layer=facts.name,
        )
    rounding = rounding_of(layer)
    structured, scale = None, 1.0
    if params.decomposition != "none" and layer.spectrum_A is not None and layer.spectrum_G is None:
        # read again for this layer alone: no layer's factors are held
        structured, scale = structured_side(whole.load(facts.ordinal), device)
    return Sides(
        in_dim=facts.in_dim,
        out_dim=facts.out_dim,
        spectrum_A=layer.spectrum_A,
        spectrum_G=layer.spectrum_G,
        trace_A=layer.trace_A,
        trace_G=layer.trace_G,
        frobenius_A=layer.frobenius_A,
        frobenius_G=layer.frobenius_G,
        damping=layer.damping,
        tolerance=rounding if tolerance is None else tolerance,
        rounding=rounding,
        structured_G=structured,
        scale_G=scale,
        counted_G=layer.counted_G,
    )


def rounding_of(layer: Measured) -> float:
    """Return the share of a layer's largest eigenvalue below which the others are rounding."""
    precision = torch.float64 if layer.record.dtype == "float64" else torch.float32
    return max(layer.facts.in_dim, layer.facts.out_dim) * torch.finfo(precision).eps


def structured_side(factors: Factors, device: torch.device) -> tuple[Structured | None, float]:
    """Return the operator that answers for a G without eigenvalues."""
    side = factors.G
    if isinstance(side, Structured) and side.complete:
        return side.to(device), factors.scale_G
    return None, 1.0


def scalar_metrics(sides: Sides, wanted: Iterable[str], kappa_max: float | None) -> dict[str, float | None]:
    """Compute the metrics that are one number each, but for the decay, which follows from the eigenvalues' order."""
    names = set(wanted)
    found = scalars(sides, wanted)
    if "effective_dimension_share" in names:
        effective = SCALARS["effective_dimension"](sides)
        found["effective_dimension_share"] = None if effective is None else effective / sides.dimension
    if "kappa_clipped" in names:
        right = sides.spectrum_G if sides.counted_G is None else sides.counted_G
        clipped = [Clipping.at(side, kappa_max).kappa_clipped for side in (sides.spectrum_A, right)]
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
            found |= ordered(products, params, None if rank is None else int(rank), sides.rounding * products.largest)
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
        nested=nested_capacity(layer.nested),
        convergence=None,
        cross_check=None,
        **found,
    )


def no_spectrum(layer: Measured) -> str | None:
    """Return why a layer that was decomposed has no eigenvalues of A or G."""
    facts = layer.facts
    if layer.spectrum_A is None:
        return f"A ({facts.in_dim} rows) has more than the {LARGEST} rows that eigensolvers take"
    if layer.spectrum_G is not None or layer.counted_G is not None:
        return None
    if facts.representation_G == "diagonal_sketch":
        return f"G ({facts.out_dim} rows) does not fit: only its diagonal and trace are kept"
    return f"G ({facts.out_dim} rows) has more than the {LARGEST} rows that eigensolvers take"


def _estimated(layer: Measured) -> str | None:
    counted = layer.counted_G
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
    singular = [name for name, within in zip("AG", within_tolerance(sides), strict=True) if within]
    asked = {name: value for name, value in found.items() if name in METRICS}
    return reasons(asked, singular, undamped=sides.damping.joint is None)


def ordered(products: Products, params: CapacityParams, rank: int | None, rounding: float = 0.0) -> dict[str, Any]:
    """Compute the metrics that follow from the order of the eigenvalues."""
    found: dict[str, Any] = {}
    wanted = params.selected
    if "density" in wanted:
        edges, counts, below = histogram(products, DECADES, params.density_bins)
        if edges:
            known, under = resolved_counts(edges, counts, rounding)
            found["density"] = SpectralDensity(edges=tuple(edges), counts=known, below=below + under)
    if "quantiles" in wanted:
        values = {level: quantile(products, level) for level in params.quantile_levels}
        found["quantiles"] = tuple(
            Quantile(level=level, value=value) for level, value in values.items() if value is not None
        )
    if "decay" in wanted and rank is not None:
        fitted = decay(products, rank)
        if fitted is not None:
            found["decay"] = SpectralDecay(
                exponent=fitted.exponent,
                first_rank=fitted.first_rank,
                last_rank=fitted.last_rank,
                r_squared=fitted.r_squared,
            )
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
