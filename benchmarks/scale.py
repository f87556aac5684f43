"""Scale: jobs divided over workers and over ranks against their formulas, on this machine and by simulation.

    shards       1, 2 and 4 processes of one thread collect MiniLM's factors, which are merged: speed-up, merge, bytes
    simulation   a Llama-3-8B over up to 4096 workers, from what the pieces took
    ranks        bytes that 2 and 4 ranks move and hold for `gram`, `gather` and `dense`
    training     K-FAC over 1, 2 and 4 ranks: weights and final losses

A run of some parts keeps the figures of the others as they were stored, each with its own date and commit. On a machine
that others use at the same time, CPU seconds are to be looked at, and ``shards`` to be run again.

    python -P -m benchmarks.scale [--parts shards ranks …] [--batches 20] [--rounds 2] [--output NAME]
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import torch

from benchmarks import results_file
from benchmarks.cases import scale_ranks, scale_shards, scale_simulation, scale_training

CLAIMS: dict[str, Callable[[dict[str, Any]], Iterator[dict[str, Any]]]] = {
    "shards": scale_shards.claims,
    "simulation": scale_simulation.claims,
    "ranks": scale_ranks.claims,
    "training": scale_training.claims,
}


def stored(name: str) -> dict[str, Any]:
    """Figures of an earlier run by part."""
    file = results_file.RESULTS / f"{name}.json"
    return dict(json.loads(file.read_text())["figures"]) if file.exists() else {}


def main() -> None:
    """Measure the parts that are asked for, and write them with the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=CLAIMS, default=list(CLAIMS))
    parser.add_argument("--batches", type=int, default=20, help="batches of 32 that the shards divide")
    parser.add_argument("--rounds", type=int, default=2, help="times that every number of shards is measured")
    parser.add_argument("--output", default="scale", help="name of the result")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    figures = stored(chosen.output)
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "shards": lambda: scale_shards.measure(chosen.batches, chosen.rounds),
        "simulation": lambda: scale_simulation.measure(figures["shards"]),
        "ranks": scale_ranks.measure,
        "training": scale_training.measure,
    }
    if "simulation" in chosen.parts and not {"shards"} & ({*chosen.parts} | set(figures)):
        parser.error("`simulation` follows from what `shards` measures; ask for both")
    for part, measure in measures.items():
        if part in chosen.parts:
            begun = time.perf_counter()
            figures[part] = measure()
            seconds = time.perf_counter() - begun
            now = datetime.now(UTC).isoformat(timespec="seconds")
            figures[part] |= {"measured_at": now, "commit": results_file.commit(), "seconds": seconds}
            print(f"{part}: measured in {seconds:.0f} s", flush=True)
    found = [each for part, claims in CLAIMS.items() if part in figures for each in claims(figures[part])]
    results_file.write(chosen.output, found, figures)


if __name__ == "__main__":
    main()
