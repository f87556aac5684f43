"""Token importance is the head's exact diagonal: by each example alone in plain autograd, and by the softmax itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.capacity import CapacityParams
from catalog.analyses.capacity_metrics import TokenImportance
from catalog.requests.collection import Collection
from catalog.requests.woodbury import Woodbury
from engine.analyses.capacity import Capacity
from engine.collect import collect_or_read
from engine.errors import NoSuchLayer
from engine.factors.factor_files import factor_file, write_factors
from engine.factors.spilled_factors import spill
from engine.workspace import Workspace
from tests.oracles import workspace

VOCABULARY, TERMS = 30, 12


class Language(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 5)
        self.middle = nn.Linear(5, 5)
        self.lm_head = nn.Linear(5, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(torch.tanh(self.middle(self.table(ids)))[:, 0])
        return logits


def space(*, tied: bool = False, fisher: Any = "mc", policy: Any = "all") -> Workspace:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (TERMS, 1), generator=torch.Generator().manual_seed(1))
    made = workspace(Language(tied=tied).double(), [(ids, (3 * ids[:, 0] + 1) % VOCABULARY)], "classification")
    made.options.collection = Collection(fisher=fisher, dtype="float64")
    made.options.woodbury = Woodbury(policy=policy)
    made.inputs.examples = TERMS
    return made


def measured(made: Workspace, name: str = "lm_head") -> TokenImportance:
    analysis = Capacity(CapacityParams(token_importance=name, metrics=("trace",)), made).rows()
    while True:
        try:
            next(analysis)
        except StopIteration as end:
            found: TokenImportance = end.value.token_importance
            return found


def alone(made: Workspace) -> list[tuple[Tensor, Tensor]]:
    """Logits of each example alone, and its target."""
    assert made.inputs.model is not None
    assert made.inputs.batches is not None
    return [(made.inputs.model(ids[place : place + 1])[0], targets[place]) for ids, targets in made.inputs.batches()
            for place in range(len(targets))]  # fmt: skip


def test_of_a_softmax_head_it_is_what_its_probabilities_give() -> None:
    made = space()
    found = measured(made)
    probabilities = torch.stack([logits.detach().softmax(0) for logits, _ in alone(made)])
    expected = (probabilities * (1 - probabilities)).mean(0)
    stored = made.ports.artifacts.load_tensors(str(found.artifact))["importance"]
    torch.testing.assert_close(stored, expected, rtol=1e-12, atol=0)
    assert (found.why, found.tokens, found.trace) == (None, VOCABULARY, pytest.approx(float(expected.sum()), rel=1e-12))
    order = expected.argsort(descending=True)
    assert found.most == tuple(order[:10].tolist())
    carried = expected[order].cumsum(0) / expected.sum()
    assert found.tokens_for_99_percent == int((carried < 0.99).sum()) + 1


@pytest.mark.parametrize("policy", ["dense", "all"])
def test_of_the_datas_labels_it_is_the_mean_square_of_each_examples_gradient(policy: str) -> None:
    made = space(fisher="empirical", policy=policy)
    found = measured(made)
    squares = []
    for logits, target in alone(made):
        loss = nn.functional.cross_entropy(logits[None], target[None], reduction="sum")
        (gradient,) = torch.autograd.grad(loss, logits)
        squares.append(gradient.square())
    stored = made.ports.artifacts.load_tensors(str(found.artifact))["importance"]
    # rows are kept in the precision of the sums, float64
    torch.testing.assert_close(stored, torch.stack(squares).mean(0), rtol=1e-10, atol=1e-14)


@pytest.mark.part(of=12, by=("policy",))
@pytest.mark.parametrize("name", ["table", "lm_head"])
@pytest.mark.parametrize("policy", ["dense", "all"])
def test_of_a_head_that_holds_its_tables_weight_it_is_the_heads_own(name: str, policy: str) -> None:
    made = space(tied=True, fisher="empirical", policy=policy)
    found = measured(made, name)
    squares = []
    for logits, target in alone(made):
        loss = nn.functional.cross_entropy(logits[None], target[None], reduction="sum")
        (gradient,) = torch.autograd.grad(loss, logits)
        squares.append(gradient.square())
    stored = made.ports.artifacts.load_tensors(str(found.artifact))["importance"]
    torch.testing.assert_close(stored, torch.stack(squares).mean(0), rtol=1e-10, atol=1e-14)
    assert (found.layer, found.why, found.tokens) == (name, None, VOCABULARY)


def test_a_tied_softmax_head_gives_that_of_its_probabilities_also_where_factors_are_read_back() -> None:
    made = space(tied=True)
    probabilities = torch.stack([logits.detach().softmax(0) for logits, _ in alone(made)])
    expected = (probabilities * (1 - probabilities)).mean(0)
    whole = collect_or_read(made)
    (facts,) = (layer for layer in whole.layers if layer.name == "table")
    own = whole.load(facts.ordinal)
    write_factors(made.ports.artifacts, facts, own)
    tensors = made.ports.artifacts.load_tensors(factor_file(facts.ordinal))
    torch.testing.assert_close(tensors["head_diagonal"], expected, rtol=1e-12, atol=0)
    waiting = spill(made.ports.artifacts, own, "aside", None)
    torch.testing.assert_close(waiting.load(made.ports.artifacts).head_diagonal, expected, rtol=1e-12, atol=0)


def test_where_there_is_none_it_says_why() -> None:
    made = space()
    assert made.inputs.model is not None
    made.inputs.model.middle.requires_grad_(False)
    assert "no covered layer has that name" in str(measured(made, "middle").why)


def test_a_head_that_the_model_does_not_have_is_refused_before_anything_is_collected() -> None:
    for name, fisher, said in (("head", "mc", "its last modules are table, middle, lm_head"),
                               ("lm_head", "forward_only", "needs gradients")):  # fmt: skip
        made = space(fisher=fisher)
        made.inputs.batches = lambda: pytest.fail("data was read")
        with pytest.raises(NoSuchLayer, match=said) as refused:
            measured(made, name)
        assert refused.value.pointer == "/capacity/token_importance"
