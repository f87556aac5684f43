"""The largest eigenvalues of a symmetric positive semidefinite operator, from products with it alone.

Lanczos' iteration with every vector kept orthogonal to all before it. Some eigenvalue lies within
the residual ``‖S v − θ v‖ = β |last entry of v's coefficients|`` of the largest Ritz value θ, and as many
eigenvalues as there are Ritz values within the root of the sum of their squared residuals.

References:
    Parlett (1998), The symmetric eigenvalue problem, chapters 11 and 13
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_STEPS = 400
"""Most steps."""
_EVERY = 5
"""Steps between two looks at the Ritz values, each of which waits for the device."""
_RESIDUAL = 1e-10
"""Of the largest eigenvalue, relative, at which the iteration ends: the error is its square over the gap."""


def largest_eigenvalue(apply: Callable[[Tensor], Tensor], start: Tensor) -> tuple[float, float]:
    """θ and its residual, for ``apply`` (n, 1) -> (n, 1) and a vector ``start`` (n,) float64.

    Memory:
        The vectors so far: steps · n numbers, some 30 steps where the largest value stands apart.
    """
    (theta,), residual = _ritz_values(apply, start, 1, _STEPS)
    return theta, residual


def largest_eigenvalues(
    apply: Callable[[Tensor], Tensor], start: Tensor, count: int, steps: int
) -> tuple[list[float], float]:
    """At most ``count`` Ritz values, descending, at least one, and the root of the sum of their squared residuals.

    Those that have not settled are left out. An eigenvalue that is there several times is found once.

    Memory:
        steps · n numbers at most.
    """
    return _ritz_values(apply, start, count, steps)


def _ritz_values(apply: Callable[[Tensor], Tensor], start: Tensor, count: int, steps: int) -> tuple[list[float], float]:
    norm = float(start.norm())
    if norm == 0:
        return [0.0], 0.0
    basis, along, beside = [start / norm], [], []
    values = residuals = torch.zeros(1, dtype=torch.float64)
    last = min(steps, start.numel())
    for step in range(1, last + 1):
        vector = apply(basis[-1][:, None])[:, 0]
        along.append(vector @ basis[-1])
        for _ in range(2):
            for known in basis:
                vector = vector - known * (known @ vector)
        beside.append(vector.norm())
        if step % _EVERY == 0 or step == last:
            values, residuals = _ritz(along, beside, count)
            if bool((residuals <= _RESIDUAL * values[0]).all()) and (values.numel() == count or step == last):
                break
        basis.append(vector / beside[-1].clamp_min(torch.finfo(vector.dtype).tiny))
    settled = int((residuals <= _RESIDUAL * values[0]).to(torch.int64).cumprod(0).sum())
    kept = slice(max(settled, 1))
    return values[kept].tolist(), math.sqrt(float(residuals[kept].square().sum()))


def _ritz(along: list[Tensor], beside: list[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The largest ``count`` Ritz values, descending, and their residuals."""
    diagonal, off = torch.stack(along).cpu(), torch.stack(beside).cpu()
    small = torch.diag(diagonal) + torch.diag(off[:-1], 1) + torch.diag(off[:-1], -1)
    values, vectors = torch.linalg.eigh(small)
    return values.flip(0)[:count], (off[-1] * vectors[-1].abs()).flip(0)[:count]
