"""Padding is cut off where it decides nothing, and the sums stay what they are; elsewhere it goes through."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from engine.factors.factor_set import FactorSet
from engine.planning import probe_model
from engine.row_layout import length_buckets
from tests.oracles import collect, relative_error

LENGTHS = (9, 3, 12, 5, 2, 11, 4, 7)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_buckets, "_POSITIONS", 1)


def texts(leading: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(1)
    mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    if leading:
        mask = mask.flip(1)
    ids = torch.randint(1, 20, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask}, torch.randint(0, 3, (len(LENGTHS),))


def widths(model: nn.Module) -> list[tuple[int, ...]]:
    """Shapes that ``model`` is given from here on."""
    seen: list[tuple[int, ...]] = []

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(tuple(kwargs["input_ids"].shape))

    model.register_forward_pre_hook(before, with_kwargs=True)
    return seen


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, vocab_size=20,
        max_position_embeddings=16,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).double().eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=8, n_head=2, n_positions=16, vocab_size=20, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).double().eval()


def same(left: FactorSet, right: FactorSet) -> None:
    assert [facts.name for facts in left.layers] == [facts.name for facts in right.layers]
    for facts, other in zip(left.layers, right.layers, strict=True):
        assert (facts.positions, facts.terms) == (other.positions, other.terms)
        one, two = left.load(facts.ordinal), right.load(facts.ordinal)
        assert relative_error(one.A, two.A) < 1e-11, facts.name
        assert relative_error(one.G, two.G) < 1e-11, facts.name


@pytest.mark.parametrize(("make", "task"), [(bert, "sentence_embedding"), (gpt2, "causal_lm")])
def test_cut_padding_brings_the_same_factors(make: Any, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, _ = texts()
    chunks = [(inputs, inputs["input_ids"] if task == "causal_lm" else None)]
    model = make()
    shapes = widths(model)
    cut = collect(model, chunks, task, fisher="mc", batch_size=8)
    # of the pass itself, which comes last
    passed: list[tuple[int, ...]] = []
    while sum(rows for rows, _ in passed) < 8:
        passed.append(shapes.pop())
    assert sum(rows for rows, _ in passed) == 8
    assert sum(rows * width for rows, width in passed) < 0.75 * 8 * 12
    monkeypatch.setattr(probe_model, "is_padding_irrelevant", lambda *_: False)
    whole = make()
    shapes = widths(whole)
    same(cut, collect(whole, chunks, task, fisher="mc", batch_size=8))
    assert shapes[-1] == (8, 12)


class Reading(nn.Module):
    """A pooled linear map; what it makes of the mask is given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 4)
        self.layer = nn.Conv1d(4, 4, 1) if kind == "convolution" else nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.kind = kind
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.table(input_ids)
        if self.kind == "convolution":
            hidden = self.layer(hidden.transpose(1, 2)).transpose(1, 2).tanh()
        else:
            hidden = self.layer(hidden).tanh()
        kept = attention_mask.unsqueeze(-1).to(hidden.dtype)
        if self.kind == "blind":
            kept = torch.ones_like(kept)
        return self.head((hidden * kept).sum(1) / kept.sum(1))


@pytest.mark.parametrize(
    ("kind", "leading", "cut"),
    [
        ("masked", False, True),
        ("masked", True, False),
        # its outputs depend on how much padding there is
        ("blind", False, False),
        # its positions are counted with the padding's
        ("convolution", False, False),
    ],
)
def test_padding_is_cut_only_where_it_decides_nothing(kind: str, leading: bool, cut: bool) -> None:
    inputs, targets = texts(leading)
    model = Reading(kind)
    shapes = widths(model)
    collect(model, [(inputs, targets)], "classification", fisher="mc", batch_size=8)
    assert (shapes[-1] == (8, 12)) != cut


class Queried(nn.Module):
    """Twelve outputs, whatever the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 4)
        self.head = nn.Linear(4, 12 * 5)
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        kept = attention_mask.unsqueeze(-1).double()
        pooled = (self.table(input_ids) * kept).sum(1) / kept.sum(1)
        return self.head(pooled).view(-1, 12, 5)


def test_outputs_of_a_length_of_their_own_keep_padding() -> None:
    inputs, _ = texts()
    targets = torch.where(inputs["attention_mask"].bool(), torch.randint(0, 5, (len(LENGTHS), 12)), -100)
    model = Queried()
    shapes = widths(model)
    whole = collect(model, [(inputs, targets)], "masked_lm", fisher="mc", batch_size=8)
    assert shapes[-1] == (8, 12)
    assert {layer.name: layer.positions for layer in whole.layers}["head"] == 8


def test_groups_hold_every_example_once_and_like_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = torch.randint(1, 200, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = list(length_buckets._groups(lengths))
    assert sorted(place for group in groups for place in group) == list(range(64))
    for group in groups:
        own = [lengths[place] for place in group]
        assert own == sorted(own, reverse=True)
        assert own[-1] >= length_buckets._SHORTER * own[0]
    monkeypatch.setattr(length_buckets, "_POSITIONS", 1024)
    larger = list(length_buckets._groups(lengths))
    assert all(len(group) * lengths[group[0]] >= 1024 for group in larger[:-1])


class Summing(nn.Module):
    """Adds up the vectors of all ids, with and without a mask: that of the padding happens to be zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)
        self.double()
        with torch.no_grad():
            self.table.weight[0] = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.table(input_ids).sum(1))


def test_padding_that_decides_nothing_but_has_a_gradient_is_not_cut() -> None:
    inputs, labels = texts()
    # no padding is left within the groups, which a mask could be laid on
    for row, length in enumerate((12, 6, 3, 12, 6, 3, 12, 6)):
        inputs["attention_mask"][row] = (torch.arange(12) < length).long()
    inputs["input_ids"] = torch.randint(1, 20, (8, 12)) * inputs["attention_mask"]
    model = Summing()
    squares = 0.0
    for place in range(len(labels)):
        one = {name: each[place : place + 1] for name, each in inputs.items()}
        loss = nn.functional.cross_entropy(model(**one), labels[place : place + 1])
        squares += float(torch.autograd.grad(loss, model.table.weight)[0].square().sum())
    truth = squares / len(labels)

    def trace(**options: Any) -> float:
        whole = collect(model, [(inputs, labels)], "classification", fisher="empirical", batch_size=8, **options)
        (found,) = (layer.exact_trace for layer in whole.layers if layer.name == "table")
        assert found is not None
        return found

    assert trace() == pytest.approx(truth, rel=1e-12)
    # what the check is for: without it the gradients that went with the padding are missing
    assert trace(self_check="off") < 0.9 * truth
