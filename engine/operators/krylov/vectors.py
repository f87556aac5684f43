"""Vectors of a search: random ones to begin with, and products as they are received."""

import torch
from torch import Tensor

from engine.errors import NonFiniteFactor, WrongShape
from engine.model.counter_rng import normals

_DRAWN = 2**18
"""Random numbers that are drawn at once; each takes some ten float64 and int64 numbers on the way."""


def gaussian(seed: int, draws: range, size: int, device: torch.device) -> Tensor:
    """Draw vectors of independent standard normal numbers, keyed by seed, draw and place.

    Args:
        seed: Of the search.
        draws: Numbers of the vectors.
        size: n.
        device: Where they are wanted.

    Returns:
        Shape (len(draws), n), float64; the same on every device up to rounding.
    """
    made = torch.empty(len(draws), size, dtype=torch.float64, device=device)
    numbers = torch.arange(draws.start, draws.stop, device=device)[:, None]
    rows, width = max(1, _DRAWN // size), min(_DRAWN, size)
    for top in range(0, len(draws), rows):
        for first in range(0, size, width):
            places = torch.arange(first, min(first + width, size), device=device)
            made[top : top + rows, first : first + width] = normals(seed, numbers[top : top + rows], places)
    return made


def received(products: Tensor, vectors: Tensor) -> Tensor:
    """Return products as float64 rows of their own, after a look at their shape and numbers.

    Args:
        products: What the caller hands in, shape (n, b).
        vectors: What it was to multiply, shape (n, b).

    Returns:
        Shape (b, n), float64, contiguous, on the vectors' device.

    Raises:
        WrongShape: If the shapes differ.
        NonFiniteFactor: If a number is NaN or infinite.
    """
    if products.shape != vectors.shape:
        raise WrongShape(
            f"products must have the shape of the vectors, {tuple(vectors.shape)} (got {tuple(products.shape)}); "
            "multiply `vectors` of the same object, all its columns"
        )
    block = products.mT.to(vectors.device, torch.float64, copy=True).contiguous()
    if not bool(torch.isfinite(block).all()):
        raise NonFiniteFactor(
            "a product of the curvature with a vector holds NaN or Inf; take `collection.dtype: float64`, or scale the "
            "model's inputs or loss"
        )
    return block
