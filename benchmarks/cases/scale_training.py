"""Training with natural gradients over 1, 2 and 4 ranks: weights, final losses, and those of plain gradients.

Each run is ``examples/natural_gradient_training.py`` as its own command, a process of one thread on each rank.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import results_file

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = "examples/natural_gradient_training.py"
STEPS, EARLY = 1000, 50
SEEDS, RANKS = (0, 1, 2), (1, 2, 4)
MOST_APART = 1e-8


def measure() -> dict[str, Any]:
    """Train by every number of ranks, over the seeds with one, and with plain gradients."""
    losses = {str(ranks): _loss(ranks, "--steps", str(STEPS)) for ranks in RANKS}
    seeds = {str(seed): _loss(1, "--steps", str(STEPS), "--seed", str(seed)) for seed in SEEDS}
    plain = {str(seed): _loss(1, "--steps", str(STEPS), "--seed", str(seed), "--optimiser", "sgd") for seed in SEEDS}
    with tempfile.TemporaryDirectory() as folder:
        weights = []
        for ranks in RANKS:
            file = Path(folder) / f"{ranks}.pt"
            _loss(ranks, "--steps", str(EARLY), "--save", str(file))
            weights.append(torch.load(file))
    return {
        "steps": STEPS,
        "loss_by_ranks": losses,
        "loss_by_seed": seeds,
        "loss_by_seed_of_sgd": plain,
        f"weights_after_{EARLY}_steps_apart": {
            str(ranks): float((own - weights[0]).abs().max()) for ranks, own in zip(RANKS, weights, strict=True)
        },
    }


def claims(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The targets of the training."""
    apart, seeds = found[f"weights_after_{EARLY}_steps_apart"], found["loss_by_seed"].values()
    spread = max(seeds) - min(seeds)
    for ranks in map(str, RANKS[1:]):
        text = f"training: weights of {ranks} ranks after {EARLY} steps, largest distance to those of one"
        yield results_file.claim(text, apart[ranks], MOST_APART)
        text = f"training: final loss of {ranks} ranks, distance to that of one; at most the spread over seeds"
        yield results_file.claim(text, abs(found["loss_by_ranks"][ranks] - found["loss_by_ranks"]["1"]), spread)
    worst, best = max(found["loss_by_ranks"].values()), min(found["loss_by_seed_of_sgd"].values())
    yield results_file.claim(f"training: final loss over SGD's after {STEPS} steps", worst / best, 1.0)


def _loss(ranks: int, *options: str) -> float:
    """Train, and return the final loss that the script prints."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    found = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-P", *launcher, EXAMPLE, *options],
        check=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    loss = re.search(r"loss ([0-9.e+-]+)", found.stdout)
    if loss is None:
        raise RuntimeError(f"the training has printed no loss: {found.stdout}")
    return float(loss[1])
