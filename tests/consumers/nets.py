"""The net and the data that files are exported of; torch alone, as the consumers have it."""

import torch
from torch import Tensor, nn

CLASSES = 5
QUERIES, DAMPING = 20, 1e-3
"""Of the influence: the first examples, and λ."""


def net() -> nn.Sequential:
    """A small net of linear layers, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, CLASSES))


def examples() -> tuple[Tensor, Tensor]:
    """Inputs (160, 24) whose columns depend on each other, and labels."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(160, 8, generator=generator) @ torch.randn(8, 24, generator=generator)
    return inputs, torch.randint(CLASSES, (160,), generator=generator)


def hessians() -> dict[str, Tensor]:
    """Sixty Hessians that are singular or nearly so, by name, float32 (24, 24)."""
    made = {}
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(400, 24, generator=generator, dtype=torch.float64)
        rows *= torch.logspace(0, -(seed % 5), 24, dtype=torch.float64)
        dead = rows.clone()
        dead[:, torch.randperm(24, generator=generator)[: 1 + seed % 6]] = 0
        few = rows[: 2 + seed % 20]
        noise = torch.randn(24, 24, generator=generator, dtype=torch.float64)
        indefinite = 2 * few.T @ few / len(few)
        indefinite += 1e-8 * float(indefinite.abs().max()) * (noise + noise.T)
        for kind, hessian in (
            ("dead", 2 * dead.T @ dead / len(dead)),
            ("few", 2 * few.T @ few / len(few)),
            ("indefinite", indefinite),
        ):
            made[f"{kind}.{seed}"] = hessian.to(torch.float32)
    return made
