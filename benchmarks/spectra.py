"""Spectra of a factor of few positions: T columns of its pivoted Cholesky factor against the whole matrix.

    python -m benchmarks.spectra [--sizes 1024 2048 4096]

Both are values alone, in float64, on one machine after one another; the error is the largest
difference of the two, over the largest eigenvalue. The rungs below the first are timed too, by
which a plan knows what going down costs.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import results_file
from engine.linalg.eigendecomposition import Decomposition, decompose, rungs

SHARES = (4, 8, 16)
"""T = n over each."""
LARGEST_SLOW = 1024
"""Rows up to which the rung in place is timed."""


def factor(size: int, positions: int) -> Tensor:
    """A covariance of so many positions, whose features differ a hundredfold in scale."""
    generator = torch.Generator().manual_seed(size + positions)
    rows = torch.randn(positions, size, dtype=torch.float64, generator=generator)
    rows *= torch.logspace(0, -2, size, dtype=torch.float64)
    return rows.T @ rows / positions


def timed(work: Callable[[], Decomposition]) -> tuple[float, Decomposition]:
    """The processor seconds of the faster of two runs: one thread, so that others on the machine count little."""
    seconds = []
    for _ in range(2):
        begun = time.process_time()
        found = work()
        seconds.append(time.process_time() - begun)
    return min(seconds), found


def gram_route(sizes: list[int]) -> list[dict[str, Any]]:
    """Seconds and error for each size and share."""
    rows = []
    for size in sizes:
        for share in SHARES:
            positions = size // share
            matrix = factor(size, positions)
            whole, truth = timed(lambda matrix=matrix: decompose(matrix, "whole", begin="host_float64"))
            short, found = timed(
                lambda matrix=matrix, positions=positions: decompose(matrix, "gram", rank_bound=positions)
            )
            if found.rungs != ("host_gram",):
                raise RuntimeError(f"n = {size}, T = {positions} took {found.rungs}")
            error = float((found.values - truth.values).abs().max() / truth.values[-1])
            rows.append({"n": size, "T": positions, "whole": whole, "gram": short, "error": error})
            print(
                f"n={size} T={positions}: {whole:.3f} s against {short:.3f} s ({whole / short:.1f}x), error {error:.1e}"
            )
    return rows


def ladder(size: int) -> list[dict[str, Any]]:
    """Seconds of each rung for values and vectors, and the bytes that each says it takes."""
    matrix = factor(size, 2 * size).to(torch.float32)
    rows = []
    for need in ("values", "vectors"):
        for rung in rungs(size, need=need, device=torch.device("cpu")):
            if rung.name == "host_in_place" and size > LARGEST_SLOW:
                continue
            seconds, found = timed(lambda need=need, rung=rung: decompose(matrix, "rung", need=need, begin=rung.name))
            rows.append(
                {
                    "n": size,
                    "need": need,
                    "rung": rung.name,
                    "seconds": seconds,
                    "matrices": rung.host_bytes / (8 * size * size),
                    "residual": found.residual,
                }
            )
            print(f"n={size} {need} {rung.name}: {seconds:.3f} s, {rung.host_bytes / (8 * size * size):.2f} n²·8 bytes")
    return rows


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048, 4096])
    sizes = parser.parse_args().sizes
    torch.set_num_threads(1)
    routes = gram_route(sizes)
    rows = [row for size in sizes for row in ladder(size)]
    quarter = [row["whole"] / row["gram"] for row in routes if row["n"] == 4 * row["T"]]
    claims = [
        results_file.claim("T = n/4: times faster than the whole matrix, least", min(quarter), 3, at_most=False),
        results_file.claim(
            "T = n/16: times faster than the whole matrix, least",
            min(row["whole"] / row["gram"] for row in routes if row["n"] == 16 * row["T"]),
            8,
            at_most=False,
        ),
        results_file.claim("largest difference over λ_max", max(row["error"] for row in routes), 1e-13),
    ]
    results_file.write("spectra", claims, {"gram": routes, "ladder": rows})


if __name__ == "__main__":
    main()
