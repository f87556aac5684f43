"""Conjugate gradients, preconditioned, for several right-hand sides that share their products.

``M x = b`` for a symmetric positive definite M, from x = 0. A column that has converged takes no further part. The
residual that is given is that of the solution, multiplied anew, and not the recurrence's.

References:
    Hestenes & Stiefel (1952), Methods of conjugate gradients for solving linear systems
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.factors.factor_set import FactorSet
from engine.operators.kronecker_operator import KroneckerOperator
from engine.operators.products import ExactCurvature

Product = Callable[[Tensor], Tensor]
"""Multiplies vectors (P, k) by a matrix (P, P)."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """Solutions, with their certificates."""

    solutions: Tensor
    """(P, k)."""
    residuals: tuple[float, ...]
    """``‖M x − b‖ / ‖b‖`` of each; 0 where b is."""
    iterations: tuple[int, ...]
    """Products that each has taken part in."""


@torch.no_grad()
def solve(multiply: Product, precondition: Product, right: Tensor, *, tolerance: float, most: int) -> Solved:
    """Solve ``M x = b`` for each column b.

    Args:
        multiply: M.
        precondition: Its approximate inverse, symmetric positive definite.
        right: The columns, shape (P, k), floating-point.
        tolerance: Relative residual at which a column ends.
        most: Most iterations.

    Returns:
        Solutions of ``right``'s precision; where M is not positive along a direction, as far as it went.

    Memory:
        Six vectors for each column, beside what the products take.
    """
    solutions, norms = torch.zeros_like(right), right.norm(dim=0)
    active = torch.nonzero(norms > 0).flatten()
    counts = torch.zeros(right.shape[1], dtype=torch.int64)
    residual = right[:, active].clone()
    direction = precondition(residual)
    inner = _inner(residual, direction)
    for _ in range(most):
        if not active.numel():
            break
        product = multiply(direction)
        counts[active.cpu()] += 1
        curvature = _inner(direction, product)
        positive = curvature > 0
        step = torch.where(positive, inner / curvature, torch.zeros_like(inner)).to(right.dtype)
        solutions[:, active] += direction * step
        residual -= product * step
        going = positive & (residual.norm(dim=0) > tolerance * norms[active])
        active, residual, direction, inner = active[going], residual[:, going], direction[:, going], inner[going]
        if active.numel():
            conditioned = precondition(residual)
            later = _inner(residual, conditioned)
            direction = conditioned + direction * (later / inner).to(right.dtype)
            inner = later
    missed = (multiply(solutions) - right).norm(dim=0) / torch.where(norms > 0, norms, torch.ones_like(norms))
    return Solved(
        solutions=solutions,
        residuals=tuple(float(each) for each in missed),
        iterations=tuple(int(each) for each in counts),
    )


def solve_gauss_newton(
    exact: ExactCurvature, operator: KroneckerOperator, factors: FactorSet, rows: Tensor, *, tolerance: float, most: int
) -> Solved:
    """Solve with the damped exact curvature of the covered parameters, preconditioned with their factors.

    Args:
        operator: The damped factors, whose λ of each layer is that of the curvature too.
        factors: Where the numbers of each layer stand.
        rows: Right-hand sides, shape (k, P), on the host.
        tolerance: Relative residual at which one ends.
        most: Most iterations.

    Returns:
        Solutions, shape (P, k).
    """
    damping, covered = torch.zeros(2, operator.space.size, 1, dtype=rows.dtype)
    for facts in factors.layers:
        ones = torch.ones(facts.out_dim, 1, facts.in_dim, dtype=rows.dtype)
        operator.space.scatter(facts, ones, covered)
        operator.space.scatter(facts, ones * (operator.layer(facts.name).damping.joint or 0.0), damping)

    def multiply(vectors: Tensor) -> Tensor:
        product: Tensor = exact.product(vectors) * covered + damping * vectors
        return product

    with exact.prepared():
        return solve(multiply, operator.inverse().matvec, rows.mT * covered, tolerance=tolerance, most=most)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of the columns, float64."""
    return (left * right).sum(0, dtype=torch.float64)
