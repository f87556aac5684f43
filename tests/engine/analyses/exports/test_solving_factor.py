"""The factor that GPTQ solves with, of matrices that are singular or nearly so, and its smallest damping."""

import pytest
import torch
from torch import Tensor

from engine.analyses.exports.activation_files import solving_factor

KAPPA = 1e6
SIZE = 24


def drawn(kind: str, seed: int) -> Tensor:
    """A Hessian as calibration data give it, 2·A of rows, in float32 as it is stored."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(400, SIZE, generator=generator, dtype=torch.float64)
    rows *= torch.logspace(0, -seed % 5, SIZE, dtype=torch.float64)
    if kind == "dead columns":
        rows[:, torch.randperm(SIZE, generator=generator)[: 1 + seed % 6]] = 0
    if kind == "fewer tokens than columns":
        rows = rows[: 2 + seed % 20]
    made = 2 * rows.T @ rows / len(rows)
    if kind == "indefinite by rounding":
        made = 2 * rows[:6].T @ rows[:6]
        noise = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
        made += 1e-7 * float(made.abs().max()) * (noise + noise.T)
        assert float(torch.linalg.eigvalsh(made)[0]) < 0
    return made.to(torch.float32)


KINDS = ("dead columns", "fewer tokens than columns", "indefinite by rounding")


@pytest.mark.part(of=20, by=("kind",))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_it_solves_and_its_damping_is_the_smallest(kind: str, seed: int) -> None:
    hessian = drawn(kind, seed).double()
    found = solving_factor(hessian, KAPPA)
    assert found is not None
    damped = hessian + found.damping * torch.eye(SIZE, dtype=torch.float64)
    assert float((found.upper @ damped @ found.upper.T - torch.eye(SIZE, dtype=torch.float64)).norm()) <= 1e-6
    assert torch.equal(found.upper, found.upper.triu())
    values = torch.linalg.eigvalsh(damped)
    assert float(values[-1] / values[0]) == pytest.approx(KAPPA, rel=1e-6)
    # with less it would have a larger condition number
    less = torch.linalg.eigvalsh(hessian) + 0.999 * found.damping
    assert float(less[-1] / less[0]) > KAPPA or float(less[0]) <= 0
    assert found.condition is None or found.condition > KAPPA


def test_a_well_conditioned_one_is_not_damped() -> None:
    rows = torch.randn(500, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hessian = 2 * rows.T @ rows / 500
    found = solving_factor(hessian, KAPPA)
    assert found is not None
    assert found.damping == 0
    # the formula of the paper, by way of the inverse
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    assert torch.allclose(found.upper, torch.linalg.cholesky(inverse, upper=True), rtol=1e-10, atol=1e-12)
    assert found.condition == pytest.approx(float(torch.linalg.cond(hessian)), rel=1e-9)


@pytest.mark.parametrize("hessian", [torch.zeros(3, 3), -torch.eye(3)])
def test_nothing_solves_with_a_matrix_without_a_positive_eigenvalue(hessian: Tensor) -> None:
    assert solving_factor(hessian, KAPPA) is None


@pytest.mark.parametrize("kappa", [1.0, 0.0, -2.0, float("nan")])
def test_a_condition_number_is_above_one(kappa: float) -> None:
    with pytest.raises(ValueError, match="above 1"):
        solving_factor(torch.eye(2), kappa)
