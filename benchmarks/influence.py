"""Influence against kronfluence: seconds of a whole job, agreement of the scores, and what retraining says.

    python -P -m benchmarks.influence [--parts digits minilm retraining] [--rounds 3]

EK-FAC influence with the empirical Fisher of 64 queries on 2,000 digits (of the 1,797 there are, some twice) and on 128
paragraphs of 64 tokens through MiniLM, factors included: the same layers, loss and damping,
one thread, each in a process of its own.

The linear datamodeling score asks a net of 64-16-10 units, trained on 1,000 digits: over 100 random halves it is
trained anew to convergence from the same weights, and the ranks of a query's loss are held against those of the sum of
its scores over the half, for the exact Gauss-Newton matrix, EK-FAC and the cosine of gradients.

References:
    Park et al. (2023), TRAK: attributing model behavior at scale
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr, t
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import results_file
from benchmarks.cases.influence import QUERIES, perceptron
from benchmarks.collection import PEERS_PYTHON, ROOT
from kronoscope.local import measure

OVER_PEER = 0.8
OURS, PEER = "kronoscope", "kronfluence"


def write_digits(folder: Path) -> None:
    """Train it, for both sides: the peer's environment has no digits."""
    torch.manual_seed(0)
    images, labels = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    images, labels, model = images.float() / 16, labels.long(), perceptron()
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(100):
        optimiser.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimiser.step()
    torch.save({"state": model.state_dict(), "images": images, "labels": labels}, folder / "digits.pt")


def run_side(library: str, name: str, folder: Path) -> tuple[Tensor, float]:
    """Run one library in a process of its own, on one thread."""
    python = str(PEERS_PYTHON) if library == PEER else sys.executable
    output = folder / f"{library}.pt"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [python, "-P", "-m", "benchmarks.cases.influence", library, name, str(output)]
    subprocess.run(command, check=True, env=environment, cwd=ROOT)  # noqa: S603 - our own module
    found = torch.load(output)
    return found["scores"], found["seconds"]


def compared(name: str, rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Both libraries in turns."""
    seconds: dict[str, list[float]] = {OURS: [], PEER: []}
    found: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_digits(Path(folder))
        for _ in range(rounds):
            for library in (PEER, OURS):
                found[library], took = run_side(library, name, Path(folder))
                seconds[library].append(took)
                print(f"{name}: {library} {took:.2f} s", flush=True)
    ratio = statistics.median(seconds[OURS]) / statistics.median(seconds[PEER])
    differs = float((found[OURS].double() - found[PEER].double()).abs().max() / found[PEER].double().abs().max())
    claims = [
        results_file.claim(f"{name}: whole seconds of {QUERIES} queries' EK-FAC influence over kronfluence's", ratio,
                           OVER_PEER),
    ]  # fmt: skip
    return claims, {"seconds": seconds, "examples": found[OURS].shape[1], "difference_of_the_largest": differs}


SUBSETS, TRAINING, ASKED, DECAY = 100, 1000, 60, 1e-3


def retraining() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The linear datamodeling score of three curvatures."""
    torch.set_default_dtype(torch.float64)
    images, labels = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = (images / 16)[order].double(), labels[order].long()
    train, query = slice(0, TRAINING), slice(TRAINING, TRAINING + ASKED)

    def net() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))

    def fitted(which: Tensor) -> nn.Sequential:
        model = net()
        optimiser = torch.optim.LBFGS(model.parameters(), max_iter=2000, history_size=50, tolerance_grad=1e-7,
                                      tolerance_change=1e-14, line_search_fn="strong_wolfe")  # fmt: skip

        def closure() -> Tensor:
            optimiser.zero_grad()
            squares = sum(each.square().sum() for each in model.parameters())
            loss = functional.cross_entropy(model(images[which]), labels[which]) + DECAY / 2 * squares
            loss.backward()
            return loss

        optimiser.step(closure)
        return model

    whole = fitted(torch.arange(TRAINING))
    generator = torch.Generator().manual_seed(2)
    halves = torch.stack([torch.randperm(TRAINING, generator=generator)[: TRAINING // 2] for _ in range(SUBSETS)])
    with torch.no_grad():
        losses = torch.stack([
            functional.cross_entropy(fitted(half)(images[query]), labels[query], reduction="none") for half in halves
        ])  # fmt: skip
    found: dict[str, Tensor] = {}
    for of in ("ggn", "ekfac"):
        made = measure(
            whole, (images[train], labels[train]), query=(images[query], labels[query]), task="classification",
            kinds="influence", collection={"fisher": "type2", "dtype": "float64", "ekfac": of == "ekfac",
                                           "batch_size": 250},
            stabilisation={"damping": DECAY, "damping_mode": "absolute"},
            params={"influence": {"of": of, "block": ASKED, "tolerance": 1e-6, "iterations": 500}},
            report=lambda *_: None,
        )  # fmt: skip
        found[of] = made.artifacts.load_tensors(made.summary["influence"].artifacts[0])["scores"]
    rows = []
    for place in range(TRAINING + ASKED):
        whole.zero_grad()
        functional.cross_entropy(whole(images[place : place + 1]), labels[place : place + 1]).backward()
        rows.append(torch.cat([each.grad.flatten() for each in whole.parameters() if each.grad is not None]))
    rows = [row / row.norm() for row in rows]
    found["cosine"] = -torch.stack(rows[TRAINING:]) @ torch.stack(rows[:TRAINING]).T
    ranks = {
        of: [float(spearmanr(scores[place][halves].sum(1), losses[:, place]).statistic) for place in range(ASKED)]
        for of, scores in found.items()
    }
    claims, figures = [], {"ranks": ranks, "means": {of: statistics.mean(own) for of, own in ranks.items()}}
    for better, worse in (("ggn", "ekfac"), ("ekfac", "cosine")):
        difference = [a - b for a, b in zip(ranks[better], ranks[worse], strict=True)]
        half = float(t.ppf(0.975, ASKED - 1)) * statistics.stdev(difference) / ASKED**0.5
        figures[f"{better} − {worse}"] = [statistics.mean(difference) - half, statistics.mean(difference) + half]
        text = f"linear datamodeling score, {better} above {worse}: the lower end of the 95 % interval"
        claims.append(results_file.claim(text, statistics.mean(difference) - half, 0.0, at_most=False))
    return claims, figures


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", default=["digits", "minilm", "retraining"])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    claims, figures = results_file.read("influence")
    claims = [each for each in claims if not any(part in each["claim"] for part in given.parts)]
    for part in given.parts:
        own, figures[part] = retraining() if part == "retraining" else compared(part, given.rounds)
        claims += own
        results_file.store("influence", claims, figures)
        results_file.show(own)
        print(json.dumps({key: value for key, value in figures[part].items() if key != "ranks"}), flush=True)


if __name__ == "__main__":
    main()
