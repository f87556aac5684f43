"""A gradient of the very rows that G is kept as keeps its digits at any damping, where a general solve loses them."""

import pytest
import torch
from torch import Tensor

from engine.analyses.metrics.layer_direction import power_of_rows
from engine.factors.dense import as_operator
from engine.factors.low_rank import LowRank, scaled_rows
from engine.linalg.damping import Damping
from engine.linalg.eigenbasis import Eigenbasis
from engine.operators.kronecker.eigenbasis import JointBasis
from engine.operators.kronecker.factor_side import FactorSide
from engine.operators.kronecker.layer_operator import LayerOperator

ROWS, OUT, INTO = 24, 300, 7
WEIGHT = 24.0


def sides(condition: float, storage: torch.dtype) -> tuple[LowRank, Tensor, Tensor]:
    """Rows whose G has eigenvalues over ``condition``, as they are stored; A; and C of the gradient."""
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(ROWS, ROWS, dtype=torch.float64, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(OUT, ROWS, dtype=torch.float64, generator=generator)).Q
    spread = torch.logspace(0, -0.5 * torch.log10(torch.tensor(condition)).item(), ROWS, dtype=torch.float64)
    rows, scales = scaled_rows((left * spread) @ right.T, storage)
    inputs = torch.randn(ROWS, INTO, dtype=torch.float64, generator=generator)
    return LowRank(rows=rows, scales=scales, weight=WEIGHT), inputs.T @ inputs / ROWS, inputs / WEIGHT**0.5


def dense(rows: LowRank, A: Tensor, inner: Tensor, damped: JointBasis, exponent: float) -> tuple[Tensor, Tensor]:
    """V and F^α V with nothing but the stored rows, in float64, by the singular values of the rows themselves.

    The dense matrix G + λI knows its small eigenvalues to ε of its largest: 1e-4 of λ at a condition of 1e12.
    """
    S = rows.rows.double() * rows.scales[:, None] / WEIGHT**0.5
    left, singular, basis = torch.linalg.svd(S, full_matrices=False)
    values, vectors = torch.linalg.eigh(A)
    eigenvalues = torch.outer(singular**2 + damped.shift_G, values + damped.shift_A) + damped.shift
    coefficients = singular[:, None] * (left.T @ inner @ vectors)
    return S.T @ inner, basis.T @ (coefficients * eigenvalues**exponent) @ vectors.T


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.part(of=16, by=("kind", "condition"))
@pytest.mark.parametrize("kind", ["exact", "factored"])
@pytest.mark.parametrize("exponent", [-1.0, -0.5])
@pytest.mark.parametrize("condition", [1e8, 1e10, 1e12])
def test_rows_keep_the_digits_that_a_gradient_in_float32_has_lost(condition: float, exponent: float, kind: str) -> None:
    # of 300 eigenvalues of G all but 24 are zero, so that its condition is λ's alone
    rows, A, inner = sides(100.0, torch.float32)
    values, vectors = torch.linalg.eigh(A)
    basis = Eigenbasis(values, vectors)
    largest = rows.spectral_norm()
    small = largest / condition
    shifts = {"shift": small * float(values.mean())} if kind == "exact" else {"shift_A": 1e-3, "shift_G": small}
    damped = JointBasis(G=basis, A=basis, **shifts)
    gradient, expected = dense(rows, A, inner, damped, exponent)
    # C as the pass has gathered it, in float32
    found = power_of_rows(rows, inner.float(), damped, exponent)
    assert off(found, expected) <= 1e-4
    lambdas = Damping(joint=damped.shift or None, A=damped.shift_A, G=damped.shift_G, relative_A=None, relative_G=None)

    def structured(_: torch.dtype) -> Eigenbasis:
        nonzero, own = rows.eigenbasis("fc")
        return Eigenbasis(nonzero, own)

    plain = LayerOperator(
        name="fc",
        G=FactorSide(rows, structured),
        A=FactorSide(as_operator(A), lambda _: basis),
        kind=kind,
        damping=lambdas,
    )
    # the same in float64 from a gradient that was rounded to float32: what is outside of the span is divided by λ
    general = plain.apply(gradient.float().double()[:, None, :], exponent)[:, 0]
    # λ^−1 or λ^−½ times ε of float32, of what the direction has
    if exponent == -1 or condition == 1e12:
        assert off(general, expected) > 1e-2


@pytest.mark.parametrize("condition", [1e8, 1e12])
def test_rows_of_widely_spread_lengths_keep_their_digits_too(condition: float) -> None:
    rows, A, inner = sides(condition, torch.float32)
    values, vectors = torch.linalg.eigh(A)
    basis = Eigenbasis(values, vectors)
    damped = JointBasis(G=basis, A=basis, shift=rows.spectral_norm() / condition * float(values.mean()))
    for exponent in (-1.0, -0.5):
        _, expected = dense(rows, A, inner, damped, exponent)
        assert off(power_of_rows(rows, inner, damped, exponent), expected) <= 1e-4


@pytest.mark.parametrize(("storage", "tolerance"), [(torch.float16, 1e-2), (torch.bfloat16, 3e-2)])
def test_rows_of_sixteen_bits_are_taken_as_they_are(storage: torch.dtype, tolerance: float) -> None:
    """The answer is exact for the rows as they are stored; what storing has rounded is another G."""
    rows, A, inner = sides(1e6, storage)
    values, vectors = torch.linalg.eigh(A)
    basis = Eigenbasis(values, vectors)
    damped = JointBasis(G=basis, A=basis, shift=1e-2 * rows.spectral_norm() * float(values.mean()))
    _, expected = dense(rows, A, inner, damped, -1.0)
    assert off(power_of_rows(rows, inner, damped, -1.0), expected) <= 1e-9
    true, _, _ = sides(1e6, torch.float64)
    _, of_true = dense(true, A, inner, damped, -1.0)
    assert off(power_of_rows(rows, inner, damped, -1.0), of_true) <= tolerance


def test_rows_that_depend_on_each_other_cancel_nothing() -> None:
    rows, A, inner = sides(1e4, torch.float64)
    twice = LowRank(
        rows=torch.cat([rows.rows, rows.rows, torch.zeros_like(rows.rows[:1])]),
        scales=torch.ones(2 * ROWS + 1, dtype=torch.float64),
        weight=WEIGHT,
    )
    generator = torch.Generator().manual_seed(5)
    second = torch.randn(ROWS + 1, INTO, dtype=torch.float64, generator=generator)
    both = torch.cat([inner, second])
    values, vectors = torch.linalg.eigh(A)
    basis = Eigenbasis(values, vectors)
    damped = JointBasis(G=basis, A=basis, shift=1e-10 * twice.spectral_norm())
    # of equal rows only the sum of their coefficients matters: rows of √2 with the mean of both times √2
    joined = LowRank(rows=rows.rows * 2**0.5, scales=rows.scales, weight=WEIGHT)
    _, expected = dense(joined, A, (inner + second[:ROWS]) / 2**0.5, damped, -1.0)
    assert off(power_of_rows(twice, both, damped, -1.0), expected) <= 1e-6


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.5])
def test_a_diagonal_side_and_any_power(exponent: float) -> None:
    rows, A, inner = sides(1e4, torch.float64)
    diagonal = A.diagonal().clone()
    basis = Eigenbasis(diagonal, None)
    damped = JointBasis(G=basis, A=basis, shift_A=0.1, shift_G=0.2)
    _, expected = dense(rows, torch.diag(diagonal), inner, damped, exponent)
    assert off(power_of_rows(rows, inner, damped, exponent), expected) <= 1e-10
