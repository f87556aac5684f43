"""Basis vectors as rows in the vectors' precision; their coefficients are computed in float64.

A block W of new vectors is made orthogonal to the rows Q by ``C = Q Wᵀ`` and ``W ← W − Cᵀ Q``, twice: the second time
removes what rounding left of the first. Rows stand first, so that a vector is contiguous and a product with all rows
is one GEMM; columns are visited in panels, which bounds what is widened to float64 at once.

References:
    Giraud, Langou, Rozložník & van den Eshof (2005), Rounding error analysis of the classical Gram-Schmidt process
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.errors import NonFiniteFactor, WrongShape
from engine.linalg.panels import PANEL_NUMBERS
from engine.model.counter_rng import normals

PANEL_BYTES = 8 * PANEL_NUMBERS
"""Bytes of basis rows that are widened at once."""
_DRAWN = 2**18
"""Random numbers that are drawn at once; each takes some ten float64 and int64 numbers on the way."""


def panels(rows: Tensor) -> Iterator[slice]:
    """Yield slices of columns whose widened panels hold at most ``PANEL_NUMBERS`` numbers.

    Args:
        rows: Shape (…, m, n).

    Yields:
        Slices of the last dimension.
    """
    size = rows.shape[-1]
    width = max(1, PANEL_NUMBERS // max(math.prod(rows.shape[:-1]), 1))
    for first in range(0, size, width):
        yield slice(first, min(first + width, size))


def along(rows: Tensor, block: Tensor) -> Tensor:
    """Return the coefficients ``C = Q Wᵀ``.

    Args:
        rows: Q, shape (…, m, n), float32 or float64.
        block: W, shape (…, b, n), any of both, on Q's device.

    Returns:
        Shape (…, m, b), float64, on the same device.
    """
    made = torch.zeros(*rows.shape[:-1], block.shape[-2], dtype=torch.float64, device=rows.device)
    for panel in panels(rows):
        made += rows[..., panel].to(torch.float64) @ block[..., panel].to(torch.float64).mT
    return made


def orthogonalise(rows: Tensor, block: Tensor) -> Tensor:
    """Remove from W what it has along Q, twice, in place.

    Args:
        rows: Q, shape (…, m, n), orthonormal, float32 or float64.
        block: W, shape (…, b, n), float64, overwritten.

    Returns:
        The coefficients removed, shape (…, m, b), float64.
    """
    total = torch.zeros(*rows.shape[:-1], block.shape[-2], dtype=torch.float64, device=rows.device)
    if rows.shape[-2] == 0:
        return total
    for _ in range(2):
        coefficients = along(rows, block)
        for panel in panels(rows):
            block[..., panel] -= coefficients.mT @ rows[..., panel].to(torch.float64)
        total += coefficients
    return total


def rotate(rows: Tensor, rotation: Tensor) -> None:
    """Put ``Sᵀ Q`` in place of the first rows of Q.

    Args:
        rows: Q, shape (m, n).
        rotation: S, shape (m, k), float64, with k ≤ m.
    """
    turned = rotation.mT.to(rows.device)
    for panel in panels(rows):
        rows[: rotation.shape[1], panel] = (turned @ rows[:, panel].to(torch.float64)).to(rows.dtype)


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
