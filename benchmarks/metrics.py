"""Metrics of two spectra of 16384 against making all 2.7e8 products, a chunk at a time.

Every metric of `capacity` for one layer: closed forms, log-determinant and effective dimension, the
curve over the absolute grid, density, quantiles, decay and the largest eigenvalues. Spectra: spread
evenly over twelve decades, a power law, and one with half of its eigenvalues zero.

    python -m benchmarks.metrics [--size 16384] [--rounds 9] [--output NAME]
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import results_file
from catalog.analyses.capacity import CapacityParams
from catalog.requests.collection import Stabilisation
from engine.analyses.metrics.kronecker_metrics import SCALARS, Sides, scalars
from engine.analyses.metrics.layer_metrics import curve, ordered
from engine.linalg.damping import damping
from engine.linalg.kronecker_quantiles import quantile_rank

PARAMS = CapacityParams()
SECONDS, ERROR = 0.1, 1e-10
_ROWS = 256


def spectra(size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The cases, ascending."""
    generator = torch.Generator().manual_seed(0)

    def spread(count: int, decades: float) -> Tensor:
        drawn = torch.rand(count, dtype=torch.float64, generator=generator)
        return (10 ** (-decades * drawn)).sort().values

    ranks = torch.arange(size, 0, -1, dtype=torch.float64)
    zeros = torch.zeros(size // 2, dtype=torch.float64)
    return {
        "twelve decades": (spread(size, 12), spread(size, 12)),
        "power law": (ranks**-1.5, ranks**-2.0),
        "half zeros": (torch.cat([zeros, spread(size - size // 2, 3)]), spread(size, 6)),
    }


def known(a: Tensor, g: Tensor) -> Sides:
    """What the analysis knows of such a layer."""
    return Sides(
        in_dim=a.numel(),
        out_dim=g.numel(),
        spectrum_A=a,
        spectrum_G=g,
        trace_A=float(a.sum()),
        trace_G=float(g.sum()),
        frobenius_A=float(a.norm()),
        frobenius_G=float(g.norm()),
        damping=damping(float(a.mean()), float(g.mean()), Stabilisation(), block=False),
        tolerance=max(a.numel(), g.numel()) * torch.finfo(torch.float32).eps,
    )


def all_metrics(a: Tensor, g: Tensor) -> dict[str, Any]:
    """Every metric, as a row of the analysis has them."""
    sides = known(a, g)
    found: dict[str, Any] = dict(scalars(sides, SCALARS))
    products = sides.products()
    assert products is not None
    rank = found["rank"]
    return found | ordered(products, PARAMS, rank) | {"effective_dimension_curve": curve(sides, PARAMS)}


def exact_sums(a: Tensor, g: Tensor, damped: float) -> dict[str, float]:
    """The sums that need every product, from every product."""
    parts: dict[str, list[float]] = {name: [] for name in ("trace", "square", "logdet", "effective", "entropy")}
    total = float(a.sum()) * float(g.sum())
    for products in chunks(a, g):
        share = products / total
        parts["trace"].append(float(products.sum()))
        parts["square"].append(float(products.square().sum()))
        parts["logdet"].append(float((products + damped).log().sum()))
        parts["effective"].append(float((products / (products + damped)).sum()))
        parts["entropy"].append(-float(torch.special.xlogy(share, share).sum()))
    return {name: math.fsum(values) for name, values in parts.items()}


def chunks(a: Tensor, g: Tensor) -> Iterator[Tensor]:
    """All products, some rows of them at a time."""
    for start in range(0, a.numel(), _ROWS):
        yield torch.outer(a[start : start + _ROWS], g)


def errors(a: Tensor, g: Tensor, found: dict[str, Any]) -> dict[str, float]:
    """Relative errors against the exact sums, and how many order statistics are not exactly right."""
    damped = known(a, g).damping.joint
    assert damped is not None
    exact = exact_sums(a, g, damped)
    truth = {
        "trace": exact["trace"],
        "frobenius_norm": math.sqrt(exact["square"]),
        "participation_ratio": exact["trace"] ** 2 / exact["square"],
        "logdet_damped": exact["logdet"],
        "effective_dimension": exact["effective"],
        "effective_rank": math.exp(exact["entropy"]),
    }
    relative = {name: abs(found[name] - value) / abs(value) for name, value in truth.items()}
    return relative | {"order statistics that are wrong": float(_wrong(a, g, found))}


def _wrong(a: Tensor, g: Tensor, found: dict[str, Any]) -> int:
    """Quantiles that are not the product of their rank, and bins whose count is off, by counting all products."""
    values = torch.tensor([each.value for each in found["quantiles"]], dtype=torch.float64)
    edges = torch.tensor(found["density"].edges, dtype=torch.float64)
    # products below a value are those up to the number before it
    before = torch.nextafter(values, torch.tensor(-1.0, dtype=torch.float64))
    thresholds = torch.cat([values, before, edges]).sort().values
    counts = torch.zeros(len(thresholds) + 1, dtype=torch.int64)
    for products in chunks(a, g):
        counts += torch.bucketize(products.flatten(), thresholds).bincount(minlength=len(counts))
    reached = counts.cumsum(0)
    upto, below, bins = (reached[torch.searchsorted(thresholds, some)] for some in (values, before, edges))
    size = a.numel() * g.numel()
    ranks = torch.tensor([quantile_rank(each.level, size) for each in found["quantiles"]])
    wrong = int(((below >= ranks) | (upto < ranks)).sum())
    return wrong + int((bins.diff() != torch.tensor(found["density"].counts)).sum())


def seconds(work: Callable[[], object], rounds: int) -> list[float]:
    """Wall seconds of each round, after one that warms up."""
    work()
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return taken


def main() -> None:
    """Measure the cases one after the other and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", default="metrics", help="name of the result")
    arguments = parser.parse_args()
    figures, claims = {}, []
    for name, (a, g) in spectra(arguments.size).items():
        damped = known(a, g).damping.joint or 1.0
        taken = seconds(lambda a=a, g=g: all_metrics(a, g), arguments.rounds)  # type: ignore[misc]
        begun = time.perf_counter()
        exact_sums(a, g, damped)
        exact = time.perf_counter() - begun
        off = errors(a, g, all_metrics(a, g))
        figures[name] = {
            "seconds": taken,
            "seconds_of_the_exact_sums_alone": exact,
            "relative_errors": off,
        }
        worst = max(value for key, value in off.items() if not key.startswith("order"))
        claims += [
            results_file.claim(f"{name}: seconds for all metrics", statistics.median(taken), SECONDS),
            results_file.claim(f"{name}: largest relative error against all products", worst, ERROR),
            results_file.claim(
                f"{name}: quantiles and counts that are not exactly those of all products",
                off["order statistics that are wrong"],
                0,
            ),
        ]
    results_file.write(
        arguments.output,
        claims,
        {"method": __doc__, "size": arguments.size, "rounds": arguments.rounds, "cases": figures},
    )


if __name__ == "__main__":
    main()
