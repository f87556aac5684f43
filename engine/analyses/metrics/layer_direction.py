"""One layer's directions ``d = F^(−α) g``, by the route that keeps most digits, and the metrics of them.

    rows            G is kept as gradient rows, and g lies in their span
    solves          factored damping and α = 1: (G + λ_G I)⁻¹ V (A + λ_A I)⁻¹, without any eigenvector
    eigenvectors    everything else: through Q_G ⊗ Q_A; a head without them by its own solves

All of it in float64 but for the eigenvectors, which are kept in the factors' own precision.

By rows: for ``G = SᵀS`` with rows ``S = U/√w`` (T, n), the gradient of the same positions is ``V = Sᵀ C`` (n, m), and

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

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from catalog.analyses.natural_gradient import LayerDirection, NaturalGradientMetrics, NaturalGradientParams
from engine.errors import UsageError
from engine.factors.capacitance import NOISE
from engine.factors.factor_set import LayerFacts
from engine.factors.kronecker_factors import Factors
from engine.factors.low_rank import LowRank
from engine.linalg.eigenbasis import Eigenbasis
from engine.linalg.eigensolvers import exact_svd
from engine.operators.kronecker.eigenbasis import JointBasis
from engine.operators.kronecker.factor_side import FactorSide
from engine.operators.kronecker.layer_operator import LayerOperator
from engine.operators.parameter_space import ParameterSpace
from engine.operators.preconditioning import precondition


def power_of_rows(rows: LowRank, inner: Tensor, damped: JointBasis, exponent: float) -> Tensor:
    """Return the curvature to the power −α = ``exponent``, times a gradient ``V = Sᵀ C`` within the span of G's T rows.

    ``inner`` is C (T, in_dim); of ``damped`` A's eigenvectors and the dampings are used, not its G. The result
    (out_dim, in_dim) is in float64, the exponent finite. Some 8 T² and 3 T · in_dim such numbers are held beside it.
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
    left, singular, right = exact_svd(lengths[:, None] * vectors * roots, full_matrices=False)
    across = Eigenbasis(singular.square().to("cpu"), None)
    joint = JointBasis(G=across, A=damped.A, shift=damped.shift, shift_A=damped.shift_A, shift_G=damped.shift_G)
    coefficients = (left.mT @ turned).mul_(singular[:, None])
    joint.scale_(coefficients, exponent)
    solved = rows.combine((inverse[:, None] * vectors / roots) @ (right.mT @ coefficients))
    return solved if damped.A.vectors is None else solved @ damped.A.vectors.mT.to(solved)


@dataclass(frozen=True, kw_only=True)
class LayerGradient:
    """One layer, and its gradient."""

    facts: LayerFacts
    operator: LayerOperator
    factors: Factors
    """On the host."""
    matrix: Tensor
    """V (out_dim, in_dim), float64, where the arithmetic is done."""
    inner: Tensor | None
    """C (T, in_dim) of ``V = Uᵀ C / √w``, where G is kept as its rows U and V is theirs."""
    curved: bool
    """Whether its damped curvature is not zero."""


def layer_metrics(
    layer: LayerGradient, params: NaturalGradientParams, space: ParameterSpace, why_not_rows: str | None
) -> tuple[NaturalGradientMetrics, Tensor]:
    """Compute one layer's directions.

    Args:
        params: The powers, and which curvature.
        space: Tells where the layer's numbers stand.
        why_not_rows: Why there is no ``inner``, where G is kept as gradient rows.

    Returns:
        The metrics of them, and the directions themselves, shape (out_dim, k, in_dim), float64.

    Raises:
        UsageError: If the layer is singular, or has no curvature, and its gradient is not zero.
        NotConverged: If a power needs eigenvectors that the layer's G does not have.

    Memory:
        The factors widened to float64 one side at a time, and some five matrices of the layer's numbers.
    """
    norm = float(layer.matrix.norm())
    if not layer.curved and norm > 0:
        lost = layer.facts.reached and not layer.operator.G.content.trace()
        remedy = "take `collection.dtype: float64`, in which its G is not zero" if lost else "give data that reach it"
        raise UsageError(
            f"layer `{layer.facts.name}` has no curvature, so that a damping relative to it is zero too, and its "
            f"gradient (norm {norm:.3g}) has no direction; {remedy}, or a gradient that is zero there",
            layer=layer.facts.name,
            pointer="/natural_gradient",
        )
    found = [_direction(layer, params, power) for power in params.powers]
    directions = tuple(
        _described(layer, space, power, route, direction)
        for power, (route, direction) in zip(params.powers, found, strict=True)
    )
    # once there are eigenvectors, which know the largest eigenvalue
    share = _damping_share(layer) if layer.curved else None
    return NaturalGradientMetrics(
        gradient_norm=norm,
        damping=layer.operator.damping.joint if params.damping == "exact" else None,
        damping_share=share,
        below_rounding=share is not None and share < _resolved(layer),
        why_not_rows=why_not_rows,
        directions=directions,
    ), torch.stack([direction for _, direction in found], dim=1)


def _direction(
    layer: LayerGradient, params: NaturalGradientParams, power: float
) -> tuple[Literal["rows", "eigenvectors", "solves", "zero"], Tensor]:
    own, damping = layer.operator, layer.operator.damping
    if not layer.curved:
        return "zero", torch.zeros_like(layer.matrix)
    if params.solves:
        of_rows = layer.inner is not None
        factors = dataclasses.replace(
            layer.factors, A=layer.factors.A.to(layer.matrix.device), G=layer.factors.G.to(layer.matrix.device)
        )
        right = layer.matrix if layer.inner is None else layer.inner.to(layer.matrix.device)
        found = precondition(factors, right, damping.A or 0.0, damping.G or 0.0, of_rows=of_rows)
        return "rows" if of_rows else "solves", found.to(layer.matrix)
    if layer.inner is not None and isinstance(own.G.content, LowRank):
        factored = own.kind == "factored"
        damped = JointBasis(
            G=own.A.basis,
            A=own.A.basis,
            shift=0.0 if factored else damping.joint or 0.0,
            shift_A=damping.A or 0.0 if factored else 0.0,
            shift_G=damping.G or 0.0 if factored else 0.0,
        )
        return "rows", power_of_rows(own.G.content, layer.inner, damped, -power).to(layer.matrix)
    return "eigenvectors", own.apply(layer.matrix[:, None, :], -power)[:, 0, :]


def _described(
    layer: LayerGradient,
    space: ParameterSpace,
    power: float,
    route: Literal["rows", "eigenvectors", "solves", "zero"],
    direction: Tensor,
) -> LayerDirection:
    gradient, own = layer.matrix, layer.operator
    before, norm = float(gradient.norm()), float(direction.norm())
    inner = float((gradient * direction).sum())
    undamped = dataclasses.replace(own, kind="none")
    curvature = float((direction * undamped.apply(direction[:, None, :])[:, 0, :]).sum()) if layer.curved else 0.0
    residual = None
    if power == 1 and before > 0 and layer.curved:
        residual = float((own.apply(direction[:, None, :])[:, 0, :] - gradient).norm()) / before
    place = int(direction.abs().argmax())
    row, column = divmod(place, direction.shape[1])
    parameter, index = space.place_of(layer.facts, row, column) if norm > 0 else (None, None)
    return LayerDirection(
        power=power,
        norm=norm,
        cosine=inner / (before * norm) if before > 0 and norm > 0 else None,
        inner=inner,
        effective_step=inner / before**2 if before > 0 else None,
        curvature=curvature,
        best_step=inner / curvature if curvature > 0 else None,
        largest=float(direction[row, column]),
        largest_parameter=parameter,
        largest_index=index,
        residual=residual,
        route=route,
    )


def _damping_share(layer: LayerGradient) -> float | None:
    own, damping = layer.operator, layer.operator.damping
    if own.kind == "none":
        return None
    if own.corrected is not None:
        largest = float(own.corrected.max())
        # the gradients of every example cancel, where A and G are not zero
        return (damping.joint or 0.0) / largest if largest > 0 else None
    largest_a, largest_g = _largest(own.A), _largest(own.G)
    if own.kind == "exact":
        return (damping.joint or 0.0) / largest_a / largest_g
    shares = [(damping.G or 0.0) / largest_g]
    # a block has A = 1, which is not damped
    if layer.facts.form not in ("block", "diagonal_block"):
        shares.append((damping.A or 0.0) / largest_a)
    return min(shares)


def _largest(side: FactorSide) -> float:
    """The largest eigenvalue of a side, from its eigenvectors where they were made."""
    return side.content.spectral_norm() if side.decomposed is None else side.decomposed.extremes[1]


def _resolved(layer: LayerGradient) -> float:
    """Return the resolution of the factors relative to the largest eigenvalue: ε of the least precise side."""
    # rows are what they are: a gradient that is pushed through them does not see what their storage has rounded
    sides = [layer.factors.side_A, *([layer.factors.side_G] if layer.inner is None else [])]
    # of a diagonal the eigenvalues are its own numbers
    narrow = [each.storage_dtype for each in sides if each.kind != "dense" or (not each.is_diagonal and each.size > 1)]
    return max((torch.finfo(dtype).eps for dtype in narrow), default=torch.finfo(torch.float64).eps)


def summed(values: list[float | None]) -> float | None:
    """Add numbers, in the order in which they stand."""
    return None if None in values else math.fsum(value for value in values if value is not None)
