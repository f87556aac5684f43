"""A gradient that lies in the span of the rows that G is kept as, times a power of the damped curvature.

For ``G = SᵀS`` with rows ``S = U/√w`` (T, n), the gradient of the same positions is ``V = Sᵀ C`` (n, m), and

    F^(−α) V = Σ_ij E_i σ_i (PᵀC Q_A)_ij φ(σ_i², a_j) Q_Ajᵀ

with the singular value decomposition ``S = P σ Eᵀ``, ``A = Q_A diag(a) Q_Aᵀ`` and ``φ(g, a) = (g a + λ)^(−α)``, or
``((g + λ_G)(a + λ_A))^(−α)``. V itself is never formed: what its rounding has outside of the span would be divided by
λ^α, and at a condition of 1e8 nothing is left of a float32 gradient.

P and σ are found without a matrix of n rows but S: with unit rows ``Û = ℓ⁻¹ S`` and the eigenvectors of their Gram
matrix ``Û Ûᵀ = Q Λ Qᵀ``, but for those that are rounding, ``W = Ûᵀ Q Λ^{-1/2}`` is orthonormal and
``S = (ℓ Q Λ^{1/2}) Wᵀ``: a matrix (T, r), whose singular values are those of S to the rounding of the largest, where
the Gram matrix of S knows their squares to that.

References:
    Martens & Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature, section 6
    van der Sluis (1969), Condition numbers and equilibration of matrices
"""

import torch
from torch import Tensor

from engine.factors.capacitance import NOISE
from engine.factors.low_rank import LowRank
from engine.operators.kronecker.eigenbasis import JointBasis, SideBasis


def power_of_rows(rows: LowRank, inner: Tensor, damped: JointBasis, exponent: float) -> Tensor:
    """Return the curvature raised to a power, times a gradient within the span of the rows.

    Args:
        rows: G, of T rows.
        inner: C of the gradient ``V = Sᵀ C``, shape (T, in_dim).
        damped: A's eigenvectors and the dampings; its G is not used.
        exponent: −α, finite.

    Returns:
        Shape (out_dim, in_dim), float64.

    Memory:
        Some 8 T² and 3 T · in_dim numbers in float64, and the result.
    """
    gram = rows.gram()
    wide = inner.to(gram.device, torch.float64)
    turned = wide if damped.A.vectors is None else wide @ damped.A.vectors.to(gram.device, torch.float64)
    lengths = gram.diagonal().sqrt()
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    values, vectors = torch.linalg.eigh(gram.mul_(inverse[:, None]).mul_(inverse))
    largest = values[-1].clamp_min(0) if values.numel() else values.new_zeros(())
    kept = values > NOISE * max(values.numel(), 1) * largest
    roots, vectors = values[kept].sqrt(), vectors[:, kept]
    left, singular, right = torch.linalg.svd(lengths[:, None] * vectors * roots, full_matrices=False)
    across = SideBasis(singular.square().to("cpu"), None, singular.numel())
    joint = JointBasis(G=across, A=damped.A, shift=damped.shift, shift_A=damped.shift_A, shift_G=damped.shift_G)
    coefficients = (left.mT @ turned).mul_(singular[:, None])
    joint.scale_(coefficients, exponent)
    solved = rows.combine((inverse[:, None] * vectors / roots) @ (right.mT @ coefficients))
    return solved if damped.A.vectors is None else solved @ damped.A.vectors.mT.to(solved)
