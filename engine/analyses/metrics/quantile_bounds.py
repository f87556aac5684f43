"""Intervals: bounds of what follows from the order of eigenvalues that are themselves known between bounds.

Order statistics and counts grow with every eigenvalue, so what the lower bounds give is a lower bound, and what the
upper ones give an upper one. A threshold is a share of the largest eigenvalue, and a condition number a quotient: there
the bounds of both are met crosswise.
"""

from collections.abc import Mapping, Sequence

from catalog.analyses.capacity import CapacityParams
from engine.linalg.kronecker_quantiles import Pair, Products, quantile

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


def reasons(values: Mapping[str, object], singular: Sequence[str], undamped: bool) -> dict[str, str]:
    """Return why metrics among ``values`` are null, where they are."""
    found = {}
    told = " and ".join(singular)
    for name in ("logdet", "kappa"):
        if name in values and values[name] is None and singular:
            found[name] = f"{told} {'are' if len(singular) > 1 else 'is'} singular, or not told from it"
    for name in ("logdet_damped", "logdet_factored", "kappa_damped", "kappa_factored"):
        if name in values and values[name] is None and undamped:
            found[name] = "there is no curvature, and so no damping relative to it"
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
