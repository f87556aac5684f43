"""Train a network with natural gradients: K-FAC over one process, or over several that share each batch.

    python examples/natural_gradient_training.py --steps 1000
    torchrun --nproc-per-node 2 examples/natural_gradient_training.py --steps 1000

Each rank takes its part of every batch. Gradients are summed by `torch.distributed`; the factors are summed by
`measure`, which joins the process group that it finds. So every rank holds the same curvature, and the same weights.

References:
    Martens & Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature
"""

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

from kronoscope.local import Operator, measure, operator


@dataclass(frozen=True)
class Ranks:
    """The processes of this training, and which of them this one is."""

    count: int
    own: int

    def summed(self, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add up the parts of the gradient, in place."""
        if self.count > 1:
            for each in gradient.values():
                dist.all_reduce(each)
        return gradient


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits, with K-FAC or with plain gradients.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=256, help="examples of a step, of all ranks together")
    parser.add_argument("--optimiser", choices=("kfac", "sgd"), default="kfac")
    parser.add_argument("--rate", type=float, help="learning rate; 0.3 for kfac, 1.0 for sgd")
    parser.add_argument("--momentum", type=float, help="0 for kfac, 0.9 for sgd")
    parser.add_argument("--refresh", type=int, default=10, help="steps between two measurements of the curvature")
    parser.add_argument("--decay", type=float, default=0.9, help="weight of the curvature that was known before")
    parser.add_argument("--damping", choices=("exact", "factored"), default="exact")
    parser.add_argument("--strength", type=float, default=1e-3, help="the damping, in absolute numbers")
    parser.add_argument("--most", type=float, default=1e-2, help="most of rate² · gᵀF⁻¹g that a step may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="file for the weights of the first rank")
    chosen = parser.parse_args()
    plain = chosen.optimiser == "sgd"
    chosen.rate = chosen.rate if chosen.rate is not None else (1.0 if plain else 0.3)
    chosen.momentum = chosen.momentum if chosen.momentum is not None else (0.9 if plain else 0.0)
    return chosen


def measured(model: nn.Module, inputs: Tensor, targets: Tensor, chosen: argparse.Namespace) -> Operator:
    """Measure the Gauss-Newton matrix on the parts of the batch that all ranks hold."""
    found = measure(
        model,
        [(inputs, targets)],
        task="classification",
        kinds=("factors",),
        collection={"fisher": "type2", "dtype": "float64", "self_check": "off"},
    )
    root = chosen.strength**0.5
    stabilisation = {"damping": chosen.strength, "damping_mode": "absolute", "damping_A": root, "damping_G": root}
    return operator(found, damping=chosen.damping, stabilisation=stabilisation)


def scaled(gradient: dict[str, Tensor], direction: dict[str, Tensor], chosen: argparse.Namespace) -> float:
    """Return the factor that keeps a step within the part of the model where its curvature holds."""
    gain = sum(float((gradient[name] * direction[name]).sum()) for name in gradient)
    return min(1.0, (chosen.most / max(chosen.rate**2 * gain, 1e-300)) ** 0.5)


def train(model: nn.Module, images: Tensor, labels: Tensor, chosen: argparse.Namespace, ranks: Ranks) -> None:
    """Take all steps; every rank sees the same batches, takes its part of each, and ends with the same weights."""
    velocity = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    curvature: Operator | None = None
    for step in range(chosen.steps):
        generator = torch.Generator().manual_seed(1_000_003 * chosen.seed + step)
        batch = torch.randperm(len(images), generator=generator)[: chosen.batch]
        mine = batch[ranks.own :: ranks.count]
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine], reduction="sum") / len(batch)
        loss.backward()
        gradient = ranks.summed({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
        direction, scale = gradient, 1.0
        if chosen.optimiser == "kfac":
            if curvature is None or step % chosen.refresh == 0:
                fresh = measured(model, images[mine], labels[mine], chosen)
                curvature = fresh if curvature is None else curvature.merged(fresh, chosen.decay)
            direction = curvature.solve(gradient)
            scale = scaled(gradient, direction, chosen)
        with torch.no_grad():
            for name, each in model.named_parameters():
                velocity[name].mul_(chosen.momentum).add_(direction[name], alpha=scale)
                each.sub_(velocity[name], alpha=chosen.rate)


def main() -> None:
    """Train, and say how far the loss has come."""
    chosen = options()
    torch.set_num_threads(1)
    ranks = Ranks(count=int(os.environ.get("WORLD_SIZE", "1")), own=int(os.environ.get("RANK", "0")))
    if ranks.count > 1:
        dist.init_process_group("gloo")
    digits = load_digits()
    images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
    torch.manual_seed(chosen.seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    train(model, images, labels, chosen, ranks)
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(images), labels))
    if ranks.own == 0:
        print(f"{chosen.optimiser}, {ranks.count} rank(s), {chosen.steps} steps: loss {loss:.3e}")
        if chosen.save:
            torch.save(torch.cat([each.detach().reshape(-1) for each in model.parameters()]), chosen.save)
    if ranks.count > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
