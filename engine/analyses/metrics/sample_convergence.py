"""Convergence: the metrics of a layer, and of the model, over ever more examples, and where they are heading.

The damping is that of the whole at every size: what moves shall be the curvature. A G that has no
eigenvalues without its matrix is read again at each size, and let go of when it has answered.

The limit is extrapolated. A smooth function of a sample covariance is off by c/N to leading order, so two sizes give
the value at infinitely many examples: v∞ = (N·v(N) − M·v(M))/(N − M), which for M = N/2 is the value at N plus once
more what the last doubling added. While N is below the dimension the error falls more slowly, and v∞ is then still on
the near side of the truth. Reruns with other examples agree with one another and say nothing of this: spectra of
power laws keep their effective rank 20 to 30 per cent too low at N near the dimension.

References:
    Richardson (1911), The approximate arithmetical solution by finite differences
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from catalog.analyses.capacity import CapacityParams
from catalog.analyses.capacity_metrics import CapacityMetrics, ModelCapacity, SpectralDecay
from catalog.analyses.subsamples import Convergence
from engine.analyses.metrics.kronecker_metrics import SCALARS, Sides
from engine.analyses.metrics.layer_metrics import SCALAR_METRICS, ordered, scalar_metrics, structured_side
from engine.analyses.metrics.model_metrics import ModelLayer, model_metrics
from engine.factors.factor_set import FactorSet
from engine.measurement.layer_measurement import Measured

TOLERANCE = 0.05
"""A metric whose extrapolation lies further from it than this share has not converged."""


def extrapolated(examples: Sequence[int], values: Sequence[float | None]) -> float | None:
    """Return v∞ = v(N) + (v(N) − v(M))·M/(N − M), the value at infinitely many examples, from the last two sizes.

    In the metric's unit, and not within its bounds; None with fewer than two values, or beyond float64.
    """
    if len(values) < 2 or values[-1] is None or values[-2] is None or examples[-1] <= examples[-2]:
        return None
    # the difference first: the products of large values with large sizes would overflow
    found = values[-1] + (values[-1] - values[-2]) * examples[-2] / (examples[-1] - examples[-2])
    return found if math.isfinite(found) else None


def not_converged(value: float | None, limit: float | None, scale: float | None = None) -> bool | None:
    """Return whether |limit − value| > 0.05·scale, by default |limit|; None where either is unknown."""
    if value is None or limit is None:
        return None
    return abs(limit - value) > TOLERANCE * (abs(limit) if scale is None else scale)


Values = Mapping[str, float | None]

SUMMED = ("trace", "effective_dimension", "logdet_damped")
"""Metrics of the model that add up over its layers."""
_TOGETHER = (
    "frobenius_norm", "spectral_norm", "stable_rank", "participation_ratio", "effective_rank", "rank", "logdet",
    "kappa", "kappa_damped", "decay",
)  # fmt: skip
"""Metrics of the model that are asked of all eigenvalues as one spectrum."""
_COUNTS = frozenset(
    {
        "stable_rank", "participation_ratio", "effective_rank", "rank", "effective_dimension",
        "effective_dimension_factored",
    }
)  # fmt: skip
"""Numbers of directions, which the dimension bounds."""
_LOGARITHMS = frozenset({"logdet", "logdet_damped", "logdet_factored"})
"""Metrics of either sign; all others are not negative."""
_FROM_ONE = frozenset(
    {
        "stable_rank", "participation_ratio", "effective_rank", "effective_rank_A", "effective_rank_G",
        "kappa", "kappa_damped", "kappa_factored", "kappa_clipped",
    }
)  # fmt: skip
"""Metrics that are at least 1, where they are defined."""


@dataclass(frozen=True, kw_only=True)
class Followed:
    """One layer over the sample sizes, up to the whole."""

    examples: tuple[int, ...]
    values: tuple[Values, ...]
    """The scalar metrics asked for, by name, at each size."""
    layers: tuple[ModelLayer, ...]
    """The layer at each size, as the model's metrics need it."""
    convergence: tuple[Convergence, ...]


def follow_layer(
    layer: Measured,
    whole: FactorSet,
    sides: Sides,
    metrics: CapacityMetrics,
    params: CapacityParams,
    device: torch.device,
) -> Followed | None:
    """Compute one layer's scalar metrics at every sample size, and where they are heading; one structured G is held."""
    if not layer.nested:
        return None
    names = [name for name in SCALAR_METRICS if name in params.selected]
    values: list[Values] = []
    layers = []
    for size, kept in zip(layer.nested[:-1], whole.nested, strict=True):
        structured = None
        if size.spectrum_A is not None and size.spectrum_G is None:
            structured = structured_side(kept.load(layer.facts.ordinal), device)
        own = replace(
            sides,
            spectrum_A=size.spectrum_A,
            spectrum_G=size.spectrum_G,
            trace_A=size.trace_A,
            trace_G=size.trace_G,
            frobenius_A=size.frobenius_A,
            frobenius_G=size.frobenius_G,
            structured_G=structured,
            counted_G=None if structured is None else structured.counted(layer.record.kappa_max),
        )
        values.append(_at_one_size(own, names, params, layer.record.kappa_max))
        wanted = params.selected & {"spectral_norm", "stable_rank"}
        layers.append(
            ModelLayer(
                name=layer.facts.name,
                sides=own.without_structure(params.selected),
                spectral_norm=own.spectral_norm if wanted else None,
                curve=None,
            )
        )
    values.append({name: _number(getattr(metrics, name)) for name in names})
    layers.append(ModelLayer.of(layer.facts.name, sides, metrics, params.selected))
    examples = tuple(size.examples for size in layer.nested)
    bounds = {"effective_rank_A": sides.in_dim, "effective_rank_G": sides.out_dim, "effective_dimension_share": 1}
    return Followed(
        examples=examples,
        values=tuple(values),
        layers=tuple(layers),
        convergence=_heading(examples, values, sides.dimension, bounds),
    )


def model_convergence(
    layers: Sequence[Followed], whole: ModelCapacity, params: CapacityParams
) -> tuple[Convergence, ...] | None:
    """Compute the model's scalar metrics at every sample size, and where they are heading."""
    if not layers:
        return None
    examples = layers[0].examples
    names = tuple(name for name in _TOGETHER if name in params.selected)
    values = []
    for place in range(len(examples)):
        last = place == len(examples) - 1
        found: dict[str, float | None] = {}
        for name in SUMMED:
            if name in params.selected:
                curved = [each.layers[-1].sides.trace > 0 for each in layers]
                found[name] = sum_layers([each.values[place][name] for each in layers], curved)
        if names:
            alone = replace(params, metrics=names)
            model = whole if last else model_metrics([each.layers[place] for each in layers], alone)
            found |= {name: _number(getattr(model, name)) for name in names}
        values.append(found)
    return _heading(examples, values, sum(each.layers[-1].sides.dimension for each in layers), {})


def sum_layers(values: Sequence[float | None], curved: Sequence[bool]) -> float | None:
    """Sum one metric over all layers."""
    if any(value is None and own for value, own in zip(values, curved, strict=True)):
        return None
    return math.fsum(value or 0.0 for value in values)


def _at_one_size(sides: Sides, names: Sequence[str], params: CapacityParams, kappa_max: float | None) -> Values:
    found = scalar_metrics(sides, names, kappa_max)
    if "decay" in names:
        products, rank = sides.products(), SCALARS["rank"](sides)
        fitted = {} if products is None else ordered(products, replace(params, metrics=("decay",)), int(rank or 0))
        found["decay"] = _number(fitted.get("decay"))
    return found


def _number(value: float | SpectralDecay | None) -> float | None:
    return value.exponent if isinstance(value, SpectralDecay) else value


def _heading(
    examples: tuple[int, ...], values: Sequence[Values], dimension: int, ceilings: Mapping[str, int]
) -> tuple[Convergence, ...]:
    bounds = {**dict.fromkeys(_COUNTS, float(dimension)), **ceilings}
    return tuple(
        heading(name, examples, tuple(each[name] for each in values), dimension, bounds.get(name, math.inf))
        for name in values[-1]
    )


def heading(
    metric: str, examples: tuple[int, ...], values: tuple[float | None, ...], dimension: int, ceiling: float
) -> Convergence:
    """Describe where a metric is heading.

    A v∞ outside of the metric's range, which ends at ``ceiling``, is the end of it if that is within the tolerance of
    the last value; elsewhere it refutes the error's fall with 1/N, and there is none.
    """
    floor = -math.inf if metric in _LOGARITHMS else 1.0 if metric in _FROM_ONE else 0.0
    limit = extrapolated(examples, values)
    within = None if limit is None else min(max(limit, floor), ceiling)
    late = not_converged(values[-1], within, float(dimension) if metric in _LOGARITHMS else None)
    refuted = within != limit and late
    return Convergence(
        metric=metric,
        examples=examples,
        values=values,
        extrapolation=None if refuted else within,
        not_converged=late,
        no_extrapolation=f"{limit:.4g} is outside of its range: no fall with 1/N yet" if refuted else None,
    )
