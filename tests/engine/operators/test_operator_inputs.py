"""Vectors and factors of every kind give the numbers of the dense float64 matrix, or an error that says what to do."""

import dataclasses
import functools
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.requests.collection import Collection, Stabilisation
from engine.errors import BrokenFactors, UsageError
from engine.factors.factor_set import Corrected, FactorSet, ParameterShape
from engine.factors.kronecker_factors import Factors
from engine.factors.low_rank import LowRank, scaled_rows
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.layers.parameter_slice import Window
from engine.linalg import layer_matrices
from engine.linalg.damping import damping
from engine.linalg.linear_operator import Structured
from engine.operators.kronecker.layer_store import IllConditioned, OperatorOptions, held_bytes
from engine.operators.kronecker_operator import KroneckerOperator
from kronoscope.local import measure, operator
from kronoscope.local_operator import IllConditionedWarning
from tests.engine.operators.test_operator import (
    Siblings,
    close,
    factor_set,
    measured,
    numbers,
    spectral_power,
)  # fmt: skip

DOUBLE = torch.float64


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def covariance(size: int, rank: int, seed: int, decay: float = 0.0) -> Tensor:
    """Return a side of ``rank`` rows, whose lengths fall by ``10^(−decay)`` from the first to the last."""
    rows = torch.randn(rank, size, dtype=DOUBLE, generator=generator(seed))
    rows *= torch.logspace(0, -decay, rank, dtype=DOUBLE)[:, None]
    return rows.T @ rows / rank


@functools.cache
def template() -> FactorSet:
    """A factor set of whatever a single layer's is made of."""
    return factor_set(measured("perceptron")[1])


def one_layer(A: Tensor, G: Tensor | Structured) -> FactorSet:
    """A factor set of a single layer ``head.weight`` (out, in)."""
    out, into = G.size if isinstance(G, Structured) else G.shape[0], A.shape[0]
    window = Window(
        parameter="head.weight", offset=0, shape=(out, into), strides=(into, 1), top=0, left=0, height=out, width=into
    )
    facts = dataclasses.replace(
        template().layers[-1], ordinal=0, name="head", in_dim=into, out_dim=out, bias=False, parameter_count=out * into,
        representation_G=G.kind if isinstance(G, Structured) else "dense", windows=(window,), rank_bound_A=None,
        rank_bound_G=None, shared_A_with=None,
    )  # fmt: skip
    given = Factors(layer="head", form="kronecker", bias=False, A=A, G=G)
    return dataclasses.replace(
        template(), layers=(facts,), load=lambda _: given,
        parameters=(ParameterShape(name="head.weight", shape=(out, into)),),
    )  # fmt: skip


def opened(factors: FactorSet, kind: str, relative: float = 1e-4, **options: Any) -> KroneckerOperator:
    return KroneckerOperator(
        factors,
        OperatorOptions(kind=kind, stabilisation=Stabilisation(damping=relative), **options),  # type: ignore[arg-type] # each of the three
    )


def dense(A: Tensor, G: Tensor, kind: str, relative: float = 1e-4) -> Tensor:
    """M (out · in, out · in) of one layer, by linear algebra alone."""
    A, G = A.double(), G.double()
    lam = damping(float(A.trace()) / len(A), float(G.trace()) / len(G), Stabilisation(damping=relative), block=False)
    eyes = [torch.eye(len(each), dtype=DOUBLE) for each in (G, A)]
    if kind == "factored":
        return torch.kron(G + lam.G * eyes[0], A + lam.A * eyes[1])
    return torch.kron(G, A) + (lam.joint * torch.eye(len(G) * len(A), dtype=DOUBLE) if kind == "exact" else 0)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.part(of=16, by=("kind",))
@pytest.mark.parametrize("kind", ["none", "exact", "factored"])
@pytest.mark.parametrize("seed", range(6))
def test_factors_of_any_shape_and_rank_are_those_of_the_dense_matrix(seed: int, kind: str) -> None:
    """Sizes on both sides of what rows are padded to, with and without full rank, one vector and several."""
    drawn = torch.randint(1, 40, (4,), generator=generator(seed)).tolist()
    out, into = drawn[0], drawn[1]
    A, G = covariance(into, drawn[2], seed), covariance(out, drawn[3], seed + 100)
    whole, expected = opened(one_layer(A, G), kind), dense(A, G, kind)
    for columns in (1, 2, 7):
        right = torch.randn(out * into, columns, dtype=DOUBLE, generator=generator(columns))
        assert close(whole @ right, expected @ right)
        assert close(whole.sqrt() @ (whole.sqrt() @ right), expected @ right, 1e-9)
        if kind != "none":
            assert close(whole.solve(right), torch.linalg.solve(expected, right), 1e-9)
            assert close(whole.power(-0.5) @ right, spectral_power(expected, -0.5) @ right, 1e-9)
    assert whole.trace() == pytest.approx(float(expected.trace()), rel=1e-10)
    assert close(whole.diagonal(), expected.diagonal())


@pytest.mark.parametrize("kind", ["exact", "factored"])
def test_vectors_in_float64_meet_float32_factors_without_their_rounding(kind: str) -> None:
    A, G = covariance(17, 40, 1).float(), covariance(33, 60, 2).float()
    whole, expected = opened(one_layer(A, G), kind), dense(A, G, kind)
    right = torch.randn(33 * 17, 2, dtype=DOUBLE, generator=generator(3))
    assert close(whole @ right, expected @ right)
    assert close(whole.solve(right), torch.linalg.solve(expected, right), 1e-9)
    assert close(whole.power(0.3) @ right, spectral_power(expected, 0.3) @ right, 1e-9)
    single = whole.solve(right.float())
    assert single.dtype == torch.float32
    assert relative(single, torch.linalg.solve(expected, right.float().double())) < 1e-3


@pytest.mark.part(of=24, by=("kind",))
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["exact", "factored"])
@pytest.mark.parametrize("level", [1e-2, 1e-6, 1e-9])
@pytest.mark.parametrize("within", [True, False])
def test_gradient_rows_solve_without_cancellation(stored: torch.dtype, kind: str, level: float, within: bool) -> None:
    """A float32 vector within the span of the rows is what the textbook's formula loses (5.6 at a condition of 1e8)."""
    rows, scales = scaled_rows(torch.randn(24, 60, dtype=DOUBLE, generator=generator(4)), stored)
    side = LowRank(rows=rows, scales=scales, weight=24.0)
    A, G = covariance(12, 24, 5).float(), side.to_dense(DOUBLE)
    whole = opened(one_layer(A, side), kind, level)
    inner = torch.randn(24 if within else 60, 12, dtype=DOUBLE, generator=generator(6))
    right = ((side.scaled().double().T if within else torch.eye(60, dtype=DOUBLE)) @ inner).reshape(-1).float()
    expected = torch.linalg.solve(dense(A, G, kind, level), right.double())
    assert relative(whole.solve(right), expected) <= 1e-5
    assert relative(whole.solve(right.double()), expected) <= 1e-5
    values, vectors = torch.linalg.eigh(dense(A, G, kind, level))
    root = vectors @ (values.clamp_min(0).rsqrt() * (vectors.T @ right.double()))
    assert relative(whole.power(-0.5) @ right, root) <= 1e-5


@pytest.mark.part(of=16, by=("kind", "basis"))
@pytest.mark.parametrize("basis", [True, False])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["exact", "factored"])
def test_a_softmax_head_solves_at_a_damping_of_1e_10(
    stored: torch.dtype, kind: str, basis: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not basis:
        monkeypatch.setattr("engine.factors.softmax_fisher.BASIS_ROWS", 0)
    logits = 2 * torch.randn(9, 30, dtype=DOUBLE, generator=generator(7))
    side = SoftmaxFisher(rows=torch.softmax(logits, -1).to(stored), weights=torch.full((9,), 1 / 9, dtype=DOUBLE))
    A, G = covariance(6, 20, 8), side.to_dense(DOUBLE)
    own = Stabilisation(damping=1e-10, damping_mode="absolute", damping_A=1e-10, damping_G=1e-10)
    whole = KroneckerOperator(
        one_layer(A, side),
        OperatorOptions(kind=kind, stabilisation=own),  # type: ignore[arg-type] # each of the two
    )
    eyes = [1e-10 * torch.eye(size, dtype=DOUBLE) for size in (30, 6, 180)]
    expected = torch.kron(G + eyes[0], A + eyes[1]) if kind == "factored" else torch.kron(G, A) + eyes[2]
    for right in (
        torch.randn(180, 2, dtype=DOUBLE, generator=generator(9)),
        (G @ torch.randn(30, 6, dtype=DOUBLE, generator=generator(10)) @ A).reshape(-1, 1),
    ):
        # the oracle's own digits end where its condition does
        found, exact = whole.solve(right), torch.linalg.solve(expected, right)
        assert relative(found, exact) <= 1e-5
        assert relative(expected @ found, right) <= 1e-5
        single = whole.solve(right.float())
        assert relative(single, torch.linalg.solve(expected, right.float().double())) <= 1e-5


def test_a_factor_elsewhere_or_of_another_precision_visits_in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels of one row give the numbers of the whole, and no copy of a factor is made."""
    A, G = covariance(20, 30, 1).float(), covariance(24, 30, 2).float()
    right = torch.randn(480, 3, dtype=DOUBLE, generator=generator(3))
    expected = [opened(one_layer(A, G), kind).solve(right) for kind in ("exact", "factored")]
    moved = []
    true_to = Tensor.to

    def watched(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        found = true_to(tensor, *arguments, **options)
        moved.append(tensor.numel() if found is not tensor and found.dtype == DOUBLE else 0)
        return found

    monkeypatch.setattr(layer_matrices, "PANEL_BYTES", 1)
    wholes = [opened(one_layer(A, G), kind) for kind in ("exact", "factored")]
    for whole, known in zip(wholes, expected, strict=True):
        torch.testing.assert_close(whole.solve(right), known, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(Tensor, "to", watched)
    opened(one_layer(A, G), "none") @ right
    assert 0 < max(moved) <= 24


@pytest.mark.parametrize("kind", ["none", "exact", "factored"])
def test_a_vector_comes_in_any_layout_precision_and_number(kind: str) -> None:
    whole = operator(measured("perceptron")[1], damping=kind)
    size = whole.shape[0]
    columns = torch.randn(size, 6, dtype=DOUBLE, generator=generator(1))
    product = whole @ columns
    assert close(whole @ columns[:, ::2], product[:, ::2])
    assert close(whole @ columns.T.contiguous().T, product)
    spread = torch.stack([columns[:, 0], columns[:, 1]], 1)[:, 0]
    assert close(whole @ spread, product[:, 0])
    assert (whole @ torch.zeros(size, 0)).shape == (size, 0)
    grown = columns[:, 0].clone().requires_grad_()
    assert not (whole @ grown).requires_grad
    for dtype, error in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float32, 1e-6)):
        narrow = columns.to(dtype)
        found = whole @ narrow
        assert found.dtype == dtype
        assert relative(found, whole @ narrow.double()) < error
    spoilt = columns[:, 0].clone()
    spoilt[-1] = math.nan
    left = whole @ spoilt
    assert bool(torch.isnan(left[-32:]).all())
    assert close(left[:-32], product[:-32, 0])
    assert float((whole @ torch.zeros(size, dtype=DOUBLE)).norm()) == 0


def test_a_vector_by_name_takes_the_widest_precision_and_keeps_shapes() -> None:
    torch.manual_seed(0)

    class Odd(nn.Module):
        """A number, a parameter without numbers, and frozen ones."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.3))
            self.none = nn.Parameter(torch.zeros(0, 4))
            self.mix = nn.Linear(6, 3)
            self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.frozen(torch.tanh(self.mix(x) * self.scale))
            return found

    model = Odd().double()
    found = measure(
        model, [numbers(6)], task="classification", kinds=["factors"],
        collection=Collection(dtype="float64", fisher="empirical"),
    )  # fmt: skip
    whole = operator(found, damping="exact")
    named = {name: own for name, own in model.named_parameters() if own.requires_grad}
    assert whole.shape == (22, 22)
    assert whole.uncovered == ()
    product = whole @ named
    assert {name: own.shape for name, own in product.items()} == {name: own.shape for name, own in named.items()}
    flat = torch.cat([own.detach().reshape(-1) for own in named.values()])
    assert close(torch.cat([own.reshape(-1) for own in product.values()]), whole @ flat)
    mixed = {"scale": torch.tensor(1.0), "mix.bias": torch.ones(3, dtype=DOUBLE)}
    assert (whole @ mixed)["mix.weight"].dtype == DOUBLE
    assert (whole @ {"scale": torch.tensor(1.0, dtype=torch.bfloat16)})["scale"].dtype == torch.bfloat16
    assert all(float(own.abs().sum()) == 0 for own in (whole @ {}).values())
    for wrong in ({"mix.bias": torch.ones(3, dtype=torch.int64)}, {"mix.bias": [1.0, 2.0, 3.0]}):
        with pytest.raises(UsageError, match=r"`mix\.bias` must be a tensor of floating-point numbers"):
            whole @ wrong  # type: ignore[operator] # what is to be refused
    with pytest.raises(UsageError, match=r"ndarray.*torch\.as_tensor"):
        whole @ flat.numpy()


def test_the_power_zero_keeps_what_is_covered() -> None:
    whole = operator(measured("perceptron")[1], damping="exact", layers=["2", "5"])
    vector = torch.randn(whole.shape[0], dtype=DOUBLE, generator=generator(2))
    kept = whole.power(0) @ vector
    parts = whole.space.unflatten(kept)
    for name, own in whole.space.unflatten(vector).items():
        expected = own if name in ("2.weight", "2.bias", "5.weight") else torch.zeros_like(own)
        torch.testing.assert_close(parts[name], expected, rtol=0, atol=0)
    assert whole.power(0).logdet() == 0
    assert whole.power(0).trace() == pytest.approx(128 + 32, rel=1e-12)
    singular = operator(measured("perceptron")[1])
    for refused in (
        lambda: singular.power(0) @ vector,
        lambda: singular.power(-0.5) @ vector,
        lambda: singular.inverse().trace(),
        lambda: singular.inverse().logdet(),
        lambda: singular.inverse().diagonal(),
    ):
        with pytest.raises(UsageError, match=r"singular.*take `exact` or `factored` damping"):
            refused()
    assert singular.logdet() == -math.inf


@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
def test_eigenvalues_that_are_rounding_are_not_inverted_without_damping(stored: torch.dtype) -> None:
    """Nobody said that A has rank 5; its other eigenvalues are what rounding has left."""
    A, G = covariance(20, 5, 1).to(stored), covariance(6, 30, 2).to(stored)
    whole = opened(one_layer(A, G), "none")
    with pytest.raises(UsageError, match=r"layer `head`.*singular to the rounding"):
        whole.solve(torch.ones(120))
    regular = opened(one_layer(covariance(20, 300, 1).to(stored), G), "none")
    right = torch.randn(120, dtype=DOUBLE, generator=generator(3))
    assert close(regular @ regular.solve(right), right, 1e-8)


@pytest.mark.parametrize("kind", ["exact", "factored"])
def test_a_solve_beyond_rounding_is_reported_with_its_residual(kind: str) -> None:
    # eigenvalues that float32 holds as they are
    A, G = (torch.diag(torch.logspace(0, -9, size)) for size in (12, 10))
    heard: list[IllConditioned] = []
    whole = opened(one_layer(A, G), kind, 1e-12, report=heard.append)
    right = torch.randn(120, generator=generator(3))
    solution = whole.solve(right)
    (found,) = heard
    assert (found.layer, found.exponent) == ("head", -1.0)
    assert found.smallest < torch.finfo(torch.float32).eps * found.largest
    expected = dense(A, G, kind, 1e-12)
    values = torch.linalg.eigvalsh(expected)
    assert found.largest >= float(values[-1]) * (1 - 1e-6)
    assert found.smallest == pytest.approx(float(values[0]), rel=1e-2)
    residual = relative(expected @ solution.double(), right.double())
    (own,) = whole.residuals(solution, right).values()
    assert own == pytest.approx(residual, rel=1e-3)
    assert found.residual == pytest.approx(residual, rel=1e-3)
    heard.clear()
    whole @ right
    whole.sqrt() @ right
    opened(one_layer(A, G), kind, 1e-2, report=heard.append).solve(right)
    assert not heard
    with pytest.raises(UsageError, match=r"\(120,\).*\(60,\)"):
        whole.residuals(right[:60], right)


def test_a_notebook_is_warned_at_its_own_line() -> None:
    found = measured("perceptron", dtype="float32")[1]
    whole = operator(found, damping="exact", stabilisation={"damping": 1e-13})
    vector = torch.ones(whole.shape[0])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        whole.solve(vector)
    assert {each.category for each in heard} == {IllConditionedWarning}
    assert any("layer `2`" in str(each.message) and "relative residual" in str(each.message) for each in heard)
    assert {Path(each.filename).name for each in heard} == {Path(__file__).name}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole @ vector
        operator(found, damping="exact", stabilisation={"damping": 1e-2}).solve(vector)


def counted(factors: FactorSet) -> tuple[FactorSet, list[int]]:
    """The set, and the ordinals that are loaded of it."""
    loads: list[int] = []

    def load(ordinal: int) -> Factors:
        loads.append(ordinal)
        return factors.load(ordinal)

    return dataclasses.replace(factors, load=load), loads


def test_a_sweep_reads_again_only_what_the_budget_has_no_room_for() -> None:
    factors, loads = counted(factor_set(measured("perceptron")[1]))
    resident = KroneckerOperator(factors, OperatorOptions())
    vector = torch.ones(resident.shape[0], dtype=DOUBLE)
    expected = resident @ vector
    first = factors.layers[0].ordinal
    budget = held_bytes([resident.layer(facts.name) for facts in factors.layers[:2]])
    loads.clear()
    tight = KroneckerOperator(factors, OperatorOptions(resident_bytes=budget))
    for _ in range(3):
        torch.testing.assert_close(tight @ vector, expected, rtol=0, atol=0)
    # the layer used longest ago would be each of them in turn
    assert loads.count(first) == 1
    assert len(loads) < 3 * len(factors.layers)
    last = tight.restricted([factors.layers[-1].name])
    for _ in range(12):
        last @ vector
    loads.clear()
    last @ vector
    assert not loads


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_layers_share_is_held_once(dtype: str) -> None:
    torch.manual_seed(0)
    found = measure(
        Siblings(), [(numbers(6)[0].float(), numbers(6)[1])], task="classification",
        kinds=["factors"], collection={"storage_dtype": dtype},
    )  # fmt: skip
    factors = factor_set(found)
    whole = KroneckerOperator(factors, OperatorOptions(resident_bytes=0))
    store, leader = whole._store, next(facts for facts in factors.layers if facts.shared_A_with is not None)
    assert leader.shared_A_with is not None
    first = store.operator(factors.layers[leader.shared_A_with])
    assert store.operator(leader).A is first.A
    assert held_bytes([first, first]) == held_bytes([first])


@pytest.mark.parametrize("seed", range(3))
def test_ekfac_of_rows_is_that_of_its_eigenvalues(seed: int) -> None:
    """Any eigenvalues in any orthonormal bases, in float32 and float64."""
    out, into = 7 + seed, 18 - seed
    A, G = covariance(into, 40, seed), covariance(out, 40, seed + 50)
    turns = [
        torch.linalg.qr(torch.randn(size, size, dtype=DOUBLE, generator=generator(size)))[0] for size in (into, out)
    ]
    eigenvalues = torch.rand(out, into, dtype=DOUBLE, generator=generator(seed)).pow(6)
    corrected = Corrected(eigenvectors_A=turns[0], eigenvectors_G=turns[1], eigenvalues=eigenvalues)
    factors = dataclasses.replace(one_layer(A, G), load_corrected=lambda _: corrected)
    whole = opened(factors, "exact", 1e-3, of="ekfac")
    lam = whole.layer("head").damping.joint
    turn = torch.kron(turns[1], turns[0])
    values = eigenvalues.reshape(-1) + lam
    right = torch.randn(out * into, 3, dtype=DOUBLE, generator=generator(1))
    for exponent in (1.0, -1.0, 0.5, -0.5, -0.3):
        expected = turn @ (values.pow(exponent)[:, None] * (turn.T @ right))
        assert close(whole.power(exponent) @ right, expected)
        assert relative(whole.power(exponent) @ right.float(), expected) < 1e-5
        assert close(whole.power(exponent).diagonal(), (turn.square() * values.pow(exponent)).sum(1))


@pytest.mark.parametrize(("left", "right"), [*itertools.product([1e-30, 1.0, 1e25], [1e-25, 1.0, 1e30])])
def test_factors_near_the_ends_of_float32_keep_their_digits(left: float, right: float) -> None:
    """Eigenvalues or powers of them that are beyond float32 are computed in float64."""
    A, G = left * covariance(9, 30, 1), right * covariance(8, 30, 2)
    factors = one_layer(A.float(), G.float())
    vector = torch.randn(72, generator=generator(3))
    for kind, exponent in itertools.product(("exact", "factored"), (0.5, -0.5, -1.0)):
        expected = spectral_power(dense(A.float(), G.float(), kind, 0.1), exponent) @ vector.double()
        if not 1e-30 < float(expected.abs().max()) < 1e30:
            continue
        assert relative(opened(factors, kind, 0.1).power(exponent) @ vector, expected) < 1e-4


def test_a_choice_that_cannot_be_is_refused() -> None:
    found = measured("perceptron")[1]
    with pytest.raises(UsageError, match=r"list of names.*\['5'\]"):
        operator(found, layers="5")
    for device in ("nonsense", "cuda:97"):
        with pytest.raises(ValueError, match=f"`device` must be one that .*{device}"):
            operator(found, device=device)
    nothing = one_layer(torch.zeros(4, 4, dtype=DOUBLE), covariance(3, 9, 1))
    assert float((opened(nothing, "exact") @ torch.ones(12, dtype=DOUBLE)).norm()) == 0
    with pytest.raises(UsageError, match=r"singular.*damping comes to 0: leave the layer out"):
        opened(nothing, "exact").solve(torch.ones(12, dtype=DOUBLE))
    broken = dataclasses.replace(factor_set(found), parameters=None)
    with pytest.raises(BrokenFactors, match="collect them again"):
        operator_of(broken)


def operator_of(factors: FactorSet) -> KroneckerOperator:
    return KroneckerOperator(factors, OperatorOptions())
