"""Preconditioning: a layer's gradient times the damped inverse of its Kronecker factors.

For a gradient V (out, in) it is ``(G + λ_G I)⁻¹ V (A + λ_A I)⁻¹``, in float64. A gradient of the very rows that
G is kept as, ``V = Uᵀ C / √w``, is given as C (T, in) and pushed through them, ``Uᵀ (λ_G I + U Uᵀ / w)⁻¹ C / √w``,
which keeps the digits that V has lost by cancellation where λ_G is small.

References:
    Martens & Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature, section 6.3
"""

import torch
from torch import Tensor

from engine.errors import WrongShape
from engine.factors.kronecker_factors import Factors
from engine.factors.low_rank import LowRank


def precondition(
    factors: Factors, gradient: Tensor, damping_A: float, damping_G: float, *, of_rows: bool = False
) -> Tensor:
    """Return ``(G + damping_G I)⁻¹ V (A + damping_A I)⁻¹``.

    Args:
        factors: Of the layer.
        gradient: V, shape (out_dim, in_dim), the bias as its last column where the layer has one; or C, shape
            (T, in_dim), with ``of_rows``.
        damping_A: Positive, in absolute numbers, as `lambda_A` of the layer's record; 0 where A = 1.
        damping_G: Positive, in absolute numbers, as `lambda_G`.
        of_rows: Whether ``gradient`` is C, of a layer whose G is kept as its gradient rows.

    Returns:
        Shape (out_dim, in_dim), float64.

    Raises:
        BiasColumnMismatch: If the shapes disagree.
        TypeError: If the gradient is not a tensor of real numbers.
        ValueError: If a damping is negative, that of G is not positive, or no gradient rows are kept.
        WrongShape: If C has other rows than are kept.
    """
    if damping_A < 0 or damping_G <= 0:
        raise ValueError(f"damping_G must be positive and damping_A not negative (got {damping_G} and {damping_A})")
    _require_real(gradient)
    wide = gradient.to(torch.float64)
    if of_rows:
        if not isinstance(factors.G, LowRank):
            raise ValueError(f"layer `{factors.layer}` keeps no gradient rows to be pushed through; give the gradient")
        if wide.ndim != 2 or len(wide) != factors.G.count:
            raise WrongShape(
                f"layer `{factors.layer}`: with `of_rows`, `gradient` must have shape ({factors.G.count}, in_dim), one "
                f"row for each gradient row that is kept (got {tuple(wide.shape)}); give those, or leave `of_rows` out",
            )
        left, _ = factors.G.push_through(wide, damping_G)
        factors.require_fit(left)
    else:
        factors.require_fit(gradient)
        left = factors.side_G.solve(wide, damping_G)
    return factors.side_A.solve(left.mT, damping_A).mT


def _require_real(gradient: object) -> None:
    if isinstance(gradient, Tensor) and not gradient.is_complex():
        return
    got = f"a tensor of {gradient.dtype}" if isinstance(gradient, Tensor) else type(gradient).__name__
    message = f"`gradient` must be a torch.Tensor of real numbers, such as `weight.grad` (got {got})"
    raise TypeError(message)
