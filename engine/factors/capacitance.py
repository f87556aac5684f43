"""The capacitance ``λI + K`` of rows U, ``K = U Uᵀ`` (T, T), inverted: for ``Uᵀ (λI + K)⁻¹ C``.

By Cholesky, with a jitter that is reported where that fails. Where rows nearly depend on each other (those
of `type2` always do), what ``(λI + K)⁻¹ C`` has along their dependencies is 1/λ large, and cancels in the product
with Uᵀ, along with all digits. There it is left out instead: with rows ``S⁻¹Û`` of unit length and the
eigenvectors ``Q, Λ`` of their Gram matrix, but for those that are rounding, ``W = Ûᵀ Q Λ^{-1/2}`` is orthonormal,
``U = M Wᵀ`` with ``M = S⁻¹ Q Λ^{1/2}``, and ``W z`` is sought for the z that makes ``‖M z − C‖² + λ ‖z‖²`` least.

References:
    Golub & Van Loan (2013), Matrix computations, 6.1.4: ridge regression by one triangular factor
    van der Sluis (1969), Condition numbers and equilibration of matrices
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NOISE = 4 * torch.finfo(torch.float64).eps
"""An eigenvalue of a Gram matrix below this, times T, of the largest is rounding."""


@dataclass(frozen=True, kw_only=True)
class Factorised:
    """How a damped Gram matrix was inverted."""

    rung: Literal["cholesky", "cholesky_jittered", "pseudo_inverse", "independent"]
    jitter: float
    """Number added to the diagonal besides the damping."""


def robust_solve(gram: Tensor, right: Tensor, damping: float, eps: float) -> tuple[Tensor, Factorised]:
    """Return ``(damping·I + K)⁻¹ right`` by Cholesky, and what had to be added to the diagonal for it.

    The jitter begins at ``eps`` times the mean diagonal and grows tenfold until it exceeds that mean;
    the pseudo-inverse, which adds none, is the last fallback.

    Args:
        gram: K, shape (T, T), symmetric positive semidefinite, float64.
        right: Right-hand sides, shape (T, k), float64.
        damping: Positive, in the unit of K.
        eps: First jitter, relative to the mean diagonal; 0 goes to the pseudo-inverse at once.

    Returns:
        The solution, shape (T, k), and the way it was computed.

    Memory:
        2 T² numbers.
    """
    shifted = gram.clone()
    shifted.diagonal().add_(damping)
    mean = float(shifted.diagonal().abs().mean()) if gram.numel() else 0.0
    added, wanted = 0.0, eps * mean
    while added <= mean:
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if not bool(failed.any()):
            taken = Factorised(rung="cholesky_jittered" if added else "cholesky", jitter=added)
            return torch.cholesky_solve(right, factor), taken
        if not wanted:
            break
        shifted.diagonal().add_(wanted - added)
        added, wanted = wanted, 10 * wanted
    shifted.diagonal().sub_(added)
    inverse = torch.linalg.pinv(shifted, hermitian=True)
    return inverse @ right, Factorised(rung="pseudo_inverse", jitter=0.0)


def cancellation(gram: Tensor, inner: Tensor) -> float:
    """Return how much larger than ``Uᵀ inner`` its summands are, by their lengths.

    Args:
        gram: ``U Uᵀ``, shape (T, T), float64.
        inner: Coefficients of the rows of U, shape (T, k), float64.

    Returns:
        The ratio of the worst column, 1 or more up to rounding; 0 without columns.
    """
    summed = (gram.diagonal().sqrt()[:, None] * inner).norm(dim=0)
    # of a product that cancels nearly all rounding is left, or less than nothing
    left = (inner * (gram @ inner)).sum(0).clamp_min(0).sqrt()
    return float((summed / left).nan_to_num(nan=0.0).max()) if summed.numel() else 0.0


def independent_solve(gram: Tensor, right: Tensor, damping: float) -> Tensor:
    """Return coefficients z with ``(G + damping·I)⁻¹ V = Uᵀ z``, without a part along the rows' dependencies.

    Args:
        gram: K, shape (T, T), float64; overwritten.
        right: C of ``V = Uᵀ C``, shape (T, k), float64.
        damping: Positive, in the unit of K.

    Returns:
        z, shape (T, k), float64.
    """
    lengths = gram.diagonal().sqrt()
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    values, vectors = torch.linalg.eigh(gram.mul_(inverse[:, None]).mul_(inverse))
    kept = values > NOISE * lengths.numel() * values[-1]
    roots, vectors = values[kept].sqrt(), vectors[:, kept]
    least = math.sqrt(damping) * torch.eye(roots.numel(), dtype=gram.dtype, device=gram.device)
    left, triangle = torch.linalg.qr(torch.cat([lengths[:, None] * vectors * roots, least]))
    projected = left[: lengths.numel()].T @ right
    found = torch.linalg.solve_triangular(triangle, projected, upper=True)
    solution: Tensor = (inverse[:, None] * vectors) @ (found / roots[:, None])
    return solution
