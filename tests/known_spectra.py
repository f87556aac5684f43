"""Symmetric matrices of known spectra, for the tests of what knows a matrix by its products."""

import torch
from torch import Tensor

NAMES = ("power law", "clusters", "threefold multiples", "indefinite", "low rank", "bulk with outliers")


def spectrum(name: str, size: int) -> Tensor:
    """Eigenvalues, ascending, float64; ``size`` is a multiple of 30."""
    numbers = torch.Generator().manual_seed(5)
    places = torch.arange(1, size + 1, dtype=torch.float64)
    if name == "power law":
        values = places**-1.5
    elif name == "clusters":
        around = torch.tensor([0.1, 1.0, 2.0, 5.0, 9.0], dtype=torch.float64).repeat_interleave(size // 5)
        values = around + 1e-4 * torch.randn(size, generator=numbers, dtype=torch.float64)
    elif name == "threefold multiples":
        values = torch.linspace(-1.5, 1.5, size // 3, dtype=torch.float64).pow(3).repeat_interleave(3)
    elif name == "indefinite":
        half = places[: size // 2]
        values = torch.cat([half**-1.2, -0.6 * half**-0.9])
    elif name == "low rank":
        values = torch.cat([torch.linspace(1, 4, 25, dtype=torch.float64), torch.zeros(size - 25, dtype=torch.float64)])
    else:
        wide = torch.randn(size, 2 * size, generator=numbers, dtype=torch.float64)
        outside = torch.tensor([8.0, 8.0, 8.0, 12.0, 15.0, 30.0], dtype=torch.float64)
        values = torch.cat([torch.linalg.eigvalsh(wide @ wide.T / (2 * size))[: size - 6], outside])
    return values.sort().values


def matrix(values: Tensor, seed: int = 1) -> Tensor:
    """The matrix (n, n) of these eigenvalues in a random orthogonal basis."""
    numbers = torch.Generator().manual_seed(seed)
    square = torch.randn(len(values), len(values), generator=numbers, dtype=torch.float64)
    basis = torch.linalg.qr(square).Q
    full = (basis * values) @ basis.T
    return (full + full.T) / 2
