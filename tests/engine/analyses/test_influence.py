"""Influence: the dense inverse, leave-one-out in closed form, every kind of layer, and what cannot be scored."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from catalog.analyses.influence import InfluenceParams, InfluenceSummary
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.analyses.layer_analysis import run_analyses
from engine.errors import DataDiffer, EmptyData, ModelRefused, UsageError, WrongShape
from engine.workspace import JobOptions, ModelInputs, Ports, Resume, Workspace
from kronoscope.local import Measurement, OptionRefused, measure, operator
from tests.oracles import MemoryArtifacts

FLOAT64 = {"dtype": "float64", "fisher": "type2", "batch_size": 16, "self_check": "off"}
DAMPING = 1e-2


def scored(net: nn.Module, data: Any, query: Any, task: str = "classification", **options: Any) -> Measurement:
    collection = {**FLOAT64, "ekfac": options.get("of") == "ekfac", **options.pop("collection", {})}
    stabilisation = {"damping": options.pop("damping", DAMPING), "damping_mode": "absolute"}
    return measure(
        net, data, query=query, task=task, kinds="influence", collection=collection, stabilisation=stabilisation,
        params={"influence": options},
    )  # fmt: skip


def summary(made: Measurement) -> InfluenceSummary:
    found: InfluenceSummary = made.summary["influence"]
    return found


def scores(made: Measurement, name: str = "scores") -> Tensor:
    return torch.cat([made.artifacts.load_tensors(each)[name] for each in summary(made).artifacts])


def gradients(net: nn.Module, inputs: Tensor, targets: Tensor, loss: Any) -> Tensor:
    """The gradient of each example's loss, (N, P), by torch.func."""
    parameters = {name: each.detach() for name, each in net.named_parameters()}

    def of_one(own: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return loss(functional_call(net, own, (one[None],)), target[None])

    found = vmap(grad(of_one), (None, 0, 0))(parameters, inputs, targets)
    return torch.cat([found[name].flatten(1) for name in parameters], 1)


def small_net() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    inputs, labels = torch.randn(40, 6).double(), torch.randint(0, 4, (40,))
    query = torch.randn(7, 6).double(), torch.randint(0, 4, (7,))
    return net, (inputs, labels), query


def gauss_newton(net: nn.Module, inputs: Tensor) -> Tensor:
    """The Gauss-Newton matrix of the mean cross-entropy, dense."""
    parameters = {name: each.detach() for name, each in net.named_parameters()}
    size = sum(each.numel() for each in parameters.values())
    total = torch.zeros(size, size, dtype=torch.float64)
    for one in inputs:
        jacobians = jacrev(lambda own, one=one: functional_call(net, own, (one[None],))[0])(parameters)
        dense = torch.cat([each.flatten(1) for each in jacobians.values()], 1)
        p = torch.softmax(net(one[None])[0].detach(), 0)
        total += dense.T @ (p.diag() - torch.outer(p, p)) @ dense
    return total / len(inputs)


def block_diagonal(made: Measurement, of: str) -> Tensor:
    """K-FAC or EK-FAC of every layer, dense, each in the order of its weight (out, in) with the bias last."""
    blocks = []
    for facts in made.factors.collected.layers:
        if of == "kfac":
            factors = made.factors.collected.load(facts.ordinal)
            block = torch.kron(factors.dense_G.double(), factors.widened_A.double())
        else:
            assert made.factors.collected.load_corrected is not None
            own = made.factors.collected.load_corrected(facts.ordinal)
            assert own.eigenvectors_A is not None
            assert own.eigenvectors_G is not None
            basis = torch.kron(own.eigenvectors_G.double(), own.eigenvectors_A.double())
            block = basis @ own.eigenvalues.double().flatten().diag() @ basis.T
        # from (out, in + 1) to the weight, then the bias
        order = torch.arange(facts.out_dim * facts.in_dim).view(facts.out_dim, facts.in_dim)
        place = torch.cat([order[:, :-1].flatten(), order[:, -1]])
        blocks.append(block[place][:, place])
    return torch.block_diag(*blocks)


@pytest.mark.parametrize(
    "fisher", [{"fisher": "type2"}, {"fisher": "mc", "samples": 3}], ids=lambda each: each["fisher"]
)
@pytest.mark.parametrize("of", ["kfac", "ekfac", "ggn"])
def test_scores_are_those_of_the_dense_inverse(of: str, fisher: dict[str, Any]) -> None:
    net, data, query = small_net()
    # a search passes over the data a hundred times and more
    collection = fisher | ({"batch_size": 40} if of == "ggn" else {})
    made = scored(net, data, query, of=of, block=3, tolerance=1e-13, iterations=400, collection=collection)
    own, asked = (gradients(net, *each, nn.functional.cross_entropy) for each in (data, query))
    matrix = gauss_newton(net, data[0]) if of == "ggn" else block_diagonal(made, of)
    damped = matrix + DAMPING * torch.eye(len(matrix), dtype=torch.float64)
    assert float(torch.linalg.cond(damped)) < 1e3
    expected = -asked @ torch.linalg.solve(damped, own.T)
    torch.testing.assert_close(scores(made), expected, rtol=0, atol=1e-10 * float(expected.abs().max()))
    found = summary(made)
    assert (found.queries, found.examples, found.loss_terms, len(found.artifacts)) == (7, 40, 40.0, 3)
    for each in found.listed:
        right = torch.linalg.solve(damped, asked[each.query])
        assert each.self_influence == pytest.approx(float(right @ asked[each.query]), rel=1e-10)
        assert [one.example for one in each.lowering] == expected[each.query].argsort()[:10].tolist()
        assert [one.example for one in each.raising] == expected[each.query].argsort(descending=True)[:10].tolist()
        assert (each.residual is None) == (of != "ggn")
    assert sum(row.metrics.share for row in made.layers) == pytest.approx(1)


def test_leaving_one_out_of_ridge_regression_is_the_score_over_one_minus_the_leverage() -> None:
    torch.manual_seed(1)
    inputs, asked, ridge = torch.randn(30, 5).double(), torch.randn(6, 5).double(), 0.3
    targets, wanted = torch.randn(30, 1).double(), torch.randn(6, 1).double()
    hessian = 2 * inputs.T @ inputs / 30 + ridge * torch.eye(5, dtype=torch.float64)
    net = nn.Linear(5, 1, bias=False).double()

    def fitted(kept: Tensor) -> Tensor:
        # the mean of (f − y)² over all 30, and ridge/2 of ‖θ‖²
        damped = 2 * inputs[kept].T @ inputs[kept] / 30 + ridge * torch.eye(5, dtype=torch.float64)
        return torch.linalg.solve(damped, 2 * inputs[kept].T @ targets[kept] / 30)

    with torch.no_grad():
        net.weight.copy_(fitted(torch.arange(30)).T)
    made = scored(net, (inputs, targets), (asked, wanted), task="regression", damping=ridge)
    leverage = (2 / 30 * inputs * torch.linalg.solve(hessian, inputs.T).T).sum(1)
    # the gradient of a query's loss is 2 (f − y) times that of its prediction
    slope = 2 * (net(asked) - wanted).detach()
    first_order = -scores(made) / 30 / slope
    for out in range(30):
        without = fitted(torch.tensor([place for place in range(30) if place != out]))
        change = (asked @ without - net(asked).detach()).flatten()
        torch.testing.assert_close(first_order[:, out] / (1 - leverage[out]), change, rtol=0, atol=1e-10)


def resumable(scratch: MemoryArtifacts, log: list[str], shift: float = 0.0) -> Workspace:
    net, (inputs, labels), (asked, wanted) = small_net()
    return Workspace(
        inputs=ModelInputs(
            model=net,
            batches=lambda: iter([(inputs, labels)]),
            task=Task(type="classification"),
            examples=40,
            query=ModelInputs(batches=lambda: iter([(asked + shift, wanted)]), examples=7),
        ),
        options=JobOptions(
            collection=Collection(dtype="float64", batch_size=16, self_check="off"),
            kinds=("influence",),
            decomposition="none",
            # whether the search converges does not matter here
            params={"influence": InfluenceParams(block=3, of="ggn", iterations=3)},
        ),
        ports=Ports(artifacts=MemoryArtifacts(), scratch=scratch, log=lambda _, line: log.append(line)),
        resume=Resume(checkpoint_seconds=1e-9),
    )


def test_queries_are_reported_within_each_block_up_to_all_of_them() -> None:
    """Three batches of 16, 16 and 8 examples for each block of 3, 3 and 1 queries; the layers' rows come last."""
    said: list[tuple[str, int, int | None, str]] = []
    made = resumable(MemoryArtifacts(), [])
    made.options.params = {"influence": InfluenceParams(block=3)}
    made.ports = replace(made.ports, report=lambda *each: said.append(each))
    run_analyses(made, lambda _: None, lambda *_: None)
    own = [each for each in said if each[0] == "influence"]
    assert {each[2:] for each in own} == {(7, "queries")}
    done = [each[1] for each in own]
    # of each block first the proof
    assert done == [0, 1, 2, 3, 3, 4, 5, 6, 6, 6, 6, 7, 7, 7]


def test_an_attempt_takes_over_the_blocks_of_the_one_before_unless_they_were_harmed() -> None:
    scratch, log = MemoryArtifacts(), list[str]()
    summaries: list[Any] = []

    def run(left: MemoryArtifacts, shift: float = 0.0) -> tuple[Any, dict[str, Tensor]]:
        log.clear()
        made = resumable(left, log, shift)
        run_analyses(made, lambda _: None, lambda _, own: summaries.append(own))
        artifacts = made.ports.artifacts
        assert isinstance(artifacts, MemoryArtifacts)
        return summaries[-1], {name: own["scores"] for name, own in artifacts.tensors.items() if "scores" in own}

    def taken_over() -> int:
        return sum("earlier attempt" in line for line in log)

    truth, expected = run(scratch)
    assert taken_over() == 0
    # killed after the first block, and after the tensors of the second
    names = ["influence/1.json", "influence/2.json", "influence/scores-00002.safetensors"]
    for held in (scratch.tables, scratch.tensors):
        for name in names:
            held.pop(name, None)
    cases = {"killed": 1, "flipped": 0, "cut": 0, "other": 0}
    for way, count in cases.items():
        left = MemoryArtifacts()
        left.tensors, left.tables = copy.deepcopy(scratch.tensors), copy.deepcopy(scratch.tables)
        if way == "flipped":
            left.tensors["influence/scores-00000.safetensors"]["scores"].view(torch.uint8).view(-1)[:1] ^= 1
        elif way == "cut":
            left.tables["influence/0.json"]["body"]["block"].pop("terms")
        found, scored_now = run(left, shift=1e-3 if way == "other" else 0.0)
        assert taken_over() == count, way
        assert (found == truth) == (way != "other")
        assert all(torch.equal(scored_now[name], expected[name]) for name in expected) == (way != "other")


class TinyLanguageModel(nn.Module):
    """A table that is the head's weight too, positions, a normalisation and a convolution in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.positions = nn.Embedding(5, 6)
        self.mix = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens) + self.positions(torch.arange(5))
        hidden = hidden + torch.tanh(self.mix(hidden.mT).mT)
        return self.head(self.norm(hidden) * self.scale)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_kind_of_layer_gives_the_gradient_of_each_example_alone(dtype: str) -> None:
    torch.manual_seed(2)
    net = TinyLanguageModel().double()
    tokens, query = torch.randint(11, (20, 5)), torch.randint(11, (4, 5))
    labels, wanted = torch.randint(11, (20, 5)), torch.randint(11, (4, 5))
    labels[3, 2:] = -100
    made = scored(
        net, (tokens, labels), (query, wanted), task="classification",
        collection={"dtype": dtype}, groups={"table": ["table"], "mix": ["mix"]},
    )  # fmt: skip
    found = summary(made)
    assert found.coverage.covered_share == 1

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")

    own, asked = gradients(net, tokens, labels, loss), gradients(net, query, wanted, loss)
    damped = operator(made, damping="exact", stabilisation={"damping": DAMPING, "damping_mode": "absolute"})
    solved = damped.solve(asked.T.contiguous().to(torch.float64))
    expected = -solved.T @ own.T
    tolerance = 1e-9 if dtype == "float64" else 2e-4
    torch.testing.assert_close(scores(made).double(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))
    assert scores(made, "scores.mix").shape == (4, 20)
    assert not torch.equal(scores(made, "scores.table"), scores(made))


class Meeting(nn.Module):
    """Subtracts the batch's mean, so that examples meet, in the second batch and later ones alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        mixed = hidden - hidden.mean(0) * (inputs[:1, :1] > 50)
        return self.head(torch.tanh(mixed))


def test_queries_whose_examples_meet_within_the_model_are_refused_with_the_number() -> None:
    torch.manual_seed(0)
    _, data, (asked, wanted) = small_net()
    asked[0, 0] = 60
    with pytest.raises(ModelRefused, match=r"differ from plain autograd's by \d"):
        scored(Meeting().double(), data, (asked, wanted))


def test_conjugate_gradients_out_of_budget_give_scores_that_are_marked() -> None:
    net, data, query = small_net()
    found = summary(scored(net, data, query, of="ggn", iterations=2, damping=1e-6))
    assert found.unconverged == 7
    assert found.worst_residual is not None
    assert found.worst_residual > 1e-4
    assert not any(each.converged for each in found.listed)
    assert {each.iterations for each in found.listed} == {2}


def test_what_cannot_be_scored_is_refused_by_its_field() -> None:
    net, data, (asked, wanted) = small_net()
    with pytest.raises(OptionRefused, match=r"query.* is missing; name the examples"):
        scored(net, data, None)
    with pytest.raises(OptionRefused, match="add it to `kinds`"):
        measure(net, data, query=(asked, wanted), task="classification", kinds="capacity")
    with pytest.raises(OptionRefused, match=r"collection\.ekfac: true"):
        scored(net, data, (asked, wanted), of="ekfac", collection={"ekfac": False})
    with pytest.raises(OptionRefused, match="forward_only"):
        scored(net, data, (asked, wanted), collection={"fisher": "forward_only"})
    for name, bad in {"top": 0, "block": 0, "tolerance": 1.0, "iterations": 0, "groups": {"a": ()}}.items():
        with pytest.raises(OptionRefused, match=name):
            scored(net, data, (asked, wanted), **{name: bad})
    with pytest.raises(UsageError, match=r"names `conv` in `mine`, of which no layer is a part; there are `0\.weight`"):
        scored(net, data, (asked, wanted), groups={"mine": ("0", "conv")})
    with pytest.raises(UsageError, match="these data hold none; leave it out"):
        scored(net, data, (asked, wanted), texts=True)
    with pytest.raises(OptionRefused, match="in a notebook give the examples as `query`"):
        measure(net, data, query=(asked, wanted), task="classification", kinds="influence",
                params={"influence": {"query": {"source": "builtin", "name": "digits"}}})  # fmt: skip
    wide, mistyped = torch.cat([asked, asked], 1), torch.where(torch.arange(7) == 4, 9, wanted)
    for query, said in (
        ((wide, wanted), r"query 0: the model raised on inputs of shape \(1, 12\): .*\(in `0`, Linear"),
        ((asked[:, None], wanted[:, None].repeat(1, 2)), r"query 0: .*targets of shape \(1, 2\)"),
        ((asked, mistyped), r"query 4: a target is 9, but the model has classes 0 to 3"),
        ((torch.where(torch.arange(7)[:, None] == 2, torch.nan, asked), wanted), "query 2: .*NaN"),
    ):
        with pytest.raises(UsageError, match=f"{said}.*; give queries of the shapes") as own:
            scored(net, data, query)
        assert own.value.pointer == "/influence/query"
        # the layers were watched in the pass over the data, too, and the data are right
        assert not any(blamed in str(own.value) for blamed in ("watched", "first batch", "check that"))
    for pointer, own, query in (
        ("/influence/query", data, [(asked, None)]),
        ("/data", [(data[0], None)], (asked, wanted)),
    ):
        with pytest.raises(WrongShape, match="these have none; give them") as refused:
            scored(net, own, query)
        assert refused.value.pointer == pointer
    with pytest.raises(EmptyData) as empty:
        scored(net, data, [])
    assert empty.value.pointer == "/influence/query"


def test_data_in_another_order_at_a_later_pass_are_refused() -> None:
    net, (inputs, labels), query = small_net()
    turn = iter(range(1000))

    def shuffled() -> Any:
        order = torch.randperm(40, generator=torch.Generator().manual_seed(next(turn)))
        return [(inputs[order], labels[order], order)]

    with pytest.raises(DataDiffer, match="another order"):
        scored(net, shuffled, query, block=2)


def test_a_group_holds_whole_layers() -> None:
    torch.manual_seed(2)
    net = TinyLanguageModel().double()
    tokens, labels = torch.randint(11, (8, 5)), torch.randint(11, (8, 5))
    with pytest.raises(UsageError, match="a part of layer `mix` in `half`, and scores are of whole layers"):
        scored(net, (tokens, labels), (tokens[:2], labels[:2]), groups={"half": ["mix[0]", "table"]})
    made = scored(
        net, (tokens, labels), (tokens[:2], labels[:2]), groups={"all": ["mix[0]", "mix[1]"], "bare": ["scale"]}
    )
    assert set(made.artifacts.load_tensors(summary(made).artifacts[0])) == {"scores", "scores.all", "scores.bare"}
