"""A softmax head of 6,000 classes against its dense float64 matrix: quantiles, rank, condition, clipped inverse.

The head keeps the probabilities of its loss terms. Up to 8192 classes its eigenvalues come from the dense matrix where
memory allows, and are counted between bounds where it does not; both are held against the definition,
``diag p̄ − PᵀP/T``, decomposed in float64. The clipped head is an operator in either case.

    python -m benchmarks.wide_head
"""

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks import results_file
from catalog.analyses.capacity import CapacityParams
from engine.analyses.metrics.kronecker_metrics import Sides
from engine.analyses.metrics.layer_metrics import ordered, scalar_metrics
from engine.factors.clipping.clipped_operator import ClippedOperator
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.linalg.damping import Clipping, Damping

CLASSES, TERMS, KAPPA_MAX = 6000, 64, 1e6
PARAMS = CapacityParams()
ZERO = 1e-12
"""Of the largest eigenvalue: what the dense matrix has of rounding in place of zeros."""


def head() -> SoftmaxFisher:
    """Few frequent classes and many rare ones, over seven decades."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(TERMS, CLASSES, generator=generator, dtype=torch.float64)
    logits -= 2 * torch.arange(1, CLASSES + 1, dtype=torch.float64).log()
    share = torch.full((TERMS,), 1 / TERMS, dtype=torch.float64)
    return SoftmaxFisher(rows=torch.softmax(logits, -1), weights=share)


def sides_of(a: Tensor, g: Tensor | None, side: SoftmaxFisher, counted: Any) -> Sides:  # noqa: ANN401
    """A layer of that head, whose A has the spectrum ``a``."""
    return Sides(
        in_dim=a.numel(),
        out_dim=CLASSES,
        spectrum_A=a,
        spectrum_G=g,
        trace_A=float(a.sum()),
        trace_G=side.trace(),
        frobenius_A=float(a.norm()),
        frobenius_G=side.frobenius_norm(),
        damping=Damping(joint=None, A=None, G=None, relative_A=None, relative_G=None),
        tolerance=CLASSES * torch.finfo(torch.float64).eps,
        structured_G=None if g is not None else side,
        counted_G=counted,
    )


def metrics(sides: Sides) -> dict[str, Any]:
    """Quantiles, rank and condition, as a layer's row has them."""
    products = sides.products()
    if products is None:
        raise ValueError("there are no eigenvalues")
    found: dict[str, Any] = scalar_metrics(sides, ("rank", "kappa"), None)
    rank = int(found["rank"] or 0)
    return found | {each.level: each.value for each in ordered(products, PARAMS, rank)["quantiles"]}


def main() -> None:
    """Build, decompose, compare."""
    side = head()
    begun = time.perf_counter()
    probabilities = side.rows
    matrix = torch.diag(probabilities.mean(0)) - probabilities.T @ probabilities / TERMS
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(0)
    values[values < ZERO * values[-1]] = 0
    seconds = {"dense with vectors": time.perf_counter() - begun}
    begun = time.perf_counter()
    spectrum = side.spectrum("head")
    seconds["spectrum"] = time.perf_counter() - begun
    begun = time.perf_counter()
    counted = side.counted(KAPPA_MAX)
    seconds["counted"] = time.perf_counter() - begun
    if spectrum is None:
        raise ValueError("the head's matrix was not made")
    a = torch.logspace(-3, 1, 16, dtype=torch.float64)
    truth, dense, by_count = (
        metrics(sides_of(a, g, side, own)) for g, own in ((values, None), (spectrum[0], None), (None, counted))
    )
    top = float(values[-1] * a[-1])
    worst = {
        name: max(abs(found[level] - truth[level]) for level in PARAMS.quantile_levels) / top
        for name, found in (("dense", dense), ("counted", by_count))
    }
    floor = float(values[-1]) / KAPPA_MAX
    operator = ClippedOperator(side=side, floor=floor, largest=float(counted.values[-1]))
    right = torch.randn(CLASSES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    begun = time.perf_counter()
    solved = operator.solve(right)
    seconds["clipped inverse of four vectors"] = time.perf_counter() - begun
    clipped = values.clamp_min(floor)
    exact = (vectors / clipped) @ (vectors.T @ right)
    kappa = float(clipped[-1] / clipped[0])
    kappas = [Clipping.at(spectrum[0], KAPPA_MAX).kappa_clipped, Clipping.at(counted, KAPPA_MAX).kappa_clipped]
    slack = ZERO * float(values[-1])
    outside = int(((counted.lower > values + slack) | (counted.upper < values - slack)).sum())
    results_file.write(
        "wide_head",
        [
            results_file.claim("largest error of a quantile over λ_max", worst["dense"], 1e-8),
            results_file.claim("the same where eigenvalues are counted", worst["counted"], 1e-3),
            results_file.claim("difference of the ranks", abs(dense["rank"] - truth["rank"]), 0),
            results_file.claim(
                "κ that are not infinite, of three",
                sum(each["kappa"] is not None for each in (truth, dense, by_count)),
                0,
            ),
            results_file.claim(
                "relative error of the clipped κ", max(abs((each or 0) / kappa - 1) for each in kappas), 1e-8
            ),
            results_file.claim(
                "relative error of the clipped inverse", float((solved - exact).norm() / exact.norm()), 1e-8
            ),
            results_file.claim("eigenvalues outside of their bounds", outside, 0),
        ],
        {
            "classes": CLASSES,
            "terms": TERMS,
            "seconds": seconds,
            "counts": counted.counts,
            "clipped": [int((values < floor).sum()), counted.below_floor],
            "ranks": {"truth": truth["rank"], "dense": dense["rank"], "counted": by_count["rank"]},
        },
    )


if __name__ == "__main__":
    main()
