"""The whole model's capacity: one block-diagonal matrix, whose eigenvalues are those of all layers.

Its eigenvalues are never joined: counts add up, so quantiles are found over all layers at once;
sums over eigenvalues add up; entropies add up with each layer's share of the trace.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

from catalog.analyses.capacity import CapacityParams
from catalog.analyses.capacity_metrics import (
    CapacityMetrics,
    EffectiveDimensionCurve,
    ModelCapacity,
    TopEigenvalue,
    TraceShare,
)
from engine.analyses.metrics.kronecker_metrics import SCALARS, Sides, settled, within_tolerance
from engine.analyses.metrics.layer_metrics import intervals, ordered, reasons
from engine.linalg.kronecker_quantiles import Pair, Products, largest
from engine.linalg.kronecker_spectrum import effective_rank_of_blocks

_NAMED = 3
"""Singular factors that a reason names."""


@dataclass(frozen=True, kw_only=True)
class ModelLayer:
    """One layer as the model's metrics need it; it holds no factor."""

    name: str
    sides: Sides
    spectral_norm: float | None
    curve: EffectiveDimensionCurve | None
    approximate: bool = False
    """Whether a sketch stands for G."""

    @classmethod
    def of(cls, name: str, sides: Sides, metrics: CapacityMetrics, wanted: Collection[str]) -> Self:
        """Keep the spectra of one layer, and the answers of a G that has none."""
        return cls(
            name=name,
            sides=sides.without_structure(wanted),
            spectral_norm=sides.spectral_norm,
            curve=metrics.effective_dimension_curve,
            approximate=metrics.approximate,
        )


def model_metrics(layers: Sequence[ModelLayer], params: CapacityParams) -> ModelCapacity:
    """Compute the metrics that were asked for, over all layers together.

    Memory:
        Some 64 Ki products, and four numbers for each row of every layer's smaller side.
    """
    wanted = params.selected
    found: dict[str, Any] = dict.fromkeys(ModelCapacity.__dataclass_fields__)
    found["approximate"] = tuple(layer.name for layer in layers if layer.approximate)
    found |= {name: value for name, value in _closed(layers).items() if name in wanted}
    if "trace" in wanted:
        found["trace_shares"] = _shares(layers)
    if "effective_dimension_curve" in wanted:
        found["effective_dimension_curve"] = _curve(layers)
    missing = [layer.name for layer in layers if layer.sides.ordered_spectra is None]
    if layers and not missing:
        found |= _of_all_eigenvalues(layers, params)
    estimated = tuple(layer.name for layer in layers if layer.sides.counted_G is not None)
    found["estimated"] = estimated
    found["intervals"] = _intervals(layers, params) if estimated and not missing else None
    found["undefined"] = {} if missing else _undefined(layers, {name: found[name] for name in wanted if name in found})
    return ModelCapacity(**found | {"no_spectrum": () if params.decomposition == "none" else tuple(missing)})


def _intervals(layers: Sequence[ModelLayer], params: CapacityParams) -> dict[str, tuple[float | None, float | None]]:
    bounds = [layer.sides.bounds for layer in layers if layer.sides.bounds is not None]
    added = [layer.sides.damping.joint or 0.0 for layer in layers]
    return intervals(bounds, added, max(layer.sides.tolerance for layer in layers), params)


def _undefined(layers: Sequence[ModelLayer], values: dict[str, Any]) -> dict[str, str]:
    singular = [
        f"{side} of `{layer.name}`"
        for layer in layers
        for side, *within in zip("AG", within_tolerance(layer.sides), layer.sides.singular, strict=True)
        if any(within)
    ]
    # the first of many tells enough
    told = [*singular[:_NAMED], f"{len(singular) - _NAMED} more"] if len(singular) > _NAMED else singular
    return reasons(values, told, undamped=any(layer.sides.damping.joint is None for layer in layers))


def _closed(layers: Sequence[ModelLayer]) -> dict[str, float | None]:
    """Metrics that follow from those of the layers."""
    traces = [layer.sides.trace for layer in layers]
    tops = [layer.spectral_norm for layer in layers]
    norms = [layer.sides.frobenius_norm for layer in layers]
    trace, norm = math.fsum(traces), None if None in norms else math.hypot(*(each or 0.0 for each in norms))
    top = max((each or 0.0 for each in tops), default=0.0)
    known = bool(tops) and None not in tops
    ranks = [SCALARS["effective_rank"](layer.sides) for layer in layers]
    logdets = [SCALARS["logdet"](layer.sides) for layer in layers]
    return {
        "frobenius_norm": norm,
        "spectral_norm": top if known else None,
        "stable_rank": (norm / top) ** 2 if known and top > 0 and norm is not None else None,
        "participation_ratio": (trace / norm) ** 2 if norm else None,
        "effective_rank": effective_rank_of_blocks(traces, ranks),
        "logdet": None if not logdets or None in logdets else math.fsum(each or 0.0 for each in logdets),
    }


def _of_all_eigenvalues(layers: Sequence[ModelLayer], params: CapacityParams) -> dict[str, Any]:
    wanted = params.selected
    found: dict[str, Any] = {}
    pairs = [layer.sides.ordered_spectra for layer in layers if layer.sides.ordered_spectra is not None]
    if wanted & {"quantiles", "density", "decay", "rank"}:
        products = Products(pairs)
        rank = None
        if wanted & {"rank", "decay"}:
            tolerance = max(layer.sides.tolerance for layer in layers)
            rank = products.size - products.at_most(tolerance * products.largest)
        ends = [
            Products([each.ordered_spectra for each in every if each.ordered_spectra is not None])
            for every in list(zip(*(layer.sides.variants for layer in layers), strict=True))[1:]
        ]
        found |= {
            "rank": rank if "rank" in wanted else None,
            **ordered(products, params, rank, _rounding(layers), ends),
        }
    if "top_eigenvalues" in wanted:
        found["top_eigenvalues"] = _top(layers, pairs, params.top_k)
    if "kappa" in wanted:
        singular = any(any(layer.sides.singular) for layer in layers)
        found["kappa"] = None if singular else _condition([layer.sides for layer in layers], damped=False)
    if "kappa_damped" in wanted:
        variants = zip(*(layer.sides.variants for layer in layers), strict=True)
        found["kappa_damped"] = settled([_condition(each, damped=True) for each in variants])
    return found


def _condition(sides: Sequence[Sides], *, damped: bool) -> float | None:
    # a layer without curvature has no λ of its own, and stays singular
    pairs = [(each.ordered_spectra, (each.damping.joint or 0.0) * damped) for each in sides]
    low, high = ([float(own[0][end]) * float(own[1][end]) + add for own, add in pairs if own] for end in (0, -1))
    return _ratio(max(high), min(low))


def _rounding(layers: Sequence[ModelLayer]) -> float:
    """Return the magnitude below which eigenvalues of some layer are rounding."""
    return max(
        (
            layer.sides.rounding * float(pair[0][-1]) * float(pair[1][-1])
            for layer in layers
            for pair in [layer.sides.ordered_spectra]
            if pair is not None
        ),
        default=0.0,
    )


def _top(layers: Sequence[ModelLayer], pairs: Sequence[Pair], count: int) -> tuple[TopEigenvalue, ...]:
    each = [(value, -place) for place, pair in enumerate(pairs) for value in largest(pair, count).tolist()]
    # of equal ones the earlier layer's first
    return tuple(TopEigenvalue(value=value, layer=layers[-place].name) for value, place in heapq.nlargest(count, each))


def _shares(layers: Sequence[ModelLayer]) -> tuple[TraceShare, ...]:
    total = math.fsum(layer.sides.trace for layer in layers)
    return tuple(
        TraceShare(layer=layer.name, trace=own, share=own / total if total > 0 else None)
        for layer in layers
        for own in [layer.sides.trace]
    )


def _curve(layers: Sequence[ModelLayer]) -> EffectiveDimensionCurve | None:
    curves = [layer.curve for layer in layers if layer.curve is not None]
    if not curves or len(curves) < len(layers):
        return None
    columns = zip(*(each.effective_dimension for each in curves), strict=True)
    return EffectiveDimensionCurve(
        damping=curves[0].damping,
        effective_dimension=tuple(
            None if None in column else math.fsum(value or 0.0 for value in column) for column in columns
        ),
    )


def _ratio(above: float, below: float) -> float | None:
    if below <= 0:
        return None
    ratio = above / below
    return ratio if math.isfinite(ratio) else None
