"""One layer's capacity metrics, those that were asked for, and where they are heading as the sample grows."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from catalog.capacity import DAMPING_GRID, CapacityParams
from catalog.capacity_metrics import (
    METRICS,
    CapacityMetrics,
    EffectiveDimensionCurve,
    Quantile,
    SpectralDecay,
    SpectralDensity,
)
from catalog.nested import Convergence
from engine.analyses.measured import Measured
from engine.analyses.sample_sizes import nested_capacity
from engine.analyses.sides import SCALARS, Sides, scalars
from engine.curvature.collected import Collected
from engine.curvature.decay import decay
from engine.curvature.extrapolation import extrapolated, not_converged
from engine.curvature.kronecker_order import Products, histogram, quantile
from engine.curvature.structured import Structured
from engine.errors import NonFiniteFactor

DECADES = 16
"""Of the density: what float64 resolves below the largest eigenvalue."""
_COUNTS = frozenset(
    {
        "stable_rank", "participation_ratio", "effective_rank", "rank", "effective_dimension",
        "effective_dimension_factored",
    }
)  # fmt: skip
"""Numbers of directions, which the dimension bounds."""
_LOGARITHMS = frozenset({"logdet", "logdet_damped", "logdet_factored"})


def sides_of(layer: Measured, whole: Collected, params: CapacityParams, device: torch.device) -> Sides:
    """What the metrics of ``layer`` are computed from, on ``device`` where G answers for itself.

    Raises:
        NonFiniteFactor: If the trace of F is beyond float64.
    """
    facts, tolerance = layer.facts, params.rank_tolerance
    if not math.isfinite(layer.trace_A * layer.trace_G):
        raise NonFiniteFactor(
            f"layer `{facts.name}`: the eigenvalues of G ⊗ A exceed float64; scale the model's inputs or loss",
            layer=facts.name,
        )
    if tolerance is None:
        precision = torch.float64 if layer.record.dtype == "float64" else torch.float32
        tolerance = max(facts.in_dim, facts.out_dim) * torch.finfo(precision).eps
    structured, scale = None, 1.0
    if params.decomposition != "none" and layer.spectrum_A is not None and layer.spectrum_G is None:
        # read again for this layer alone: no layer's factors are held
        factors = whole.load(facts.ordinal)
        side: Tensor | Structured = factors.G
        if isinstance(side, Structured) and side.complete:
            structured, scale = side.to(device), factors.scale_G
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
        tolerance=tolerance,
        structured_G=structured,
        scale_G=scale,
    )


def layer_metrics(layer: Measured, sides: Sides, params: CapacityParams) -> CapacityMetrics:
    """Every metric of one layer's F = G ⊗ A that was asked for."""
    wanted = params.selected
    found: dict[str, Any] = dict.fromkeys(METRICS) | scalars(sides, wanted)
    if "effective_dimension_share" in wanted:
        effective = SCALARS["effective_dimension"](sides)
        found["effective_dimension_share"] = None if effective is None else effective / sides.dimension
    if "kappa_clipped" in wanted:
        found["kappa_clipped"] = _product(layer.clipping_A.kappa_clipped, layer.clipping_G.kappa_clipped)
    if "effective_dimension_curve" in wanted:
        found["effective_dimension_curve"] = curve(sides, params)
    if wanted & {"quantiles", "density", "decay", "top_eigenvalues"}:
        products = sides.products()
        if products is not None:
            rank = SCALARS["rank"](sides) if "decay" in wanted else None
            found |= ordered(products, params, None if rank is None else int(rank))
    return CapacityMetrics(
        form=layer.facts.form,
        dimension=sides.dimension,
        # its norm alone, which takes no eigenvalues, is already that of the sketch
        approximate=bool(layer.record.sketch_bound),
        no_spectrum=_no_spectrum(layer, sides),
        damping=sides.damping.joint,
        nested=nested_capacity(layer.nested),
        convergence=_convergence(layer, sides, params),
        cross_check=None,
        **found,
    )


def _no_spectrum(layer: Measured, sides: Sides) -> str | None:
    """Why there are no eigenvalues of G; None where there are, or nobody asked."""
    structured = sides.structured_G
    if structured is not None:
        return f"G ({structured.size} rows) is held as `{structured.kind}`: no eigenvalues without its matrix"
    partial = layer.facts.representation_G == "diagonal_sketch" and layer.spectrum_A is not None
    return f"G ({layer.facts.out_dim} rows) does not fit: only its diagonal and trace are kept" if partial else None


def ordered(products: Products, params: CapacityParams, rank: int | None) -> dict[str, Any]:
    """What follows from the order of the eigenvalues, of those asked for."""
    found: dict[str, Any] = {}
    wanted = params.selected
    if "density" in wanted:
        edges, counts, below = histogram(products, DECADES, params.density_bins)
        if edges:
            found["density"] = SpectralDensity(edges=tuple(edges), counts=tuple(counts), below=below)
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


def curve(sides: Sides, params: CapacityParams) -> EffectiveDimensionCurve | None:
    """The effective dimension over the absolute grid; None where nothing can be said of it."""
    grid = params.damping_grid or DAMPING_GRID
    values = sides.effective_dimensions(grid)
    if all(value is None for value in values):
        return None
    return EffectiveDimensionCurve(damping=grid, effective_dimension=tuple(values))


def _convergence(layer: Measured, sides: Sides, params: CapacityParams) -> tuple[Convergence, ...] | None:
    if not layer.nested:
        return None
    sizes = [
        sides
        if size is layer.nested[-1]
        # with the damping of the whole: what moves shall be the curvature
        else replace(
            sides,
            structured_G=None,
            spectrum_A=size.spectrum_A,
            spectrum_G=size.spectrum_G,
            trace_A=size.trace_A,
            trace_G=size.trace_G,
            frobenius_A=size.frobenius_A,
            frobenius_G=size.frobenius_G,
        )
        for size in layer.nested
    ]
    examples = tuple(size.examples for size in layer.nested)
    names = [name for name in SCALARS if name in params.selected]
    values = [scalars(each, names) for each in sizes]
    found = []
    for name in names:
        own = tuple(each[name] for each in values)
        limit = extrapolated(examples, own, sides.dimension if name in _COUNTS else None)
        scale = float(sides.dimension) if name in _LOGARITHMS else None
        found.append(
            Convergence(
                metric=name,
                examples=examples,
                values=own,
                extrapolation=limit,
                not_converged=not_converged(own[-1], limit, scale),
            )
        )
    return tuple(found)


def _product(left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return None
    product = left * right
    return product if product < float("inf") else None
