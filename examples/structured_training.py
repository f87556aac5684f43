"""Train a layer that is held in O(N r) numbers beside a dense one, on scikit-learn's digits.

    python examples/structured_training.py [--epochs 30]

Both networks are 64-256-256-10; in one of them the weight of the middle layer is T + U Vᵀ, in another block SSS.
"""

import argparse
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from engine.semiseparable.layer import StructuredLinear

WIDTH = 256


def network(middle: nn.Module) -> nn.Module:
    """Return the network around a middle layer."""
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), middle, nn.ReLU(), nn.Linear(WIDTH, 10))


def trained_accuracy(model: nn.Module, epochs: int) -> float:
    """Train by Adam, and return the share of held-out digits that are recognised."""
    digits = load_digits()
    split = train_test_split(digits.data / 16, digits.target, test_size=0.25, random_state=0)
    inputs, held_out = (torch.tensor(each, dtype=torch.float32) for each in split[:2])
    labels, held_labels = (torch.tensor(each) for each in split[2:])
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for batch in torch.randperm(len(inputs), generator=generator).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimiser.step()
    with torch.no_grad():
        return float((model(held_out).argmax(1) == held_labels).float().mean())


def main() -> None:
    """Train all three, and print parameters, bytes and accuracy of each."""
    parser = argparse.ArgumentParser(description="Train a structured layer beside a dense one.")
    parser.add_argument("--epochs", type=int, default=30)
    epochs = parser.parse_args().epochs
    layers: dict[str, Callable[[], nn.Module]] = {
        "dense": lambda: nn.Linear(WIDTH, WIDTH),
        "T + U Vᵀ, rank 8": lambda: StructuredLinear(WIDTH, rank=8),
        "block SSS, order 4": lambda: StructuredLinear(WIDTH, structure="block_sss", rank=4, block=16),
    }
    print(f"{'middle layer':<20} {'its parameters':>15} {'its bytes':>12} {'accuracy':>9}")
    for name, make in layers.items():
        torch.manual_seed(0)
        middle = make()
        accuracy = trained_accuracy(network(middle), epochs)
        count = sum(parameter.numel() for parameter in middle.parameters())
        print(f"{name:<20} {count:>15,} {4 * count:>12,} {accuracy:>9.1%}")


if __name__ == "__main__":
    main()
