"""Parameters that several modules hold: each number once, uses alike summed, a table and its head as one product."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet
from engine.memory.plan import Chosen
from engine.planning import job_plan
from tests.oracles import (
    MemoryArtifacts,
    collect,
    ggn_block,
    kronecker,
    relative_error,
    require_traces,
    same_facts,
    workspace,
)

EXACT = 1e-12


def same(left: FactorSet, right: FactorSet) -> None:
    """Equal factors and counts, layer by layer, whatever the layers are called."""
    assert len(left.layers) == len(right.layers)
    for one, other in zip(left.layers, right.layers, strict=True):
        assert (one.calls, one.positions, one.parameter_count) == (other.calls, other.positions, other.parameter_count)
        assert relative_error(left.load(one.ordinal).A, right.load(other.ordinal).A) < EXACT
        assert relative_error(left.load(one.ordinal).G, right.load(other.ordinal).G) < EXACT


def kinds(kind: str) -> nn.Module:
    return {
        "linear": lambda: nn.Linear(4, 4),
        "Conv1D": lambda: Conv1D(4, 4),
        "layer norm": lambda: nn.LayerNorm(4),
        "convolution": lambda: nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"),
    }[kind]()


def drawn(model: nn.Module) -> nn.Module:
    """``model`` with parameters that do not depend on how many modules hold them."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator) / 2
    return model


class Twice(nn.Module):
    """Two calls: of one module, or of two that hold its parameters."""

    def __init__(self, kind: str, apart: bool) -> None:
        super().__init__()
        self.convolves = kind == "convolution"
        self.first = kinds(kind)
        self.second = kinds(kind) if apart else self.first
        self.second.weight, self.second.bias = self.first.weight, self.first.bias
        self.head = nn.Linear(4, 3)
        drawn(self.double())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x))
        return self.head(x.mean(2) if self.convolves else x)


@pytest.mark.part(of=32, by=("kind",))
@pytest.mark.parametrize("kind", ["linear", "Conv1D", "layer norm", "convolution"])
@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}, {"fisher": "mc", "ema_decay": 0.5}])
def test_modules_that_share_all_are_one_module_called_again(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    x = torch.randn(6, 4, 5 if kind == "convolution" else 4, dtype=torch.float64)
    y = torch.randint(0, 3, (6,) if kind == "convolution" else (6, 4))
    again, apart = (collect(Twice(kind, flag), [(x, y)], "classification", **options) for flag in (False, True))
    same(apart, again)
    assert apart.layers[0].name == "first"
    assert apart.layers[0].parameters == ("first.weight", "first.bias")
    assert "`first`, `second` share it: their calls are summed" in apart.layers[0].why
    assert apart.declared == ()


def test_a_shared_norm_keeps_its_exact_block() -> None:
    torch.manual_seed(1)
    model = Twice("layer norm", apart=True)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))

    def arrange(jacobian: dict[str, Tensor]) -> Tensor:
        return torch.cat([jacobian["first.weight"], jacobian["first.bias"]], 1)

    names = ("first.weight", "first.bias")
    # functional_call fills in both names of a shared parameter
    truth = ggn_block(model, x, y, "cross_entropy", names, arrange)
    assert relative_error(kronecker(collect(model, [(x, y)], "classification"), "first"), truth) < EXACT


def test_biases_of_their_own_are_exact_beside_a_shared_weight() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    torch.manual_seed(1)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 4, (6,))
    model = Net().double()
    whole = collect(model, [(x, y)], "classification")
    assert [(layer.name, layer.parameters) for layer in whole.layers] == [
        ("first", ("first.weight",)),
        ("first.bias", ("first.bias",)),
        ("second.bias", ("second.bias",)),
    ]
    for name in ("first.bias", "second.bias"):
        truth = ggn_block(model, x, y, "cross_entropy", (name,), lambda jacobian, name=name: jacobian[name])
        assert relative_error(kronecker(whole, name), truth) < EXACT
    # the weight is one bias-free module's, called twice
    inner = torch.tanh(model.first(x)).detach()
    entered = torch.cat([x, inner])
    assert relative_error(whole.load(0).A, entered.T @ entered / 12) < EXACT
    assert relative_error(whole.load(0).G, whole.load(1).G + whole.load(2).G) < EXACT


@pytest.mark.parametrize("fisher", ["type2", "forward_only"])
def test_tables_that_share_are_one_table_looked_up_again(fisher: str) -> None:
    class Tables(nn.Module):
        def __init__(self, apart: bool) -> None:
            super().__init__()
            self.left = nn.Embedding(7, 4)
            self.right = nn.Embedding(7, 4) if apart else self.left
            self.right.weight = self.left.weight
            self.head = nn.Linear(4, 7)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.left(ids) * torch.tanh(self.right(ids.flip(1))))

    ids = torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(0))
    again, apart = (
        collect(drawn(Tables(flag).double()), [(ids, ids)], "causal_lm", fisher=fisher) for flag in (False, True)
    )
    same(apart, again)


class Language(nn.Module):
    """A table and a head, of one weight or of two equal ones, with layers between that make the uses differ."""

    def __init__(self, tied: bool, *, bias: bool = False, padding: int | None = None, tables: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 4, padding_idx=padding)
        self.more = nn.ModuleList(nn.Embedding(9, 4, padding_idx=padding) for _ in range(tables - 1))
        for other in self.more:
            other.weight = self.table.weight
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=bias)
        self.head.weight = self.table.weight if tied else nn.Parameter(self.table.weight.detach().clone())
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.table(input_ids)
        for other in self.more:
            x = x + other(input_ids.roll(1, 1))
        return self.head(torch.tanh(self.inner(x)))


def sentences() -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 9, (7, 6), generator=generator)
    mask = torch.rand(7, 6, generator=generator) > 0.2
    mask[:, :2] = True
    return [({"input_ids": ids, "attention_mask": mask.to(torch.int64)}, ids)]


def both_uses(whole: FactorSet) -> Tensor:
    """(V, c, V, c): the sum of the untied table's and head's blocks, in the head's orientation."""
    table, head = (next(layer for layer in whole.layers if layer.name == name) for name in ("table", "head"))
    lookups, vectors = whole.load(table.ordinal).A, whole.load(table.ordinal).G
    A, G = whole.load(head.ordinal).A, whole.load(head.ordinal).G
    padded = torch.zeros_like(A)
    padded[:4, :4] = vectors
    return torch.einsum("ij,kl->ikjl", G, A) + torch.einsum("ij,kl->ikjl", torch.diag(lookups), padded)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"fisher": "mc", "samples": 2, "batch_size": 3}),
    ({}, {"sharing": "reduce"}),
    ({}, {"fisher": "forward_only"}),
    ({}, {"ema_decay": 0.7, "batch_size": 2}),
    ({"bias": True}, {}),
    ({"padding": 3}, {}),
    ({"tables": 3}, {}),
]


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize(("build", "options"), CASES)
def test_a_table_and_its_head_are_the_nearest_product_of_both_uses(
    build: dict[str, Any], options: dict[str, Any]
) -> None:
    tied, untied = (collect(Language(flag, **build), sentences(), "causal_lm", **options) for flag in (True, False))
    truth = both_uses(untied)
    width = truth.shape[1]
    # Van Loan & Pitsianis: the leading singular pair of the rearranged sum, by a dense decomposition
    left, sizes, right = torch.linalg.svd(truth.permute(0, 2, 1, 3).reshape(81, width * width))
    nearest = sizes[0] * torch.einsum("ij,kl->ikjl", left[:, 0].view(9, 9), right[0].view(width, width))
    trace = torch.einsum("ikik->", truth)
    nearest *= trace / torch.einsum("ikik->", nearest)
    row = tied.layers[0]
    factors = tied.load(0)
    found = torch.einsum("ij,kl->ikjl", factors.G, factors.A)
    assert relative_error(found, nearest) < 1e-11
    assert relative_error(factors.G.trace() * factors.A.trace(), trace) < EXACT
    assert float(torch.linalg.eigvalsh(factors.G)[0]) > -1e-12
    assert float(torch.linalg.eigvalsh(factors.A)[0]) > -1e-12
    residual = relative_error(found, truth)
    assert f"(relative residual {residual:.2g})" in row.why
    assert 0.05 < residual < 1
    # each number once
    names = ("table.weight", "head.bias") if build.get("bias") else ("table.weight",)
    assert (row.name, row.parameters, row.parameter_count) == ("table", names, 9 * width)
    assert row.calls == 1 + build.get("tables", 1)
    assert tied.covered_parameters == sum(p.numel() for p in Language(True, **build).parameters())
    assert (row.rank_bound_A, row.rank_bound_G) == (None, None)
    assert row.positions == sum(layer.positions for layer in untied.layers if layer.name in ("table", "head"))


def test_one_use_alone_is_that_layer_itself() -> None:
    class HeadOnly(Language):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            with torch.no_grad():
                x = self.table(input_ids)
            return self.head(torch.tanh(self.inner(x)))

    tied, untied = (collect(HeadOnly(flag), sentences(), "causal_lm", fisher="mc") for flag in (True, False))
    head = next(layer for layer in untied.layers if layer.name == "head")
    assert relative_error(kronecker(tied, "table"), kronecker(untied, "head")) < EXACT
    assert relative_error(tied.load(0).A, untied.load(head.ordinal).A) < EXACT
    assert "(relative residual 0)" in tied.layers[0].why

    class TableOnly(Language):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return torch.tanh(self.inner(self.table(input_ids))) @ torch.ones(4, 9, dtype=torch.float64)

    tied, untied = (collect(TableOnly(flag), sentences(), "causal_lm", fisher="mc") for flag in (True, False))
    lookups, vectors = untied.load(0).A, untied.load(0).G
    assert relative_error(kronecker(tied, "table"), torch.kron(torch.diag(lookups), vectors)) < EXACT


def test_a_frozen_weight_is_nobodys() -> None:
    model = Language(True, bias=True)
    model.table.weight.requires_grad_(False)
    whole = collect(model, sentences(), "causal_lm")
    assert [layer.parameters for layer in whole.layers] == [("inner.weight", "inner.bias"), ("head.bias",)]
    assert whole.declared == ()


def test_passes_and_the_plan_hold_the_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_plan, "resident_bytes", lambda: 0)

    def made() -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(300, 8), *(nn.Linear(8, 8, bias=False) for _ in range(3)))
        model.append(nn.Linear(8, 300))
        model[4].weight = model[0].weight
        ids = torch.randint(0, 300, (8, 5), generator=torch.Generator().manual_seed(3))
        space = workspace(model, [(ids, ids)], "causal_lm", fisher="mc")
        plans: list[Any] = []
        space.ports.announce_plan = plans.append
        return space, plans

    space, plans = made()
    whole = collect_or_read(space)
    (accumulators,) = [term for term in plans[0]["terms"] if term["name"] == "accumulators"]
    # A with its column of ones, the head's own, the counts, the vectors' moments and the head's diagonal beside one V²
    own = 300**2 + 2 * 9**2 + 300 + 8**2 + 300
    assert accumulators["size_bytes"] == 8 * (own + 3 * 2 * 8**2)
    space, plans = made()
    space.ports.scratch = MemoryArtifacts()
    space.resume.chosen = Chosen(parts=(("1", "2"), ("0",), ("3",)))
    several = collect_or_read(space)
    assert several.passes == 3
    assert same_facts(several, whole)
    for ordinal in range(4):
        assert torch.equal(several.load(ordinal).A, whole.load(ordinal).A)
        assert torch.equal(several.load(ordinal).G, whole.load(ordinal).G)


@pytest.mark.parametrize("tie", ["orientation", "stride", "kind"])
def test_uses_of_no_known_kind_are_measured_by_their_operations(tie: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(4, 4)
            self.first: nn.Module = nn.Conv1d(4, 4, 1) if tie == "stride" else nn.Linear(4, 4)
            self.second: nn.Module = {
                "orientation": lambda: Conv1D(4, 4),
                "stride": lambda: nn.Conv1d(4, 4, 1, stride=2),
                "kind": lambda: nn.Bilinear(4, 1, 4),
            }[tie]()
            if tie == "kind":
                self.second.bias = self.first.bias
            else:
                self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            if tie == "stride":
                return self.second(self.first(x.unsqueeze(2))).squeeze(2)
            x = self.first(x)
            return self.second(x, x[:, :1]) if tie == "kind" else self.second(x)

    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 4, (6,))
    model = Net().double()
    whole = collect(model, [(x, y)], "classification", fisher="empirical")
    assert whole.declared == ()
    assert whole.covered_parameters == whole.trainable_parameters
    losses = (functional.cross_entropy(model(one[None])[0], target) for one, target in zip(x, y, strict=True))
    require_traces(model, whole, losses, 6)


def test_one_parameter_under_two_names_of_a_module_counts_once() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)
            self.scale = nn.Parameter(torch.ones(4))
            self.again = self.scale

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x * self.scale)

    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    whole = collect(Own().double(), [(x, y)], "classification")
    assert whole.trainable_parameters == 4 + 15


@pytest.mark.parametrize("used", [False, True])
def test_a_second_name_is_measured_with_the_first_where_it_is_computed_with(used: bool) -> None:
    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.decoder = nn.Linear(4, 3)
            self.bias = self.decoder.bias
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.decoder(self.inner(x))
            return x + self.bias if used else x

    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    model = Keeper().double()
    bias = model.bias
    whole = collect(model, [(x, y)], "classification", fisher="empirical", min_coverage=1.0)
    losses = (functional.cross_entropy(model(one[None])[0], target) for one, target in zip(x, y, strict=True))
    require_traces(model, whole, losses, 6)
    assert whole.trainable_parameters == 15 + 20
    assert model.bias is bias
    assert model.decoder.bias is bias


def test_tied_models_of_hugging_face_are_covered() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertForMaskedLM(BertConfig(**sizes, intermediate_size=8, max_position_embeddings=8)).double()
    gpt = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8)).double()
    ids = torch.randint(0, 11, (4, 6))
    for model, task, names in (
        (bert, "masked_lm", ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.bias")),
        (gpt, "causal_lm", ("transformer.wte.weight",)),
    ):
        whole = collect(model, [({"input_ids": ids}, ids)], task, fisher="mc", min_coverage=1.0)
        assert whole.layers[0].parameters == names
        assert whole.covered_parameters == sum(parameter.numel() for parameter in model.parameters())
        assert re.search("relative residual 0[.]", whole.layers[0].why)


def test_a_smaller_sample_size_is_the_run_over_its_examples() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (16, 6), generator=generator)

    def run(examples: int, **options: Any) -> FactorSet:
        space = workspace(Language(True), [(ids[:examples], ids[:examples])], "causal_lm", batch_size=2, **options)
        space.inputs.examples = examples
        return collect_or_read(space)

    whole = run(16, nested=True)
    for size in whole.nested:
        alone = run(size.examples)
        assert torch.equal(size.load(0).A, alone.load(0).A)
        assert torch.equal(size.load(0).G, alone.load(0).G)
        assert size.rank_bounds[0] == (None, None)
    assert [size.examples for size in whole.nested] == [2, 4, 8]
    assert torch.equal(whole.load(0).G, run(16).load(0).G)
