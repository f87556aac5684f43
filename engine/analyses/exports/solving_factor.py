"""The factor that GPTQ solves with: U upper triangular with UᵀU = (H + λ I)⁻¹, and the smallest λ that it takes.

``H + λ I = R Rᵀ`` with R upper triangular is the Cholesky factorisation from the last row to the first, so that
``U = R⁻¹`` is had without the inverse itself, and its error grows with the condition number once.

References:
    Frantar, Ashkboos, Hoefler & Alistarh (2023), GPTQ, section 3: the Cholesky form
    Higham (2002), Accuracy and stability of numerical algorithms, 10.1
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SOLVING_BYTES = 48
"""Bytes for each number of a Hessian while its factor is made: six matrices in float64."""


@dataclass(frozen=True, kw_only=True)
class SolvingFactor:
    """The factor of one Hessian."""

    upper: Tensor
    """U (n, n), float64, upper triangular."""
    damping: float
    """λ, 0 where H's own condition number is small enough."""
    condition: float | None
    """Condition number of H; None where H is singular, or has a negative eigenvalue by rounding."""


def solving_factor(hessian: Tensor, kappa_max: float) -> SolvingFactor | None:
    """Return the Cholesky factor of the inverse of a Hessian with the least damping that bounds its condition number.

    ``λ = max(0, (λ_max − κ λ_min) / (κ − 1))`` is the smallest with ``(λ_max + λ) / (λ_min + λ) ≤ κ``. Where float64
    does not resolve so large a κ, it is doubled until the factorisation succeeds.

    Args:
        hessian: H (n, n), symmetric, of any float dtype; its eigenvalues may be negative by rounding.
        kappa_max: κ above 1, the largest condition number.

    Returns:
        The factor in float64; None where H has no positive eigenvalue, so that no λ is the smallest.

    Raises:
        ValueError: If κ is not above 1.

    Memory:
        ``SOLVING_BYTES`` for each number of H.
    """
    if not kappa_max > 1:
        raise ValueError(f"a condition number is above 1 (got {kappa_max})")
    matrix = hessian.to(torch.float64)
    values = torch.linalg.eigvalsh(matrix)
    least, largest = float(values[0]), float(values[-1])
    if not largest > 0:
        return None
    damping = max(0.0, (largest - kappa_max * least) / (kappa_max - 1))
    # the factorisation from the last row to the first: that of the matrix turned by half a circle, turned back
    turned = matrix.flip(0, 1)
    del matrix
    upper, failed = torch.linalg.cholesky_ex(_damped(turned, damping))
    while int(failed):
        # a condition number beyond what float64 resolves
        damping = max(2 * damping, len(turned) * torch.finfo(torch.float64).eps * largest)
        upper, failed = torch.linalg.cholesky_ex(_damped(turned, damping))
    del turned
    upper = upper.flip(0, 1)
    identity = torch.eye(upper.shape[0], dtype=torch.float64, device=upper.device)
    return SolvingFactor(
        upper=torch.linalg.solve_triangular(upper, identity, upper=True),
        damping=damping,
        condition=largest / least if least > torch.finfo(torch.float64).eps * largest else None,
    )


def _damped(matrix: Tensor, damping: float) -> Tensor:
    damped = matrix.clone()
    damped.diagonal().add_(damping)
    return damped
