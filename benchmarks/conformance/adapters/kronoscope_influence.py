"""Kronoscope's influence: EK-FAC scores of a whole job in one process."""

import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cases.influence import BATCH, DAMPING, QUERIES, case
from kronoscope.local import measure


def influence(name: str, folder: Path) -> tuple[Tensor, float]:
    """Scores (Q, N), and the seconds that they took."""
    model, _, data, asked = case(name, folder)
    begun = time.perf_counter()
    made = measure(
        model, data, query=asked, task="classification", kinds="influence",
        collection={"fisher": "empirical", "ekfac": True, "batch_size": BATCH[name]},
        stabilisation={"damping": DAMPING, "damping_mode": "absolute"},
        params={"influence": {"of": "ekfac", "block": QUERIES}}, report=lambda *_: None,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    return -torch.cat([made.artifacts.load_tensors(each)["scores"]
                       for each in made.summary["influence"].artifacts]), seconds  # fmt: skip
