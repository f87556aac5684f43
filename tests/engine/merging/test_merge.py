"""Factors merged from pieces are those of one collection over all examples."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from catalog.requests.woodbury import Woodbury
from engine.collect import collect_or_read
from engine.factors.factor_set import FactorSet, LayerFacts
from engine.workspace import Workspace
from tests.divided import difference, merged
from tests.oracles import workspace

EXAMPLES, BATCH = 26, 2
CUTS = {1: (), 2: (16,), 3: (4, 22), 7: (2, 4, 10, 12, 20, 22)}
"""Pieces of uneven sizes, each ending with a batch."""


class Digits(nn.Module):
    """A CNN with batch norm in evaluation mode and a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 6, 3, groups=2)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.grouped(h)).flatten(1))


class Reader(nn.Module):
    """A table, two layers of one input, a layer that is used twice, and one that short texts never call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 6)
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.twice = nn.Linear(6, 6)
        self.long = nn.Linear(6, 6)
        self.head = nn.Linear(6, 90)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        x = x + torch.tanh(self.q(x)) * self.k(x)
        x = self.twice(torch.tanh(self.twice(x)))
        if ids.shape[1] > 3:
            x = x + self.long(x)
        return self.head(x.mean(1))


def digits(**options: Any) -> Workspace:
    torch.manual_seed(0)
    model = Digits()
    model.norm.running_var.uniform_(0.5, 2.0)
    x, y = torch.randn(EXAMPLES, 1, 4, 4), torch.randint(0, 5, (EXAMPLES,))
    return _counted(workspace(model, [(x, y)], "classification", **options))


def reader(**options: Any) -> Workspace:
    torch.manual_seed(1)
    short, long = torch.randint(0, 17, (10, 3)), torch.randint(0, 17, (16, 5))
    y = torch.randint(0, 90, (EXAMPLES,))
    return _counted(workspace(Reader(), [(short, y[:10]), (long, y[10:])], "classification", **options))


def gpt2(**options: Any) -> Workspace:
    """A language model whose head is its table; one piece of its data has no target at all."""
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=400, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    ids = torch.randint(0, 400, (EXAMPLES, 4))
    targets = ids.clone()
    targets[20:22] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return _counted(workspace(GPT2LMHeadModel(config), [(inputs, targets)], "causal_lm", **options))


def rows(policy: Any, **options: Any) -> Workspace:
    """Gradient rows: fewer than the head has outputs, and more than the first layer has."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 80))
    x, y = torch.randn(EXAMPLES, 4), torch.randint(0, 80, (EXAMPLES,))
    made = _counted(workspace(model, [(x, y)], "classification", **options))
    made.options.woodbury = Woodbury(policy=policy, softmax_head=False)
    return made


def _counted(made: Workspace) -> Workspace:
    made.inputs.examples = EXAMPLES
    return made


JOBS: dict[str, Callable[..., Workspace]] = {
    "digits": partial(digits, fisher="mc", samples=2, batch_variance=True, nested=True),
    "digits, every other batch": partial(digits, fisher="empirical", sharing="reduce", update_freq=2),
    "reader": partial(reader, fisher="mc", nested=True),
    "gpt2": partial(gpt2, fisher="mc"),
    "gpt2, dense": partial(gpt2, fisher="empirical", nested=True),
    "rows": partial(rows, "auto", fisher="empirical", nested=True),
    "all rows": partial(rows, "all", fisher="empirical"),
    "forward only": partial(reader, fisher="forward_only"),
}
TOLERANCE = {"float64": 1e-12, "float32": 1e-6}


def make(name: str, dtype: str) -> Callable[[], Workspace]:
    return partial(JOBS[name], dtype=dtype, batch_size=BATCH)


@cache
def undivided(name: str, dtype: str) -> FactorSet:
    return collect_or_read(make(name, dtype)())


def counts(facts: LayerFacts) -> tuple[object, ...]:
    names = ("ordinal", "name", "form", "parameters", "in_dim", "out_dim", "bias", "positions", "terms", "calls")
    more = ("sharing", "rank_bound_A", "rank_bound_G", "shared_A_with", "representation_G", "windows", "why")
    return tuple(getattr(facts, name) for name in (*names, *more))


@pytest.mark.part(of=32, by=("dtype",))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
@pytest.mark.parametrize("name", JOBS)
def test_pieces_have_the_factors_of_the_whole(name: str, pieces: int, dtype: str) -> None:
    if "every other" in name and pieces > 1:
        cuts = {2: (16,), 3: (4, 20), 7: (4, 8, 12, 16, 20, 24)}[pieces]
    else:
        cuts = CUTS[pieces]
    truth, found = undivided(name, dtype), merged(make(name, dtype), cuts)
    assert [counts(facts) for facts in found.layers] == [counts(facts) for facts in truth.layers]
    assert [(row.name, row.reason) for row in found.declared] == [(row.name, row.reason) for row in truth.declared]
    assert (found.examples, found.updates, found.collection) == (truth.examples, truth.updates, truth.collection)
    # with smaller sample sizes a digest counts the batches of its piece
    assert found.entered == (None if truth.collection.nested else truth.entered)
    for facts, other in zip(found.layers, truth.layers, strict=True):
        left, right = found.load(facts.ordinal), truth.load(facts.ordinal)
        assert left.A.dtype == right.A.dtype
        errors = difference(left.widened_A, right.widened_A), difference(left.widened_G, right.widened_G)
        assert max(errors) <= TOLERANCE[dtype], (facts.name, errors)
        for fact in ("exact_trace", "trace_standard_error", "relative_variance_A", "relative_variance_G",
                     "relative_standard_error_A", "relative_standard_error_G"):  # fmt: skip
            own, expected = getattr(facts, fact), getattr(other, fact)
            tight = dtype == "float64" or fact in ("exact_trace", "trace_standard_error")
            # a trace is a sum of its examples' alone, whatever pieces they came in
            near = None if expected is None else pytest.approx(expected, rel=1e-9 if tight else 1e-5)
            assert own == near, (facts.name, fact)
        assert facts.no_batch_variance == other.no_batch_variance
    assert [(size.eighths, size.examples, size.rank_bounds) for size in found.nested] == [
        (size.eighths, size.examples, size.rank_bounds) for size in truth.nested
    ]
    for size, whole in zip(found.nested, truth.nested, strict=True):
        for facts in found.layers:
            left, right = size.load(facts.ordinal), whole.load(facts.ordinal)
            errors = difference(left.widened_A, right.widened_A), difference(left.widened_G, right.widened_G)
            assert max(errors) <= TOLERANCE[dtype], (facts.name, size.eighths, errors)


def test_jobs_have_every_form() -> None:
    kinds = {(name, facts.name): facts for name in JOBS for facts in undivided(name, "float64").layers}
    assert {facts.form for facts in kinds.values()} == {"kronecker", "diagonal", "block"}
    assert {facts.representation_G for facts in kinds.values()} == {"dense", "woodbury", "softmax_head"}
    assert kinds["gpt2", "transformer.wte"].representation_G == "softmax_head"
    assert kinds["gpt2, dense", "transformer.wte"].representation_G == "dense"
    assert kinds["rows", "2"].representation_G == "woodbury"
    assert kinds["rows", "2"].rank_bound_G == EXAMPLES
    assert kinds["all rows", "0"].representation_G == "woodbury"
    assert kinds["reader", "k"].shared_A_with == kinds["reader", "q"].ordinal
    assert kinds["digits", "grouped[1]"].in_dim == 2 * 9 + 1
