"""The largest eigenvalue of a symmetric positive semidefinite operator, from products with it alone.

Lanczos' iteration with every vector kept orthogonal to all before it. Some eigenvalue lies within
the residual ``‖S v − θ v‖ = β |last entry of v's coefficients|`` of the largest Ritz value θ.

References:
    Parlett (1998), The symmetric eigenvalue problem, chapter 13
"""

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
    norm = float(start.norm())
    if norm == 0:
        return 0.0, 0.0
    basis, along, beside = [start / norm], [], []
    theta = residual = 0.0
    last = min(_STEPS, start.numel())
    for step in range(1, last + 1):
        vector = apply(basis[-1][:, None])[:, 0]
        along.append(vector @ basis[-1])
        for _ in range(2):
            for known in basis:
                vector = vector - known * (known @ vector)
        beside.append(vector.norm())
        if step % _EVERY == 0 or step == last:
            theta, residual = _ritz(along, beside)
            if residual <= _RESIDUAL * theta:
                break
        basis.append(vector / beside[-1].clamp_min(torch.finfo(vector.dtype).tiny))
    return theta, residual


def _ritz(along: list[Tensor], beside: list[Tensor]) -> tuple[float, float]:
    diagonal, off = torch.stack(along).cpu(), torch.stack(beside).cpu()
    small = torch.diag(diagonal) + torch.diag(off[:-1], 1) + torch.diag(off[:-1], -1)
    values, vectors = torch.linalg.eigh(small)
    return float(values[-1]), float(off[-1] * vectors[-1, -1].abs())
