"""Embeddings that are looked up once and broadcast over the batch: covered where that changes nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from engine.factors.factor_set import FactorSet
from tests.oracles import collect, ggn_block, kronecker, relative_error, same_facts

EXACT = 1e-12


class Positioned(nn.Module):
    """Tokens plus a table of positions, looked up as a test says."""

    def __init__(self, look_up: Callable[["Positioned", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position = nn.Embedding(9, 4), nn.Embedding(8, 4)
        self.scale, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9)
        self.look_up = look_up
        self.examples = 0
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        self.examples = ids.shape[0]
        return self.head(torch.tanh(self.norm(self.token(ids) + self.look_up(self, torch.arange(ids.shape[1])))))


def flat(model: Positioned, places: Tensor) -> Tensor:
    return model.scale(model.position(places))


def leading(model: Positioned, places: Tensor) -> Tensor:
    return model.scale(model.position(places[None]))


def sequences() -> Tensor:
    # as many positions as twice the batch of four, which flattened positions could be too
    return torch.randint(0, 9, (10, 8), generator=torch.Generator().manual_seed(1))


def measured(look_up: Callable[[Positioned, Tensor], Tensor], **options: object) -> FactorSet:
    ids = sequences()
    return collect(Positioned(look_up), [(ids, ids)], "causal_lm", **{"fisher": "mc", **options})


@pytest.mark.part(of=32, by=("look_up",))
@pytest.mark.parametrize("look_up", [flat, leading])
@pytest.mark.parametrize("options", [
    {"batch_size": 2}, {"batch_size": 4}, {"batch_size": 8, "sharing": "reduce"}, {"fisher": "type2"},
    {"fisher": "forward_only"}, {"dtype": "float32"},
])  # fmt: skip
def test_a_broadcast_table_is_one_looked_up_for_every_example(
    look_up: Callable[[Positioned, Tensor], Tensor], options: dict[str, object]
) -> None:
    found = measured(look_up, **options)
    # a lookup per example, and a batch of one, know nothing of broadcasting
    apart = measured(look_up, **{**options, "batch_size": 1})
    expanded = measured(lambda model, places: flat(model, places.expand(model.examples, -1)), **options)
    tolerance = 1e-5 if options.get("dtype") == "float32" else EXACT
    for truth in (apart, expanded):
        assert same_facts(found, truth, tolerance)
        assert [layer.reason for layer in found.declared] == [layer.reason for layer in truth.declared]
        for ordinal in range(len(truth.layers)):
            assert relative_error(found.load(ordinal).A, truth.load(ordinal).A) < tolerance
            assert relative_error(found.load(ordinal).G, truth.load(ordinal).G) < tolerance
    assert "position" in [layer.name for layer in found.layers]


def test_the_block_of_a_broadcast_table_is_exact() -> None:
    """One position each: the vectors' gradients do not depend on which one is looked up."""

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.mark, self.head = nn.Embedding(1, 3), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(x + self.mark(torch.zeros(1, dtype=torch.int64))))

    model = Marked().double()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(0, 4, (7,))
    whole = collect(model, [(x, y)], "classification", min_coverage=1.0)
    truth = ggn_block(
        model, x, y, "cross_entropy", ("mark.weight",), lambda jacobian: jacobian["mark.weight"].flatten(1)
    )
    assert relative_error(kronecker(whole, "mark"), truth) < EXACT


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("look_up", [
    lambda model, places: model.position(places[None])[0],
    lambda model, places: model.position(places[None])[-1:],
    lambda model, places: model.position(places[None]).mean(0),
    lambda model, places: model.position(places[None]).sum(0),
    lambda model, places: model.position(places).unsqueeze(0),
    lambda model, places: model.position(places) * 0,
])  # fmt: skip
def test_a_table_whose_copies_would_not_be_their_examples_has_its_diagonal_instead(
    look_up: Callable[[Positioned, Tensor], Tensor],
) -> None:
    """The vectors are followed to where they meet the tokens, and each example gets its own there."""
    whole = measured(look_up, fisher="empirical")
    assert {layer.name: layer.reason for layer in whole.declared} == {"scale": "no_gradient"}
    (table,) = [layer for layer in whole.layers if layer.name == "position"]
    assert table.form == "diagonal_block"
    model, ids = Positioned(look_up), sequences()
    truth = torch.zeros(8, 4, dtype=torch.float64)
    for example in ids:
        outputs = model(example[None])[0, :-1]
        loss = functional.cross_entropy(outputs, example[1:], reduction="sum")
        truth += torch.autograd.grad(loss, model.position.weight)[0].square() / (10 * 7)
    assert (whole.load(table.ordinal).G.view(8, 4) - truth).norm() <= EXACT * truth.norm()


def test_one_table_that_cannot_be_spread_does_not_hold_back_another() -> None:
    def both(model: Positioned, places: Tensor) -> Tensor:
        return model.position(places[None]) + model.extra(places[None])[0]  # type: ignore[operator]

    ids = sequences()
    model = Positioned(both)
    model.extra = nn.Embedding(8, 4).double()
    whole = collect(model, [(ids, ids)], "causal_lm", fisher="mc")
    assert {layer.name: layer.reason for layer in whole.declared} == {
        "scale": "no_gradient",
    }
    assert {layer.name: layer.form for layer in whole.layers if layer.name in ("position", "extra")} == {
        "position": "diagonal",
        "extra": "diagonal_block",
    }


@pytest.mark.parametrize("loss", [None, "model"])
def test_the_position_table_of_gpt2_is_covered(loss: str | None) -> None:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False)).double()
    ids = torch.randint(0, 11, (5, 6))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    chunk = ({"input_ids": ids, "attention_mask": mask}, ids)
    fisher = "empirical" if loss else "mc"
    whole, apart = (collect(model, [chunk], "causal_lm", loss, fisher=fisher, batch_size=size) for size in (5, 1))
    (table,) = [layer for layer in whole.layers if layer.name == "transformer.wpe"]
    # the model's own loss counts the labels on padding, whose gradients are then not zero
    assert table.positions == (int(mask.sum()) if loss is None else ids.numel())
    assert relative_error(whole.load(table.ordinal).A, apart.load(table.ordinal).A) < EXACT
    if loss is None:
        assert relative_error(whole.load(table.ordinal).G, apart.load(table.ordinal).G) < EXACT
