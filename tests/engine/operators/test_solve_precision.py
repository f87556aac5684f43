"""Solves and roots of float64 vectors keep the digits that the condition leaves, whatever the factors are stored in."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from catalog.requests.collection import Stabilisation
from engine.errors import UsageError
from engine.factors.factor_set import Corrected, FactorSet
from engine.factors.low_rank import LowRank
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.linalg.eigendecomposition import decompose
from engine.operators.kronecker.layer_store import IllConditioned, OperatorOptions
from engine.operators.kronecker_operator import KroneckerOperator
from tests.engine.operators.test_operator_inputs import covariance, generator, one_layer

EPS = 2.2e-16
OUT, INTO = 11, 14


def orthonormal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator(seed)))[0]


def spread(size: int, decades: float, seed: int) -> Tensor:
    """A regular side with eigenvalues from 1 to ``10^(−decades)``, rounded to float32."""
    turn = orthonormal(size, seed)
    found = ((turn * torch.logspace(0, -decades, size, dtype=torch.float64)) @ turn.T).float()
    return (found + found.T) / 2


def softmax_rows() -> Tensor:
    return torch.softmax(2 * torch.randn(9, OUT, generator=generator(7)), -1)


def gradient_rows(count: int) -> LowRank:
    rows = torch.randn(count, OUT, generator=generator(4))
    return LowRank(rows=rows, scales=torch.ones(count, dtype=torch.float64), weight=float(count))


def corrected(dtype: torch.dtype) -> FactorSet:
    own = Corrected(
        eigenvectors_A=orthonormal(INTO, 1).to(dtype),
        eigenvectors_G=orthonormal(OUT, 2).to(dtype),
        eigenvalues=torch.rand(OUT, INTO, generator=generator(3)).pow(9),
    )
    return dataclasses.replace(
        one_layer(covariance(INTO, 40, 1).float(), covariance(OUT, 40, 2).float()), load_corrected=lambda _: own
    )


FACTORS = {
    "regular": lambda: one_layer(spread(INTO, 3, 1), spread(OUT, 2, 2)),
    "singular A and G": lambda: one_layer(covariance(INTO, 5, 1).float(), covariance(OUT, 4, 2).float()),
    "diagonal A": lambda: one_layer(torch.logspace(0, -4, INTO), covariance(OUT, 4, 2).float()),
    "few gradient rows": lambda: one_layer(covariance(INTO, 5, 1).float(), gradient_rows(6)),
    "many gradient rows": lambda: one_layer(covariance(INTO, 5, 1).float(), gradient_rows(60)),
    "softmax head": lambda: one_layer(
        covariance(INTO, 5, 1).float(),
        SoftmaxFisher(rows=softmax_rows(), weights=torch.full((9,), 1 / 9, dtype=torch.float64)),
    ),
    "EK-FAC": lambda: corrected(torch.float32),
    "EK-FAC in 16 bits": lambda: corrected(torch.float16),
}


def damped(factors: FactorSet, kind: str, condition: float, of: str, **options: object) -> KroneckerOperator:
    """An operator whose largest eigenvalue is ``condition`` times its damping."""
    plain = KroneckerOperator(factors, OperatorOptions(of=of))  # type: ignore[arg-type] # one of the two
    eye = torch.eye(OUT * INTO, dtype=torch.float64)
    largest = float(np.linalg.eigvalsh((plain @ eye).numpy())[-1])
    level = largest / condition
    own = Stabilisation(damping=level, damping_mode="absolute")
    if kind == "factored":
        A, G = (side.content.frobenius_norm() for side in (plain.layer("head").A, plain.layer("head").G))
        own = dataclasses.replace(own, damping_A=A * condition**-0.5, damping_G=G * condition**-0.5)
    return KroneckerOperator(
        factors,
        OperatorOptions(of=of, kind=kind, stabilisation=own, **options),  # type: ignore[arg-type] # each of the three
    )


@pytest.mark.part(of=20, by=("form", "kind"))
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("kind", ["exact", "factored"])
@pytest.mark.parametrize("form", FACTORS)
def test_float64_vectors_are_solved_to_what_the_condition_leaves(form: str, kind: str, condition: float) -> None:
    of = "ekfac" if form.startswith("EK-FAC") else "kfac"
    if of == "ekfac" and kind == "factored":
        return
    whole = damped(FACTORS[form](), kind, condition, of)
    dense = (whole @ torch.eye(OUT * INTO, dtype=torch.float64)).numpy()
    dense = (dense + dense.T) / 2
    values, vectors = np.linalg.eigh(dense)
    kappa = abs(values).max() / abs(values).min()
    right = np.random.default_rng(0).standard_normal(OUT * INTO)
    for exponent in (-1.0, -0.5, 0.5):
        if exponent == -1:
            expected = np.linalg.solve(dense, right)
        elif values[0] > 0:
            expected = vectors @ (values**exponent * (vectors.T @ right))
        else:
            # the rounding of the factors exceeds the damping, and a root is not defined
            continue
        found = (whole.power(exponent) @ torch.tensor(right)).numpy()
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error <= 4 * kappa * EPS, (exponent, kappa, error / (kappa * EPS))
    if values[0] > 0:
        assert whole.logdet() == pytest.approx(np.linalg.slogdet(dense)[1], rel=4 * kappa * EPS)


@pytest.mark.parametrize("kind", ["exact", "factored"])
@pytest.mark.parametrize("of", ["kfac", "ekfac"])
def test_a_condition_beyond_1e12_is_reported_in_float64(kind: str, of: str) -> None:
    if of == "ekfac" and kind == "factored":
        return
    factors = corrected(torch.float32)
    right = torch.ones(OUT * INTO, dtype=torch.float64)
    factors = dataclasses.replace(factors, layers=factors.layers)
    if of == "kfac":
        A, G = torch.diag(torch.logspace(0, -9, INTO)), torch.diag(torch.logspace(0, -9, OUT))
        factors = one_layer(A, G)
    heard: list[IllConditioned] = []
    for condition, expected in ((1e8, 0), (1e14, 1)):
        heard.clear()
        whole = damped(factors, kind, condition, of, report=heard.append)
        if of == "ekfac":
            assert factors.load_corrected is not None
            factors.load_corrected(0).eigenvalues[0, 0] = 0
        whole.solve(right)
        assert len(heard) == expected, (condition, heard)
    assert "vectors in float64" not in str(heard[0])
    assert heard[0].residual < 1e-2


def test_a_regular_factored_layer_is_not_reported_for_a_small_damping() -> None:
    """Its bound from λ_A λ_G alone would say a condition of 1e16."""
    A, G = torch.diag(torch.logspace(0, -2, INTO)), torch.diag(torch.logspace(0, -2, OUT))
    heard: list[IllConditioned] = []
    whole = damped(one_layer(A, G), "factored", 1e16, "kfac", report=heard.append)
    whole.solve(torch.ones(OUT * INTO, dtype=torch.float64))
    assert not heard


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.5])
def test_a_factor_is_decomposed_once_for_vectors_in_float64(exponent: float, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(factor: Tensor, *arguments: object, **options: object) -> object:
        made.append(len(factor))
        return decompose(factor, *arguments, **options)  # type: ignore[arg-type] # as it was called

    monkeypatch.setattr("engine.factors.dense.decompose", counted)
    whole = damped(FACTORS["regular"](), "exact", 1e4, "kfac")
    whole.power(exponent) @ torch.ones(OUT * INTO, dtype=torch.float64)
    whole.logdet()
    assert sorted(made) == [OUT, INTO]


SINGULAR = {
    "dense": lambda dtype: one_layer(covariance(INTO, 40, 1).to(dtype), covariance(OUT, 4, 2).to(dtype)),
    "dense A": lambda dtype: one_layer(covariance(INTO, 4, 1).to(dtype), covariance(OUT, 40, 2).to(dtype)),
    "diagonal": lambda dtype: one_layer(
        torch.cat([torch.zeros(2), torch.logspace(0, -2, INTO - 2)]).to(dtype), covariance(OUT, 40, 2).to(dtype)
    ),
    "gradient rows": lambda dtype: one_layer(
        covariance(INTO, 40, 1).to(dtype),
        LowRank(
            rows=torch.randn(5, OUT, generator=generator(4)).to(dtype),
            scales=torch.ones(5, dtype=torch.float64),
            weight=5.0,
        ),
    ),
    "softmax head": lambda dtype: one_layer(
        covariance(INTO, 40, 1).to(dtype),
        SoftmaxFisher(rows=softmax_rows().to(dtype), weights=torch.full((9,), 1 / 9, dtype=torch.float64)),
    ),
    "softmax gradients": lambda dtype: one_layer(covariance(INTO, 40, 1).to(dtype), softmax_second_moment(dtype)),
    "zero": lambda dtype: one_layer(covariance(INTO, 40, 1).to(dtype), torch.zeros(OUT, OUT, dtype=dtype)),
}


def softmax_second_moment(dtype: torch.dtype) -> Tensor:
    """G of sampled labels, which is singular along 1 up to rounding of one sign or the other."""
    rows = torch.softmax(torch.randn(300, OUT, generator=generator(8)), -1).to(dtype)
    rows[torch.arange(300), torch.multinomial(rows.float(), 1, generator=generator(9))[:, 0]] -= 1
    found = rows.T @ rows / 300
    return (found + found.T) / 2


@pytest.mark.part(of=24, by=("form",))
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", SINGULAR)
def test_a_layer_whose_solve_is_refused_has_a_determinant_of_zero(
    form: str, dtype: torch.dtype, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide and form == "softmax head":
        # as one of more than 4,096 classes
        monkeypatch.setattr("engine.factors.softmax_fisher.BASIS_ROWS", 0)
    for kind in ("none", "exact") if form == "zero" else ("none",):
        own = KroneckerOperator(SINGULAR[form](dtype), OperatorOptions(kind=kind))  # type: ignore[arg-type]
        for vectors in (torch.float32, torch.float64):
            with pytest.raises(UsageError, match="singular"):
                own.solve(torch.ones(OUT * INTO, dtype=vectors))
        assert own.logdet() == -math.inf
        assert own.power(0.5).logdet() == -math.inf
    if form == "zero":
        return
    regular = KroneckerOperator(SINGULAR[form](dtype), OperatorOptions(kind="exact"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regular.solve(torch.ones(OUT * INTO, dtype=torch.float64))
    assert math.isfinite(regular.logdet())
