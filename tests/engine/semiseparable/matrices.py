"""Fourteen matrices on which structures differ: exact, smooth, random, attention maps, K-FAC factors."""

import functools
import importlib.util
import itertools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

SIZE = 512
EXACT = ("exp_4", "exp_64", "inverse_tridiagonal", "two_scales", "inverse_7_band")
"""Those that block SSS represents exactly, with orders 1, 1, 1, 2 and 3."""
KFAC = ("kfac_A", "kfac_G")
NAMES = (
    "random", "exp_4", "exp_64", "gauss", "cauchy", "inverse_distance", "inverse_tridiagonal", "two_scales",
    "inverse_7_band", "attention_iid", "attention_causal_smooth", "alibi_causal", *KFAC,
)  # fmt: skip


class Matrices(dict[str, Tensor]):
    """Matrices by name; the K-FAC factors, which take longer than all others, once one is asked for."""

    def __missing__(self, name: str) -> Tensor:
        if name not in KFAC:
            raise KeyError(name)
        self.update(zip(KFAC, kfac_factors(), strict=True))
        return self[name]


@functools.cache
def matrices(size: int = SIZE) -> Matrices:
    """Return all of them by name, (size, size) in float64; the K-FAC factors always have 512 rows."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    i = torch.arange(size, dtype=torch.float64)
    signed = i[:, None] - i
    d = signed.abs()
    tridiagonal = torch.diag(2.2 + 0.3 * torch.rand(size, generator=generator, dtype=torch.float64))
    for offset in (-1, 1):
        tridiagonal += torch.diag(-1 + 0.1 * normal(size - 1), offset)
    band = 3.5 * torch.eye(size, dtype=torch.float64)
    for offset in (1, 2, 3):
        entries = 0.3 * normal(size - offset)
        band += torch.diag(entries, offset) + torch.diag(entries, -offset)
    q, k = normal(size, 32), normal(size, 32)
    smooth = [normal(size + 63, 16).unfold(0, 64, 1).sum(-1) for _ in range(2)]
    future = torch.full((size, size), -torch.inf, dtype=torch.float64).triu(1)
    return Matrices({
        "random": normal(size, size),
        "exp_4": torch.exp(-d / 4),
        "exp_64": torch.exp(-d / 64),
        "gauss": torch.exp(-0.5 * (d / (size / 10)) ** 2),
        "cauchy": torch.where(d > 0, 1 / signed, 0.0),
        "inverse_distance": 1 / (1 + d),
        "inverse_tridiagonal": torch.linalg.inv(tridiagonal),
        "two_scales": torch.exp(-d / 4) + 0.5 * torch.exp(-d / 256),
        "inverse_7_band": torch.linalg.inv(band),
        "attention_iid": torch.softmax(q @ k.T / 32**0.5, 1),
        "attention_causal_smooth": torch.softmax(smooth[0] @ smooth[1].T / 4 + future, 1),
        "alibi_causal": torch.softmax(q @ k.T / 32**0.5 - d / 16 + future, 1),
    })  # fmt: skip


def kfac_factors() -> tuple[Tensor, Tensor]:
    """A without bias, and the exact Gauss-Newton G, of the middle layer of a net after 60 steps on digits."""
    # scikit-learn's own file: an import would set a variable of every program that starts after it
    place = importlib.util.find_spec("sklearn")
    assert place is not None
    assert place.origin is not None
    table = np.loadtxt(Path(place.origin).parent / "datasets/data/digits.csv.gz", delimiter=",", max_rows=600)
    inputs = torch.tensor(table[:, :-1] / 16)
    labels = torch.tensor(table[:, -1]).long()
    generator = torch.Generator().manual_seed(0)
    widths = (64, 512, 512, 10)
    weights = [
        nn.Parameter(torch.randn(b, a, generator=generator, dtype=torch.float64) / a**0.5)
        for a, b in itertools.pairwise(widths)
    ]
    optimiser = torch.optim.SGD(weights, lr=0.1)

    def layers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.relu(x @ weights[0].T)
        second = first @ weights[1].T
        return first, second, torch.relu(second) @ weights[2].T

    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(layers(inputs)[2], labels).backward()
        optimiser.step()
    with torch.no_grad():
        first, second, logits = layers(inputs)
        p = torch.softmax(logits, 1)
        active = (second > 0).to(torch.float64)
        # J = diag(active) W₃ᵀ of each example, and the Hessian of the loss diag(p) − p pᵀ
        root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
        rows = torch.einsum("nkc,kh,nh->nch", root, weights[2], active).flatten(0, 1)
        return first.T @ first / len(inputs), rows.T @ rows / len(inputs)
