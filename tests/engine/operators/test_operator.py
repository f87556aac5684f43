"""Every verb is that of the dense float64 matrix, for every form and damping; numbers stand where autograd has them."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import kronoscope.local
from catalog.requests.collection import Collection, Stabilisation
from catalog.requests.woodbury import Woodbury
from engine.analyses.factors import KeptFactors
from engine.errors import BrokenFactors, NoSuchLayer, NotConverged, UsageError
from engine.factors.factor_files import read_factors
from engine.factors.factor_set import FactorSet, LayerFacts, ParameterShape
from engine.factors.kronecker_factors import Factors
from engine.factors.softmax_fisher import SoftmaxFisher
from engine.layers.parameter_slice import Window
from engine.linalg.damping import damping
from engine.operators.kronecker.layer_store import OperatorOptions
from engine.operators.kronecker_operator import KroneckerOperator
from kronoscope.local import Measurement, measure
from tests.oracles import workspace

EXACT = 1e-10


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
    """Parameters in one tensor, a transposed weight, and one that is only added."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.shift = nn.Parameter(torch.linspace(-0.3, 0.3, 4))
        self.project = Conv1D(3, 4)

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


class Siblings(nn.Module):
    """Two layers that are fed by one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.left(x)) * torch.sigmoid(self.right(x)))
        return found


def wide_head() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 40))


def ids(length: int, classes: int, count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, classes, (count, length), generator=generator), torch.arange(count) % 3


def numbers(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(12, *shape, dtype=torch.float64, generator=generator), torch.arange(12) % 3


NETS: Mapping[str, tuple[Any, tuple[Tensor, Tensor]]] = {
    "perceptron": (perceptron, ids(3, 7)),
    "tied": (Tied, ids(4, 9)),
    "convolutions": (convolutions, numbers(4, 4, 4)),
    "attention": (Attention, numbers(3, 4)),
    "wide_head": (wide_head, numbers(6)),
}


def measured(net: str, **options: Any) -> tuple[nn.Module, Measurement]:
    make, batch = NETS[net]
    torch.manual_seed(0)
    model = make().double()
    collection = Collection(
        **{"dtype": "float64", "fisher": "empirical", "batch_size": 5, "self_check": "off"} | options
    )
    woodbury = Woodbury(policy="all" if net == "wide_head" else "dense")
    found = measure(model, [batch], task="classification", kinds=["factors"], collection=collection, woodbury=woodbury)
    return model, found


def factor_set(found: Measurement) -> FactorSet:
    return found.factors.collected


def operator(factors: FactorSet, kind: str = "none", **options: Any) -> KroneckerOperator:
    return KroneckerOperator(
        factors,
        OperatorOptions(kind=kind, **options),  # type: ignore[arg-type] # each of the three
    )


def dense_layer(found: Measurement, name: str, kind: str, of: str) -> Tensor:
    """M of one layer as a matrix over its own (out, in), from dense factors and linear algebra alone."""
    layer, facts = found.factors[name], next(each for each in factor_set(found).layers if each.name == name)
    A, G = layer.A.double(), layer.G.double()
    lam = damping(
        float(A.trace()) / len(A), float(G.trace()) / len(G), Stabilisation(), block=facts.form.endswith("block")
    )
    if kind == "factored":
        return torch.kron(G + (lam.G or 0) * torch.eye(len(G)).double(), A + (lam.A or 0) * torch.eye(len(A)).double())
    whole = torch.kron(G, A)
    if of == "ekfac":
        q_a, q_g = layer.eigenvectors_A, layer.eigenvectors_G
        turn = torch.kron(
            torch.eye(len(G)).double() if q_g is None else q_g.double(),
            torch.eye(len(A)).double() if q_a is None else q_a.double(),
        )
        whole = turn @ torch.diag(layer.corrected_eigenvalues.double().reshape(-1)) @ turn.T
    return whole + (lam.joint or 0) * torch.eye(len(whole)).double() if kind == "exact" else whole


def close(found: Tensor, expected: Tensor, tolerance: float = EXACT) -> bool:
    return float((found - expected).norm()) <= tolerance * float(expected.norm())


def spectral_power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).pow(exponent)) @ vectors.T


def softmax_side() -> SoftmaxFisher:
    """G of a head of 11 classes over 5 terms of equal weight."""
    logits = torch.randn(5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return SoftmaxFisher(rows=torch.softmax(logits, -1), weights=torch.full((5,), 0.2, dtype=torch.float64))


def head_facts(out: int, into: int) -> LayerFacts:
    facts = factor_set(measured("perceptron")[1]).layers[-1]
    window = Window(
        parameter="head.weight", offset=0, shape=(out, into), strides=(into, 1), top=0, left=0, height=out, width=into
    )
    return dataclasses.replace(
        facts, ordinal=0, name="head", in_dim=into, out_dim=out, bias=False, parameter_count=out * into,
        representation_G="softmax_head", windows=(window,), rank_bound_A=None, rank_bound_G=None, shared_A_with=None,
    )  # fmt: skip


CASES = [
    *itertools.product(NETS, ["none", "exact", "factored"], ["kfac"]),
    *itertools.product(["perceptron", "convolutions", "attention"], ["none", "exact"], ["ekfac"]),
]


@pytest.mark.part(of=24, by=("of",))
@pytest.mark.parametrize(("net", "kind", "of"), CASES)
def test_every_verb_of_every_layer_is_that_of_its_dense_matrix(net: str, kind: str, of: str) -> None:
    _, found = measured(net, ekfac=of == "ekfac")
    whole = operator(factor_set(found), kind, of=of)
    forms = set()
    for facts in factor_set(found).layers:
        own, dense = whole.layer(facts.name), dense_layer(found, facts.name, kind, of)
        forms.add((facts.form, facts.representation_G))
        right = torch.randn(
            facts.out_dim, 3, facts.in_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
        )
        columns = right.transpose(1, 2).reshape(-1, 3)

        def as_columns(matrices: Tensor) -> Tensor:
            return matrices.transpose(1, 2).reshape(-1, 3)

        assert close(as_columns(own.apply(right)), dense @ columns), facts
        assert own.trace() == pytest.approx(float(dense.trace()), rel=EXACT)
        assert close(own.diagonal().reshape(-1), dense.diagonal())
        # twice, since the root of a zero eigenvalue is the root of its rounding
        assert close(as_columns(own.apply(own.apply(right, 0.5), 0.5)), dense @ columns)
        assert close(as_columns(own.apply(right, 2.0)), dense @ dense @ columns)
        if kind == "none":
            continue
        assert close(as_columns(own.apply(right, -1.0)), torch.linalg.solve(dense, columns)), facts
        assert close(as_columns(own.apply(right, -0.5)), spectral_power(dense, -0.5) @ columns)
        assert own.logdet() == pytest.approx(float(torch.linalg.slogdet(dense)[1]), rel=EXACT)
        assert own.trace(-1.0) == pytest.approx(float(torch.linalg.inv(dense).trace()), rel=EXACT)
        assert close(own.diagonal(-1.0).reshape(-1), torch.linalg.inv(dense).diagonal())
    expected = {
        "perceptron": {("diagonal", "dense"), ("kronecker", "dense"), ("block", "dense")},
        "tied": {("kronecker", "dense")},
        "convolutions": {("kronecker", "dense")},
        "attention": {("kronecker", "dense"), ("diagonal_block", "dense")},
        "wide_head": {("kronecker", "woodbury")},
    }
    assert forms == expected[net]


class OnePosition(nn.Module):
    """Every layer sees one position of one example."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.convolution = nn.Conv2d(2, 6, 2, groups=2)
        self.transposed = nn.ConvTranspose2d(6, 4, 1, groups=2)
        self.project = Conv1D(6, 4)
        self.norm = nn.LayerNorm(6)
        self.experts = nn.Parameter(torch.randn(3, 6, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        image = self.table(ids).view(-1, 2, 2, 2)
        features = torch.tanh(self.transposed(torch.tanh(self.convolution(image)))).flatten(1)
        hidden = self.norm(self.project(features)) @ self.experts[1]
        mixed, _ = self.attention(hidden[:, None], hidden[:, None], hidden[:, None], need_weights=False)
        found: Tensor = self.head(torch.tanh(mixed[:, 0] + hidden))
        return found


def test_numbers_stand_where_autograd_puts_them() -> None:
    """Of one position of one example, G ⊗ A is the gradient's outer product with itself."""
    torch.manual_seed(0)
    model = OnePosition().double()
    batch = (torch.tensor([[3]]), torch.tensor([1]))
    found = measure(
        model, [batch], task="classification", kinds=["factors"],
        collection=Collection(dtype="float64", fisher="empirical"), woodbury=Woodbury(policy="dense"),
    )  # fmt: skip
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    names = [name for name, _ in model.named_parameters()]
    gradients = dict(zip(names, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), strict=True))
    whole = operator(factor_set(found))
    assert whole.space.size == sum(parameter.numel() for parameter in model.parameters())
    flat = torch.cat([
        (parameter.new_zeros(parameter.shape) if gradients[name] is None else gradients[name]).reshape(-1)
        for name, parameter in model.named_parameters()
    ])  # fmt: skip
    covered = 0
    for facts in factor_set(found).layers:
        if facts.form == "diagonal_block":
            continue
        one = whole.restricted([facts.name])
        ones = torch.zeros(whole.space.size, 1, dtype=torch.float64)
        whole.space.scatter(facts, torch.ones(facts.out_dim, 1, facts.in_dim, dtype=torch.float64), ones)
        own = flat * ones[:, 0]
        if float(own.norm()) == 0:
            # over a single key, attention weighs by one whatever queries and keys are
            assert facts.name in ("attention.in_proj_weight[0:4]", "attention.in_proj_weight[4:8]")
            continue
        applied = one.matvec(flat)
        assert close(applied, own * float(own @ flat)), facts.name
        covered += facts.parameter_count
    assert covered >= 0.5 * whole.space.size
    assert {"convolution[1]", "project", "table", "norm"} <= set(whole.layers)


@pytest.mark.part(of=32, by=("kind",))
@pytest.mark.parametrize("basis", [True, False])
@pytest.mark.parametrize("kind", ["none", "exact", "factored"])
def test_a_softmax_head_is_applied_and_solved_without_a_dense_matrix(
    kind: str, basis: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = softmax_side()
    generator = torch.Generator().manual_seed(6)
    root = torch.randn(4, 9, dtype=torch.float64, generator=generator)
    A, G = root @ root.T / 9, side.to_dense(torch.float64)
    lam = damping(float(A.trace()) / 4, float(G.trace()) / 11, Stabilisation(damping=0.1), block=False)
    if not basis:
        monkeypatch.setattr("engine.factors.softmax_fisher.BASIS_ROWS", 0)
    given = Factors(layer="head", form="kronecker", bias=False, A=A, G=side)
    facts = head_facts(11, 4)
    factors = dataclasses.replace(
        factor_set(measured("perceptron")[1]), layers=(facts,), load=lambda _: given,
        parameters=(ParameterShape(name="head.weight", shape=(11, 4)),),
    )  # fmt: skip
    whole = operator(factors, kind, stabilisation=Stabilisation(damping=0.1))
    dense = torch.kron(G, A)
    if kind == "factored":
        dense = torch.kron(
            G + lam.G * torch.eye(11, dtype=torch.float64), A + lam.A * torch.eye(4, dtype=torch.float64)
        )
    elif kind == "exact":
        dense = dense + lam.joint * torch.eye(44, dtype=torch.float64)
    right = torch.randn(44, 2, dtype=torch.float64, generator=generator)
    assert close(whole @ right, dense @ right)
    assert whole.trace() == pytest.approx(float(dense.trace()), rel=EXACT)
    assert close(whole.diagonal(), dense.diagonal())
    if kind == "none":
        with pytest.raises((NotConverged, UsageError), match=r"eigenvectors|singular"):
            whole.solve(right)
        return
    assert close(whole.solve(right), torch.linalg.solve(dense, right), 1e-9)
    assert whole.logdet() == pytest.approx(float(torch.linalg.slogdet(dense)[1]), rel=EXACT)
    if basis:
        assert close(whole.sqrt() @ right, spectral_power(dense, 0.5) @ right)
        return
    with pytest.raises(NotConverged, match="eigenvectors"):
        whole.sqrt() @ right


@pytest.mark.parametrize("kind", ["exact", "factored"])
def test_roots_and_inverses_compose(kind: str) -> None:
    _, found = measured("perceptron")
    whole = operator(factor_set(found), kind)
    vector = torch.randn(whole.space.size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    applied, solved = whole @ vector, whole.solve(vector)
    root = whole.sqrt()
    twice = root @ (root @ vector)
    assert close(twice, applied)
    back = whole @ solved
    assert close(back, vector, 1e-9)
    assert whole.inverse().logdet() == pytest.approx(-whole.logdet(), rel=EXACT)
    assert whole.power(0.5).power(2.0).trace() == pytest.approx(whole.trace(), rel=EXACT)
    assert whole.adjoint is whole
    columns = torch.eye(whole.space.size, dtype=torch.float64)
    dense = whole @ columns
    torch.testing.assert_close(dense, dense.T)
    torch.testing.assert_close(dense.diagonal(), whole.diagonal())


def test_vectors_come_flat_in_columns_or_by_name() -> None:
    model, found = measured("tied")
    whole = operator(factor_set(found))
    names = [name for name, _ in model.named_parameters()]
    assert [each.name for each in whole.space.parameters] == names
    flat = torch.randn(whole.space.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    product = whole @ flat
    for place in range(3):
        single = whole @ flat[:, place]
        torch.testing.assert_close(single, product[:, place])
        by_name = whole.space.unflatten(flat[:, place].contiguous())
        named = whole @ by_name
        assert isinstance(named, Mapping)
        assert {name: tuple(tensor.shape) for name, tensor in named.items()} == {
            name: tuple(parameter.shape) for name, parameter in model.named_parameters()
        }
        torch.testing.assert_close(torch.cat([named[name].reshape(-1) for name in names]), single)
    single_precision = whole @ flat.float()
    assert single_precision.dtype == torch.float32
    torch.testing.assert_close(single_precision.double(), product, rtol=1e-5, atol=1e-6)


def test_stored_factors_give_the_same_and_are_read_again_within_a_budget() -> None:
    _, found = measured("perceptron")
    factors = factor_set(found)
    whole = operator(factors, "exact")
    tight = operator(factors, "exact", resident_bytes=1)
    vector = torch.ones(whole.space.size, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(whole.solve(vector), tight.solve(vector), rtol=0, atol=0)
    assert len(tight._store._layers) == 1
    assert len(whole._store._layers) == len(factors.layers)


def test_a_shared_activation_factor_is_read_once() -> None:
    torch.manual_seed(0)
    model = Siblings().double()
    found = measure(model, [numbers(6)], task="classification", kinds=["factors"])
    factors = factor_set(found)
    followers = [facts for facts in factors.layers if facts.shared_A_with is not None]
    assert followers
    whole = operator(factors)
    whole @ torch.ones(whole.space.size, dtype=torch.float64)
    for facts in followers:
        leader = factors.layers[facts.shared_A_with]  # type: ignore[index] # it is a number, by the line above
        assert whole.layer(facts.name).A is whole.layer(leader.name).A


def test_what_cannot_be_done_says_so() -> None:
    _, found = measured("perceptron")
    factors = factor_set(found)
    whole = operator(factors)
    with pytest.raises(UsageError, match=r"\(211,\).*got \(100,\).*ends within `2.weight`"):
        whole @ torch.ones(100)
    with pytest.raises(UsageError, match=r"`0\.weights`"):
        whole @ {"0.weights": torch.ones(7, 5)}
    with pytest.raises(UsageError, match=r"`0.weight`.*\(7, 5\).*\(5, 7\)"):
        whole @ {"0.weight": torch.ones(5, 7)}
    with pytest.raises(UsageError, match="floating-point"):
        whole @ torch.ones(whole.space.size, dtype=torch.int64)
    with pytest.raises(UsageError, match="finite"):
        whole.power(math.nan)
    with pytest.raises(UsageError, match=r"singular.*damp"):
        whole.solve(torch.ones(whole.space.size))
    with pytest.raises(NoSuchLayer, match="`nowhere`"):
        whole.restricted(["nowhere"])
    with pytest.raises(BrokenFactors, match="ekfac: true"):
        operator(factors, of="ekfac")
    with pytest.raises(UsageError, match="factored"):
        operator(factor_set(measured("perceptron", ekfac=True)[1]), "factored", of="ekfac")
    some = KroneckerOperator(factors, OperatorOptions(uncovered="refuse"), layers=["5"])
    assert set(some.uncovered) == {"0.weight", "2.weight", "2.bias", "3.weight", "3.bias"}
    with pytest.raises(UsageError, match=r"`0\.weight`"):
        some @ torch.ones(whole.space.size)
    alone = torch.zeros(whole.space.size)
    alone[-32:] = 1
    assert float((some @ alone).norm()) > 0


def test_an_index_that_places_numbers_elsewhere_is_refused() -> None:
    _, found = measured("perceptron")
    artifacts = found.factors.collected
    facts = artifacts.layers[0]
    assert facts.windows is not None
    wrong = dataclasses.replace(facts.windows[0], offset=10**6)
    broken = dataclasses.replace(
        artifacts, layers=(dataclasses.replace(facts, windows=(wrong,)), *artifacts.layers[1:])
    )
    with pytest.raises(BrokenFactors, match=r"outside of `0\.weight`"):
        operator(broken)
    unknown = dataclasses.replace(artifacts, layers=(dataclasses.replace(facts, windows=None), *artifacts.layers[1:]))
    with pytest.raises(BrokenFactors, match="not known"):
        operator(unknown)
    with pytest.raises(BrokenFactors, match="collect them again"):
        operator(dataclasses.replace(artifacts, parameters=None))


def test_the_index_keeps_places_of_numbers() -> None:
    torch.manual_seed(0)
    space = workspace(perceptron().double(), [ids(3, 7)], "classification", fisher="empirical")
    space.options.kinds = ("factors",)
    list(KeptFactors(None, space).rows())
    again = read_factors(space.ports.artifacts)
    assert again.parameters is not None
    assert all(facts.windows for facts in again.layers)
    assert [each.name for each in again.parameters] == [name for name, _ in perceptron().named_parameters()]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_direction_that_no_gradient_has_is_singular_with_corrections_too(dtype: str) -> None:
    """Gradients of a softmax add up to zero over its classes; what corrections have there is rounding, squared."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs, classes = torch.randn(200, 6), torch.randint(3, (200,))
    found = measure(
        net, [(inputs, classes)], task="classification", kinds=("factors",),
        collection={"dtype": dtype, "batch_size": 50, "fisher": "empirical", "ekfac": True},
    )  # fmt: skip
    of = kronoscope.local.operator(found, of="ekfac")
    head = of.restricted(["2"])
    assert head.logdet() == -math.inf
    with pytest.raises(UsageError, match="singular"):
        head.solve(torch.ones(head.shape[0], dtype=torch.float64))
    # small ones that are no rounding count
    first = of.restricted(["0"])
    values = found.factors["0"].corrected_eigenvalues.double()
    assert first.logdet() == pytest.approx(float(values.log().sum()), rel=1e-9)
    assert float(values.min() / values.max()) < 1e-3
