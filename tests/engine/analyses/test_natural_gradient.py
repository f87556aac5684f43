"""The analysis `natural_gradient`: every number against the dense float64 matrix and torch's own gradient."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from catalog import DOCUMENT
from catalog.analyses.analysis import LayerResult, most_decomposed
from catalog.analyses.capacity import CapacityParams
from catalog.analyses.natural_gradient import GradientFile, NaturalGradientParams, NaturalGradientSummary
from catalog.record import FieldError, canonical_json
from catalog.requests.collection import Collection, Stabilisation
from catalog.requests.inputs import BuiltinData, BuiltinModel, Task
from catalog.requests.job import FactorsReference
from catalog.requests.woodbury import Woodbury
from engine.analyses.capacity import Capacity
from engine.analyses.factors import KeptFactors
from engine.analyses.natural_gradient import NaturalGradient
from engine.collect import JobFactors, collect_or_read
from engine.errors import UsageError, WrongShape
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.factors.kronecker_factors import Factors
from engine.linalg.damping import damping
from engine.linalg.linear_operator import Structured
from engine.measurement import decompose_layer
from engine.measurement.layer_measurement import measure_layers
from engine.operators.kronecker.layer_store import OperatorOptions
from engine.operators.kronecker_operator import KroneckerOperator
from engine.operators.parameter_space import ParameterSpace
from engine.workspace import JobResults, ModelInputs, Workspace
from kronoscope.local import measure
from tests.oracles import MemoryArtifacts, workspace

EXACT = 1e-8
POWERS = (1.0, 0.5)


class Tied(nn.Module):
    """An embedding whose table is the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.head(torch.tanh(self.mix(self.table(ids)).mean(1)))
        return hidden


class Attention(nn.Module):
    """Parameters in one tensor, and one that is only added."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.shift = nn.Parameter(torch.linspace(-0.3, 0.3, 4))
        self.project = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        found: Tensor = self.project((mixed + self.shift).mean(1))
        return found


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.ConvTranspose2d(6, 4, 2, groups=2, bias=False), nn.Tanh(),
        nn.Flatten(), nn.Linear(4 * 9, 3),
    )  # fmt: skip


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(7, 5), nn.Flatten(), nn.Linear(15, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4, bias=False)
    )


def wide_head() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 40))


def ids(length: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (12, length), generator=torch.Generator().manual_seed(1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(12, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


LABELS = torch.arange(12) % 3
NETS: Mapping[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "perceptron": (perceptron, ids(3, 7)),
    "tied": (Tied, ids(4, 9)),
    "grouped": (convolutions, numbers(4, 4, 4)),
    "attention": (Attention, numbers(3, 4)),
    "wide_head": (wide_head, numbers(6)),
}


def job(net: str, params: NaturalGradientParams, **options: Any) -> tuple[nn.Module, Workspace]:
    make, inputs = NETS[net]
    torch.manual_seed(0)
    model = make().double()
    chunks = [(inputs[:5], LABELS[:5]), (inputs[5:], LABELS[5:])]
    space = workspace(model, chunks, "classification", **{"fisher": "empirical", "batch_size": 5} | options)
    space.options.woodbury = Woodbury(policy="all" if net == "wide_head" else "dense")
    space.options.kinds = ("natural_gradient",)
    space.options.keep = ("directions",)
    space.options.decomposition = most_decomposed([params])
    return model, space


def run(params: NaturalGradientParams, space: Workspace) -> tuple[dict[str, LayerResult], NaturalGradientSummary]:
    space.options.params = {"natural_gradient": params}
    rows: dict[str, LayerResult] = {}
    analysis = NaturalGradient(params, space).rows()
    while True:
        try:
            row = next(analysis)
        except StopIteration as end:
            return rows, end.value
        rows[row.layer] = row


def gradient_of(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy(model(inputs), LABELS)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def dense_side(side: Any, scale: float) -> Tensor:
    matrix = side.to_dense(torch.float64) if not isinstance(side, Tensor) else side.double() * scale
    return torch.diag(matrix) if matrix.ndim == 1 else matrix


def dense_layer(whole: FactorSet, facts: LayerFacts, kind: str, of: str) -> tuple[Tensor, Tensor]:
    """F undamped and damped over the layer's own (out, in), from its stored factors and linear algebra alone."""
    factors: Factors = whole.load(facts.ordinal)
    A, G = dense_side(factors.A, factors.scale_A), dense_side(factors.G, factors.scale_G)
    lam = damping(
        float(A.trace()) / len(A), float(G.trace()) / len(G), Stabilisation(), block=facts.form.endswith("block")
    )
    plain = torch.kron(G, A)
    if of == "ekfac":
        assert whole.load_corrected is not None
        own = whole.load_corrected(facts.ordinal)
        q_g, q_a = (
            torch.eye(size, dtype=torch.float64) if basis is None else basis.double()
            for basis, size in ((own.eigenvectors_G, len(G)), (own.eigenvectors_A, len(A)))
        )
        turn = torch.kron(q_g, q_a)
        plain = turn @ torch.diag(own.eigenvalues.double().reshape(-1)) @ turn.T
    one = torch.eye(len(plain), dtype=torch.float64)
    if kind == "factored":
        return plain, torch.kron(
            G + (lam.G or 0) * torch.eye(len(G)).double(), A + (lam.A or 0) * torch.eye(len(A)).double()
        )
    return plain, plain + (lam.joint or 0) * one if kind == "exact" else plain


def spectral_power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.pow(exponent)) @ vectors.T


CASES = [
    *itertools.product(NETS, ["exact", "factored"], ["kfac"]),
    *itertools.product(["perceptron", "grouped", "attention"], ["exact"], ["ekfac"]),
]


@pytest.mark.part(of=24, by=("of", "kind"))
@pytest.mark.parametrize(("net", "kind", "of"), CASES)
def test_every_number_is_that_of_the_dense_matrix(net: str, kind: Any, of: Any) -> None:
    params = NaturalGradientParams(power=POWERS, damping=kind, of=of)
    model, space = job(net, params, ekfac=of == "ekfac")
    rows, summary = run(params, space)
    whole = collect_or_read(space)
    gradients = gradient_of(model, NETS[net][1])
    places = ParameterSpace.of(whole)
    flat = places.flatten(gradients)
    directions = torch.zeros(places.size, len(POWERS), dtype=torch.float64)
    sums = {power: [0.0, 0.0] for power in POWERS}
    for facts in whole.layers:
        metrics = rows[facts.name].metrics
        V = places.gather(facts, flat[:, None])[:, 0].reshape(-1)
        plain, damped = dense_layer(whole, facts, kind, of)
        assert metrics.gradient_norm == pytest.approx(float(V.norm()), rel=EXACT)
        largest = float(torch.linalg.eigvalsh(plain)[-1])
        if kind == "exact":
            assert metrics.damping_share == pytest.approx(metrics.damping / largest, rel=1e-6)
        for place, (power, found) in enumerate(zip(POWERS, metrics.directions, strict=True)):
            d = torch.linalg.solve(damped, V) if power == 1 else spectral_power(damped, -power) @ V
            inner, curvature = float(V @ d), float(d @ plain @ d)
            assert found.power == power
            assert found.inner == pytest.approx(inner, rel=EXACT), facts
            assert found.norm == pytest.approx(float(d.norm()), rel=EXACT)
            assert found.cosine == pytest.approx(inner / float(V.norm() * d.norm()), rel=EXACT)
            assert found.effective_step == pytest.approx(inner / float(V @ V), rel=EXACT)
            assert found.curvature == pytest.approx(curvature, rel=EXACT)
            assert found.best_step == pytest.approx(inner / curvature, rel=EXACT)
            assert abs(found.largest) == pytest.approx(float(d.abs().max()), rel=EXACT)
            assert (found.residual is None) == (power != 1)
            assert found.residual is None or found.residual <= EXACT
            sums[power][0] += inner
            sums[power][1] += float(d @ d)
            own = d.reshape(facts.out_dim, 1, facts.in_dim)
            kept = directions[:, place : place + 1].contiguous()
            places.scatter(facts, own, kept)
            directions[:, place : place + 1] = kept
    written = space.ports.artifacts
    for place, (power, found) in enumerate(zip(POWERS, summary.directions, strict=True)):
        assert found.inner == pytest.approx(sums[power][0], rel=EXACT)
        assert found.norm == pytest.approx(math.sqrt(sums[power][1]), rel=EXACT)
        assert found.artifact == f"directions/{power!r}.safetensors"
        stored = places.flatten(written.load_tensors(found.artifact))
        assert float((stored - directions[:, place]).norm() / directions[:, place].norm()) <= EXACT
        # the parameter that is named has the number that is named
        for row in rows.values():
            if row.metrics is not None:
                told = row.metrics.directions[place]
                tensor = written.load_tensors(found.artifact)[told.largest_parameter]
                assert float(tensor[told.largest_index]) == pytest.approx(told.largest, rel=1e-12)
    assert summary.gradient_norm == pytest.approx(float(flat.norm()), rel=EXACT)
    assert summary.uncovered == ()
    assert summary.uncovered_share == 0
    routes = {row.metrics.directions[0].route for row in rows.values()}
    assert routes == ({"rows", "eigenvectors"} if net == "wide_head" else {"eigenvectors"})


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("net", NETS)
def test_the_natural_gradient_by_solves_needs_no_eigenvector(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was decomposed")

    monkeypatch.setattr(decompose_layer, "decompose", never)
    monkeypatch.setattr(Structured, "decompose", never)
    monkeypatch.setattr("engine.factors.dense.decompose", never)
    params = NaturalGradientParams(damping="factored")
    model, space = job(net, params)
    rows, _ = run(params, space)
    whole = collect_or_read(space)
    places = ParameterSpace.of(whole)
    flat = places.flatten(gradient_of(model, NETS[net][1]))
    for facts in whole.layers:
        V = places.gather(facts, flat[:, None])[:, 0].reshape(-1)
        _, damped = dense_layer(whole, facts, "factored", "kfac")
        (found,) = rows[facts.name].metrics.directions
        assert found.inner == pytest.approx(float(V @ torch.linalg.solve(damped, V)), rel=EXACT), facts
        assert found.residual <= EXACT
        assert found.route in ("solves", "rows")


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("net", NETS)
def test_a_square_root_twice_is_the_whole_and_the_file_is_the_operators_power(net: str) -> None:
    half, whole = NaturalGradientParams(power=(0.5,)), NaturalGradientParams(power=1.0)
    _, space = job(net, half)
    run(half, space)
    places = ParameterSpace.of(collect_or_read(space))
    once = space.ports.artifacts.load_tensors("directions/0.5.safetensors")
    operator = KroneckerOperator(collect_or_read(space), OperatorOptions(kind="exact"))
    space.inputs.gradient = once
    space.results = _same_factors(space)
    run(half, space)
    twice = places.flatten(space.ports.artifacts.load_tensors("directions/0.5.safetensors"))
    _, other = job(net, whole)
    run(whole, other)
    direct = places.flatten(other.ports.artifacts.load_tensors("directions/1.0.safetensors"))
    assert float((twice - direct).norm() / direct.norm()) <= EXACT
    applied = operator.power(-0.5).matvec(places.flatten(once))
    assert float((applied - twice).norm() / twice.norm()) <= EXACT


def _same_factors(space: Workspace) -> JobResults:
    """Results of a job that has its factors and nothing else yet."""
    fresh = JobResults()
    fresh.of(JobFactors).factors = collect_or_read(space)
    return fresh


@pytest.mark.parametrize("kind", ["exact", "factored"])
def test_two_runs_are_equal_to_the_bit(kind: Any) -> None:
    params = NaturalGradientParams(power=POWERS, damping=kind)

    def once() -> tuple[str, str, dict[str, Tensor]]:
        _, space = job("perceptron", params, dtype="float32")
        rows, summary = run(params, space)
        told = [(row.layer, asdict(row.metrics)) for row in rows.values()]
        kept = {
            f"{power} {name}": tensor
            for power in POWERS
            for name, tensor in space.ports.artifacts.load_tensors(f"directions/{power!r}.safetensors").items()
        }
        return canonical_json(told), canonical_json(asdict(summary)), kept

    first, second = once(), once()
    assert first[:2] == second[:2]
    assert all(torch.equal(first[2][name], tensor) for name, tensor in second[2].items())


def test_rows_of_an_earlier_attempt_are_not_yielded_again_and_the_rest_is_whole() -> None:
    params = NaturalGradientParams()
    _, space = job("perceptron", params)
    rows, summary = run(params, space)
    _, again = job("perceptron", params)
    again.resume.completed = frozenset({("natural_gradient", 0), ("natural_gradient", 2)})
    rest, told = run(params, again)
    assert {row.ordinal for row in rest.values()} == {row.ordinal for row in rows.values()} - {0, 2}
    assert told == summary
    first, second = (each.ports.artifacts.load_tensors("directions/1.0.safetensors") for each in (space, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_job_decomposes_once_for_all_of_its_analyses(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    whole = decompose_layer.decompose

    def counted(factor: Tensor, layer: str, **named: Any) -> Any:
        made.append(layer)
        return whole(factor, layer, **named)

    monkeypatch.setattr(decompose_layer, "decompose", counted)
    monkeypatch.setattr("engine.factors.dense.decompose", counted)
    params = NaturalGradientParams(power=POWERS)
    _, space = job("grouped", params)
    space.options.kinds = ("capacity", "natural_gradient")
    list(Capacity(CapacityParams(), space).rows())
    run(params, space)
    # A and G of two groups, of two more, and of the head
    assert len(made) == 10
    assert NaturalGradientParams(of="ekfac").decomposition == "none"
    assert NaturalGradientParams(damping="factored").decomposition == "none"
    assert NaturalGradientParams(damping="factored", power=POWERS).decomposition == "vectors"


def test_the_rows_of_other_labels_are_not_those_of_the_gradient() -> None:
    params = NaturalGradientParams()
    _, space = job("wide_head", params, fisher="mc")
    rows, summary = run(params, space)
    assert {row.metrics.directions[0].route for row in rows.values()} == {"eigenvectors"}
    kept = {facts.name for facts in collect_or_read(space).layers if facts.representation_G == "woodbury"}
    assert kept
    assert all("fisher: mc" in rows[name].metrics.why_not_rows for name in kept)
    assert summary.routes == {"eigenvectors": 2}


def test_a_gradient_in_float32_is_pushed_through_its_rows() -> None:
    """At λ of 1e-10 of the largest eigenvalue the general route is off by more than the direction itself."""
    params = NaturalGradientParams()
    model, space = job("wide_head", params, dtype="float32")
    space.options.woodbury = Woodbury(policy="all", dtype="fp32")
    space.options.stabilisation = Stabilisation(damping=1e-9)
    rows, _ = run(params, space)
    row = rows["2"]
    assert row.metrics.directions[0].route == "rows"
    # the rows that belong to it, in float64 from the model itself
    inputs = NETS["wide_head"][1]
    with torch.no_grad():
        hidden = torch.cat([model[:2].double()(inputs), torch.ones(12, 1).double()], 1)
        gradients = torch.softmax(model[2](hidden[:, :-1]), 1) - nn.functional.one_hot(LABELS, 40)
    lam = row.metrics.damping
    left, singular, right = torch.linalg.svd(gradients / 12**0.5, full_matrices=False)
    values, vectors = torch.linalg.eigh(hidden.T @ hidden / 12)
    turned = singular[:, None] * (left.T @ (hidden / 12**0.5) @ vectors)
    expected = right.T @ (turned / (torch.outer(singular**2, values) + lam)) @ vectors.T
    stored = space.ports.artifacts.load_tensors("directions/1.0.safetensors")
    found = torch.cat([stored["2.weight"], stored["2.bias"][:, None]], 1).double()
    through = float((found - expected).norm() / expected.norm())
    space.inputs.gradient = {name: tensor.float() for name, tensor in gradient_of(model, inputs).items()}
    space.results = _same_factors(space)
    general, summary = run(params, space)
    assert general["2"].metrics.directions[0].route == "eigenvectors"
    assert "not that of the data" in general["2"].metrics.why_not_rows
    stored = space.ports.artifacts.load_tensors("directions/1.0.safetensors")
    found = torch.cat([stored["2.weight"], stored["2.bias"][:, None]], 1).double()
    plain = float((found - expected).norm() / expected.norm())
    assert through <= 5e-3
    assert plain > 100 * through
    assert general["2"].metrics.below_rounding
    assert summary.below_rounding == ("0", "2")


def test_what_rounding_spoils_is_said_with_the_residual() -> None:
    params = NaturalGradientParams()
    _, space = job("perceptron", params, dtype="float32")
    space.options.stabilisation = Stabilisation(damping=1e-9)
    said: list[str] = []
    space.ports.log = lambda level, message: said.append(message) if level == "warning" else None
    rows, summary = run(params, space)
    coarse = {name for name, row in rows.items() if row.metrics.below_rounding}
    # a diagonal A is not decomposed, but its G is
    assert coarse == set(summary.below_rounding) == {"0", "2", "3", "5"}
    (warning,) = [each for each in said if "less than the factors' precision resolves" in each]
    assert "λ/λ_max" in warning
    assert "residual" in warning
    assert "stabilisation.damping" in warning
    _, wide = job("perceptron", params)
    assert run(params, wide)[1].below_rounding == ()


def test_an_undamped_singular_layer_is_refused_by_name() -> None:
    params = NaturalGradientParams(power=1.0, damping="none")
    _, space = job("wide_head", params)
    with pytest.raises(UsageError, match=r"layer `2`: its curvature is singular .*power -1 is not defined"):
        run(params, space)
    # a positive power of F is defined without any damping
    forward = NaturalGradientParams(power=-1.0, damping="none")
    model, space = job("tied", forward)
    rows, _ = run(forward, space)
    whole = collect_or_read(space)
    places = ParameterSpace.of(whole)
    flat = places.flatten(gradient_of(model, NETS["tied"][1]))
    for facts in whole.layers:
        V = places.gather(facts, flat[:, None])[:, 0].reshape(-1)
        plain, _ = dense_layer(whole, facts, "none", "kfac")
        assert rows[facts.name].metrics.directions[0].inner == pytest.approx(float(V @ plain @ V), rel=EXACT)
        assert rows[facts.name].metrics.damping_share is None


class Idle(nn.Module):
    """A layer that the loss does not see, and one that no family treats."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.idle = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.body(x) + 0 * self.idle(x)))
        return found


def test_a_layer_without_curvature_has_no_direction() -> None:
    params = NaturalGradientParams(power=POWERS)
    torch.manual_seed(0)
    space = workspace(Idle().double(), [(numbers(6), LABELS)], "classification", fisher="empirical")
    space.options.decomposition = "vectors"
    rows, summary = run(params, space)
    idle = rows["idle"]
    assert idle.status == "zero_curvature"
    assert [each.route for each in idle.metrics.directions] == ["zero", "zero"]
    assert [each.norm for each in idle.metrics.directions] == [0, 0]
    assert idle.metrics.directions[0].cosine is None
    assert summary.directions[0].norm > 0
    space.inputs.gradient = {
        name: torch.ones_like(parameter) for name, parameter in space.inputs.model.named_parameters()
    }
    space.results = _same_factors(space)
    with pytest.raises(UsageError, match=r"layer `idle` has no curvature.*gradient that is zero there"):
        run(params, space)


def test_a_curvature_that_float32_has_lost_takes_float64() -> None:
    torch.manual_seed(0)
    model = Idle()
    model.head.bias.data = torch.tensor([60.0, 0.0, 0.0])
    data = [(numbers(6).float(), torch.zeros(len(LABELS), dtype=torch.long))]
    space = workspace(model, data, "classification", dtype="float32", fisher="empirical")
    space.options.decomposition = "vectors"
    with pytest.raises(UsageError, match=r"layer `(body|head)` has no curvature.*take `collection.dtype: float64`"):
        run(NaturalGradientParams(), space)
    wide = workspace(model.double(), [(numbers(6), data[0][1])], "classification", dtype="float64", fisher="empirical")
    wide.options.decomposition = "vectors"
    assert run(NaturalGradientParams(), wide)[1].directions[0].norm > 0


class Cancelling(Idle):
    """A layer of which every example's gradient is zero, and neither its A nor its G is."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.body(x) + self.idle(x) - self.idle(x)))
        return found


@pytest.mark.parametrize("damping", ["exact", "none"])
def test_a_layer_whose_corrected_eigenvalues_are_zero_has_the_direction_of_its_damping(damping: Any) -> None:
    params = NaturalGradientParams(of="ekfac", damping=damping)
    torch.manual_seed(0)
    data = [(torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64))]
    space = workspace(Cancelling().double(), data, "regression", fisher="type2", ekfac=True, dtype="float64")
    facts = next(each for each in collect_or_read(space).layers if each.name == "idle")
    gradient = {name: torch.zeros_like(parameter) for name, parameter in space.inputs.model.named_parameters()}
    space.inputs.gradient, space.results = gradient, _same_factors(space)
    rows, _ = run(params, space)
    idle = rows["idle"].metrics
    assert (idle.damping_share, idle.below_rounding, idle.directions[0].norm) == (None, False, 0)
    gradient["idle.weight"] = torch.ones_like(gradient["idle.weight"])
    space.results = _same_factors(space)
    if damping == "none":
        with pytest.raises(UsageError, match="layer `idle` has no curvature"):
            run(params, space)
        return
    idle = run(params, space)[0]["idle"].metrics
    assert idle.directions[0].norm == pytest.approx(math.sqrt(facts.in_dim * facts.out_dim - 4) / idle.damping)
    assert (idle.damping_share, idle.directions[0].curvature, idle.directions[0].best_step) == (None, 0, None)


def test_uncovered_parameters_are_named_with_their_share_of_the_gradient() -> None:
    params = NaturalGradientParams()
    model, space = job("perceptron", params)
    whole = collect_or_read(space)
    kept = tuple(facts for facts in whole.layers if facts.name != "5")
    space.results.of(JobFactors).factors = dataclasses.replace(whole, layers=kept)
    _, summary = run(params, space)
    gradients = gradient_of(model, NETS["perceptron"][1])
    total = sum(float(gradient.square().sum()) for gradient in gradients.values())
    assert summary.uncovered == ("5.weight",)
    assert summary.uncovered_share == pytest.approx(float(gradients["5.weight"].square().sum()) / total, rel=1e-9)
    stored = space.ports.artifacts.load_tensors("directions/1.0.safetensors")
    assert set(stored) == set(gradients)
    assert not stored["5.weight"].any()


def test_a_gradient_of_ones_own_is_checked_tensor_by_tensor() -> None:
    params = NaturalGradientParams(gradient=GradientFile(path="gradient.safetensors"))
    model, space = job("wide_head", params)
    gradient = gradient_of(model, NETS["wide_head"][1])

    def refused(**changes: Any) -> None:
        given = {name: tensor for name, tensor in {**gradient, **changes}.items() if tensor is not None}
        space.inputs.gradient = given
        run(params, space)

    wrong = {"2.bias": torch.zeros(41)}
    with pytest.raises(
        WrongShape,
        match=r"`2\.bias` must have the parameter's shape \(40,\) \(got \(41,\)\); the gradient holds 276 numbers, and "
        r"the trainable parameters 275",
    ):
        refused(**wrong)
    with pytest.raises(WrongShape, match=r"no tensor `0\.bias` of shape \(5,\).*zeros where there is no gradient"):
        refused(**{"0.bias": None})
    with pytest.raises(WrongShape, match=r"`1\.weight` is no trainable parameter of the model; the parameters are"):
        refused(**{"1.weight": torch.zeros(2)})
    with pytest.raises(UsageError, match=r"`0\.bias` must hold floating-point numbers \(got torch\.int64\)"):
        refused(**{"0.bias": torch.zeros(5, dtype=torch.int64)})
    with pytest.raises(UsageError, match=r"`0\.bias` holds 1 NaN or infinite numbers of 5"):
        refused(**{"0.bias": torch.tensor([0, 1, math.nan, 0, 0])})
    # nothing was collected for any of them
    assert space.results.of(JobFactors).factors is None
    space.inputs.gradient = None
    with pytest.raises(UsageError, match="names a file, which is read by jobs alone"):
        run(params, space)
    refused()


def test_stored_factors_take_a_gradient_and_need_one() -> None:
    params = NaturalGradientParams(power=POWERS)
    model, space = job("grouped", params)
    space.options.kinds = ("factors", "natural_gradient")
    list(KeptFactors(None, space).rows())
    rows, _ = run(params, space)
    stored = Workspace(
        inputs=ModelInputs(stored=space.ports.artifacts),
        ports=dataclasses.replace(space.ports, artifacts=MemoryArtifacts()),
    )
    stored.options.decomposition = "vectors"
    with pytest.raises(UsageError, match="stored factors hold neither a model nor data"):
        run(params, stored)
    stored.inputs.gradient = gradient_of(model, NETS["grouped"][1])
    again, summary = run(params, stored)
    assert summary.gradient == "file"
    for name, row in rows.items():
        for one, other in zip(row.metrics.directions, again[name].metrics.directions, strict=True):
            assert other.inner == pytest.approx(one.inner, rel=1e-9)
            assert other.norm == pytest.approx(one.norm, rel=1e-9)


def test_another_gradient_in_a_later_attempt_is_refused() -> None:
    params = NaturalGradientParams(gradient=GradientFile(path="gradient.safetensors"))
    model, space = job("wide_head", params)
    space.ports.scratch, space.resume.checkpoint_seconds = MemoryArtifacts(), 1.0
    space.inputs.gradient = gradient_of(model, NETS["wide_head"][1])
    run(params, space)
    _, later = job("wide_head", params)
    later.ports.scratch, later.resume.checkpoint_seconds = space.ports.scratch, 1.0
    later.inputs.gradient = {name: 2 * tensor for name, tensor in space.inputs.gradient.items()}
    with pytest.raises(UsageError, match="another than when this job began"):
        run(params, later)


def test_a_head_without_eigenvectors_is_refused_for_a_root_and_solved_for_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 4), nn.Linear(4, 30, bias=False)).double()
    words = torch.randint(0, 30, (2, 3), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("engine.factors.softmax_fisher.BASIS_ROWS", 0)
    for power, refused in ((0.5, True), (1.0, False)):
        space = workspace(model, [(words, words)], "causal_lm", fisher="type2", batch_size=2)
        params = NaturalGradientParams(power=power)
        space.options.woodbury, space.options.decomposition = Woodbury(policy="all"), params.decomposition
        kept = {facts.name: facts.representation_G for facts in collect_or_read(space).layers}
        assert kept["1"] == "softmax_head"
        if refused:
            with pytest.raises(UsageError, match=r"layer `1`: its G is kept as `softmax_head`.*power 0\.5"):
                run(params, space)
            continue
        rows, _ = run(params, space)
        whole = collect_or_read(space)
        facts = next(each for each in whole.layers if each.name == "1")
        loss = nn.functional.cross_entropy(model(words)[:, :-1].reshape(-1, 30), words[:, 1:].reshape(-1))
        (V,) = torch.autograd.grad(loss, [model[1].weight])
        _, damped = dense_layer(whole, facts, "exact", "kfac")
        expected = float(V.reshape(-1) @ torch.linalg.solve(damped, V.reshape(-1)))
        assert rows["1"].metrics.directions[0].inner == pytest.approx(expected, rel=EXACT)


def document(**fields: Any) -> Any:
    given = {
        "kind": "natural_gradient",
        "model": BuiltinModel(source="builtin", name="digits_cnn"),
        "data": BuiltinData(source="builtin", name="digits"),
        "task": Task(type="classification"),
    }
    return DOCUMENT(**{name: value for name, value in {**given, **fields}.items() if value is not None})


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"power": ()}, "must list 1 to 8 numbers"),
        ({"power": tuple(range(1, 10))}, "must list 1 to 8 numbers"),
        ({"power": 0.0}, "finite number from −4 to 4 other than 0"),
        ({"power": math.inf}, "finite number"),
        ({"power": math.nan}, "finite number"),
        ({"power": 5.0}, r"\(got 5\.0\)"),
        ({"power": (1.0, 0.5, 1.0)}, "must list each number once"),
        ({"of": "ekfac", "damping": "factored"}, "take `exact`"),
    ],
)
def test_options_that_mean_nothing_are_refused(params: dict[str, Any], said: str) -> None:
    with pytest.raises(FieldError, match=said):
        NaturalGradientParams(**params)


def test_a_document_that_cannot_be_served_is_refused() -> None:
    with pytest.raises(FieldError, match="names nothing"):
        GradientFile(path="")
    assert document().natural_gradient.powers == (1.0,)
    without = {"model": None, "data": None, "task": None}
    reference = FactorsReference(path="out")
    with pytest.raises(FieldError, match="`factors` hold neither a model nor data") as refused:
        document(factors=reference, **without)
    assert refused.value.field == "natural_gradient.gradient"
    given = NaturalGradientParams(gradient=GradientFile(path="gradient.safetensors"))
    assert document(factors=reference, natural_gradient=given, **without)
    # the model's own loss has a gradient, whatever its Hessian
    assert document(
        task=Task(type="classification", loss="model"), collection=Collection(fisher="empirical"),
    )  # fmt: skip
    with pytest.raises(FieldError, match="`sentence_embedding` has no targets"):
        document(task=Task(type="sentence_embedding"))
    with pytest.raises(FieldError, match="which is not collected"):
        document(natural_gradient=NaturalGradientParams(of="ekfac"))
    with pytest.raises(FieldError, match="which are those of `natural_gradient`"):
        document(kind="factors", keep=("directions",))
    assert document(keep=("directions",)).keep == ("directions",)


def test_a_notebook_measures_it_too() -> None:
    model = perceptron().double()
    found = measure(
        model, [(NETS["perceptron"][1], LABELS)], task="classification", kinds=["natural_gradient"],
        collection={"dtype": "float64", "ekfac": True}, params={"natural_gradient": {"power": [1, 0.5], "of": "ekfac"}},
    )  # fmt: skip
    assert [each.power for each in found.summary["natural_gradient"].directions] == [1.0, 0.5]


@pytest.mark.part(of=16, by=("kind",))
@pytest.mark.parametrize("level", [1e-3, 1e-5])
@pytest.mark.parametrize(("kind", "power"), [("exact", (1.0, 0.5)), ("factored", (1.0, 0.5))])
def test_directions_by_float32_factors_keep_the_digits_that_the_condition_leaves(
    kind: Any, power: tuple[float, ...], level: float
) -> None:
    """Eigenvectors that were rounded between decomposition and product would leave 1e-7 times the condition."""
    params = NaturalGradientParams(power=power, damping=kind)
    model, space = job("grouped", params, dtype="float64", storage_dtype="float32")
    space.options.stabilisation = Stabilisation(damping=level)
    run(params, space)
    whole = collect_or_read(space)
    places = ParameterSpace.of(whole)
    flat = places.flatten(gradient_of(model, NETS["grouped"][1]))
    # as they are recorded: traces of float32 factors are rounded too
    dampings = {layer.facts.name: layer.damping for layer in measure_layers(space)}
    for facts in whole.layers:
        factors = whole.load(facts.ordinal)
        assert factors.A.dtype == torch.float32
        A, G = dense_side(factors.A, factors.scale_A).numpy(), dense_side(factors.G, factors.scale_G).numpy()
        lam = dampings[facts.name]
        if kind == "exact":
            damped = np.kron(G, A) + lam.joint * np.eye(len(A) * len(G))
        else:
            damped = np.kron(G + lam.G * np.eye(len(G)), A + lam.A * np.eye(len(A)))
        values, vectors = np.linalg.eigh(damped)
        V = places.gather(facts, flat[:, None])[:, 0].reshape(-1).numpy()
        for each in power:
            expected = vectors @ (values**-each * (vectors.T @ V))
            stored = places.flatten(space.ports.artifacts.load_tensors(f"directions/{each!r}.safetensors"))
            found = places.gather(facts, stored[:, None])[:, 0].reshape(-1).numpy()
            error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
            assert error <= 4 * values[-1] / values[0] * 2.2e-16, (facts.name, each)
