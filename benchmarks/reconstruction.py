"""Clipped reconstruction against ``(Q * l) @ Q.T``: seconds, extra bytes, the floor that is kept; and inverses.

    python -P -m benchmarks.reconstruction [SIZE …]

The basis is that of a cosine transform with random signs and order, which is orthonormal to the last bit of
float64; spectra fall as a power, so that the wanted share of eigenvalues lies below λ_max/1e6.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import results_file
from engine.factors.clipping.clip_eigenvalues import Placement, stabilise_
from engine.factors.clipping.clipping_check import check_clipping
from engine.linalg.eigenbasis import Eigenbasis

KAPPA_MAX = 1e6
SIZES = (1024, 2048, 4096, 8192)
MEMORY_SIZE = 4096
EXACT_SIZE = 1024
PLACEMENTS: tuple[Placement, ...] = ("device", "panels", "host")
_REPEATS = 5


def basis(size: int) -> Tensor:
    """An orthonormal matrix (n, n) in float64."""
    generator = torch.Generator().manual_seed(size)
    steps = torch.arange(size, dtype=torch.float64)
    matrix = torch.outer(2 * steps + 1, steps).mul_(math.pi / (2 * size)).cos_().mul_(math.sqrt(2 / size))
    matrix[:, 0] /= math.sqrt(2)
    signs = torch.randint(0, 2, (size, 1), generator=generator).to(torch.float64).mul_(2).sub_(1)
    return matrix[:, torch.randperm(size, generator=generator)].mul_(signs)


def spectrum(size: int, clipped: int) -> Tensor:
    """A power law, ascending, of which ``clipped`` values are below ``λ_max / κ_max``."""
    power = math.log(KAPPA_MAX) / math.log(size - clipped + 0.5)
    return (1 + torch.arange(size, dtype=torch.float64)).pow_(-power).flip(0)


def factor(values: Tensor, vectors: Tensor) -> Tensor:
    """The matrix in float32, symmetric."""
    matrix = (vectors * values) @ vectors.mT
    return matrix.to(torch.float32).triu_().add_(matrix.to(torch.float32).triu_(1).mT)


def seconds(work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """Median of a few runs, each after an untimed ``prepare``; one more to warm up."""
    prepare()
    work()
    times = []
    for _ in range(_REPEATS):
        prepare()
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def extra_bytes(work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> int:
    """The most that is allocated at once beyond what was held before."""
    prepare()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    held = most = 0
    recorded = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((each for each in recorded if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def timed(size: int) -> dict[str, Any]:
    """One size at both shares, the basis stored in float32 as an analysis has it."""
    vectors = basis(size)
    found: dict[str, Any] = {"size": size}
    for name, clipped in (("half", size // 2), ("twentieth", size // 20)):
        values = spectrum(size, clipped)
        original = factor(values, vectors)
        kept = vectors.to(torch.float32)
        floored = values.clamp_min(float(values[-1]) / KAPPA_MAX).to(torch.float32)
        outcome = stabilise_(original.clone(), values, kept, KAPPA_MAX)
        assert outcome.clipped == clipped
        work = original.clone()
        naive = seconds(lambda kept=kept, floored=floored: (kept * floored) @ kept.T)
        own = seconds(
            lambda work=work, values=values, kept=kept: stabilise_(work, values, kept, KAPPA_MAX),
            # a factor that has been through it is no longer what its basis says
            lambda work=work, original=original: work.copy_(original),
        )
        found[name] = {
            "clipped": clipped,
            "update": outcome.update,
            "naive_seconds": naive,
            "seconds": own,
            "times_faster": naive / own,
        }
        if size == MEMORY_SIZE or size <= EXACT_SIZE:
            found[name]["extra_bytes"] = {
                placement: extra_bytes(
                    lambda placement=placement, work=work, values=values, kept=kept: stabilise_(
                        work, values, kept, KAPPA_MAX, placement=placement
                    ),
                    lambda work=work, original=original: work.copy_(original),
                )
                for placement in PLACEMENTS
            }
            found[name]["naive_extra_bytes"] = extra_bytes(lambda kept=kept, floored=floored: (kept * floored) @ kept.T)
    return found


def exact(size: int) -> dict[str, Any]:
    """What comes out, against the definition of the float32 factor's own eigenbasis."""
    original = factor(spectrum(size, size // 2), basis(size))
    values, vectors = torch.linalg.eigh(original.to(torch.float64))
    values.clamp_min_(0)
    truth = (vectors * values.clamp_min(float(values[-1]) / KAPPA_MAX)) @ vectors.mT
    kept, results = vectors.to(torch.float32), {}
    for placement in PLACEMENTS:
        work = original.clone()
        done = stabilise_(work, values, kept, KAPPA_MAX, placement=placement)
        results[placement] = work
        smallest = check_clipping(work, values, vectors, done.floor).smallest
        assert done.placement == placement
        results[f"{placement}_floor"] = smallest / done.floor
    first = results["device"].to(torch.float64)
    right = torch.randn(size, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = torch.linalg.solve(truth, right)
    through = Eigenbasis(values, vectors).clip(KAPPA_MAX).solve(right.to(torch.float32))
    narrow = right.to(torch.float32)
    dense = torch.cholesky_solve(narrow, torch.linalg.cholesky(results["device"]))
    naive = (kept * values.clamp_min(float(values[-1]) / KAPPA_MAX).to(torch.float32)) @ kept.T
    naive_smallest = float(torch.linalg.eigvalsh(naive.to(torch.float64))[0])
    return {
        "size": size,
        "floor_kept": {placement: results[f"{placement}_floor"] for placement in PLACEMENTS},
        "naive_floor_kept": naive_smallest / (float(values[-1]) / KAPPA_MAX),
        "largest_difference_between_placements": max(
            _distance(results[placement], first) for placement in PLACEMENTS[1:]
        ),
        "error_against_definition": _distance(results["device"], truth),
        "inverse_error_in_eigenbasis": _distance(through, wanted),
        "inverse_error_of_rebuilt_float32": _distance(dense, wanted),
    }


def _distance(found: Tensor, truth: Tensor) -> float:
    return float((found.to(torch.float64) - truth).norm() / truth.norm())


def main() -> None:
    """Measure every size and write the claims."""
    parser = argparse.ArgumentParser(description="Clipped reconstruction against (Q * l) @ Q.T.")
    parser.add_argument("sizes", nargs="*", type=int, default=SIZES)
    sizes = parser.parse_args().sizes
    torch.set_num_threads(1)
    rows = []
    for size in sizes:
        rows.append(timed(size))
        print(rows[-1], flush=True)
    accuracy = exact(EXACT_SIZE)
    claims = [
        results_file.claim(
            f"times faster at n = {sizes[0]} … {sizes[-1]}, half of the eigenvalues clipped (least of all sizes)",
            min(row["half"]["times_faster"] for row in rows),
            3,
            at_most=False,
        ),
        results_file.claim(
            f"times faster at n = {sizes[0]} … {sizes[-1]}, one in twenty clipped (least of all sizes)",
            min(row["twentieth"]["times_faster"] for row in rows),
            10,
            at_most=False,
        ),
        results_file.claim(
            "share of the floor that float32 loses at κ = 1e6, in any placement",
            max(abs(1 - share) for share in accuracy["floor_kept"].values()),
            0.01,
        ),
        results_file.claim(
            "relative difference between placements in float32", accuracy["largest_difference_between_placements"], 1e-6
        ),
        results_file.claim(
            "relative error of an inverse applied in the eigenbasis stored in float32, κ = 1e6",
            accuracy["inverse_error_in_eigenbasis"],
            2e-6,
        ),
    ]
    text = f"MiB allocated beside factor and basis at n = {MEMORY_SIZE}, in any placement"
    largest = next((row for row in rows if row["size"] == MEMORY_SIZE), None)
    if largest is None:
        claims.append(results_file.not_measured(text, 64, f"{MEMORY_SIZE} is not among the sizes"))
    else:
        extra = max(size for share in ("half", "twentieth") for size in largest[share]["extra_bytes"].values())
        claims.append(results_file.claim(text, extra / 2**20, 64))
    results_file.write("reconstruction", claims, {"sizes": rows, "accuracy": accuracy})


if __name__ == "__main__":
    main()
