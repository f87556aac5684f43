"""Bounds on the errors of Ritz values, place by place, from measured residuals.

For m vectors X with ``R = F X − X Θ`` and ``C = (I − XXᵀ) F (I − XXᵀ)``, Weyl's theorem for ``[Θ + XᵀR, Rᵀ; R, C]``
beside ``diag(Θ, C)`` bounds the error of the i-th value, counted from its end, by

    ``joint = 2/√3 · (‖R‖_F + √m ρ) / σ_min(X) + δ``

where ρ bounds the rounding of one product and δ how far C may reach beyond the last wanted value; 2/√3 is the most
that the norm of ``[XᵀR, Rᵀ; R, 0]`` can be over that of its first column. A value whose neighbours on both sides are
known to be further away than ``joint`` has an interval of its own, in which Kato and Temple's bound ``r²/gap + ρ``
holds, with its own residual ``r = ‖F x − θ x‖ + ρ``.

References:
    Parlett (1998), The symmetric eigenvalue problem, sections 10.3, 10.4 and 11.7
    Cao, Xie & Li (1996), A sharp version of Kahan's theorem on clustered eigenvalues
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Eigenvalue:
    """One eigenvalue found."""

    value: float
    bound: float
    """Distance within which the eigenvalue of the same place lies, counted from its end; else some eigenvalue."""
    converged: bool
    """Whether place and multiplicity are settled."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The eigenvalues found at both ends."""

    largest: tuple[Eigenvalue, ...]
    """Descending, each as often as its multiplicity; empty where not asked for."""
    smallest: tuple[Eigenvalue, ...]
    """Ascending."""


def joint_bounds(
    values: Tensor, residuals: Tensor, rounding: float, gram: Tensor, slip: float, unknown: tuple[int, ...]
) -> Tensor:
    """Return bounds on the errors of values that are the outermost ones, each in its place.

    Args:
        values: Θ, shape (m,), float64, ascending.
        residuals: ``‖F x − θ x‖`` of each unit vector, shape (m,).
        rounding: ρ.
        gram: ``XᵀX``, shape (m, m), float64.
        slip: δ, not negative.
        unknown: Places beside which an eigenvalue of C may lie.

    Returns:
        Shape (m,), float64.
    """
    least = float(torch.linalg.eigvalsh(gram)[0])
    # vectors that depend on each other bound nothing
    smallest = math.sqrt(least) if least > 0 else torch.finfo(torch.float64).tiny
    own = residuals + rounding
    joint = 2 / math.sqrt(3) * (float(residuals.norm()) + math.sqrt(len(values)) * rounding) / smallest + slip
    far = torch.full((1,), math.inf, dtype=torch.float64)
    beside = values.diff()
    gap = torch.minimum(torch.cat([far, beside]), torch.cat([beside, far])) - joint
    gap[list(unknown)] = 0
    alone = torch.where(gap > 0, own.square() / gap.clamp_min(torch.finfo(torch.float64).tiny) + rounding, math.inf)
    return alone.clamp_max(joint)
