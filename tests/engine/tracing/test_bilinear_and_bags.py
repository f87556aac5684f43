"""Bilinear layers and bags of embeddings, each example alone in plain autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.factors.factor_set import FactorSet
from engine.tracing.rewrites import operator_rewrites
from tests.oracles import collect, relative_error, summed_loss

EXACT = 1e-10


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of each example alone with respect to every parameter, (N, *shape) by name."""
    found: dict[str, list[Tensor]] = {}
    for example, target in zip(x, y, strict=True):
        names, parameters = zip(*model.named_parameters(), strict=True)
        loss = summed_loss(model(example[None])[0], target, "cross_entropy")
        for name, part in zip(names, torch.autograd.grad(loss, parameters), strict=True):
            found.setdefault(name, []).append(part)
    return {name: torch.stack(parts) for name, parts in found.items()}


def compare(whole: FactorSet, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Exact traces of all layers, and the diagonals of those that keep one; nothing is left out."""
    truth, terms = gradients(model, x, y), y.numel()
    assert whole.declared == ()
    assert whole.covered_parameters == whole.trainable_parameters
    for layer in whole.layers:
        square = sum(float(truth[name].square().sum()) for name in layer.parameters) / terms
        assert layer.exact_trace == pytest.approx(square, rel=EXACT)
        if layer.form == "diagonal_block":
            (name,) = layer.parameters
            diagonal = truth[name].square().sum(0).flatten() / terms
            assert relative_error(whole.load(layer.ordinal).G, diagonal) < EXACT


class Paired(nn.Module):
    """A bilinear layer of two views of each position."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.pair, self.head = nn.Bilinear(3, 2, 4, bias=bias), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.pair(torch.sin(x), torch.cos(x[..., :2]))))


@pytest.mark.part(of=32, by=("bias",))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (5,)])
@pytest.mark.parametrize("batch_size", [4, 1])
def test_a_bilinear_layer_is_linear_in_the_outer_product(bias: bool, shape: tuple[int, ...], batch_size: int) -> None:
    torch.manual_seed(0)
    model = Paired(bias=bias).double()
    x, y = torch.randn(6, *shape, 3, dtype=torch.float64), torch.randint(0, 3, (6, *shape))
    whole = collect(model, [(x, y)], "classification", fisher="empirical", batch_size=batch_size)
    compare(whole, model, x, y)
    outer, back = [], []
    for example, target in zip(x, y, strict=True):
        left, right = torch.sin(example), torch.cos(example[..., :2])
        out = torch.einsum("...i,oij,...j->...o", left, model.pair.weight, right)
        out = out + model.pair.bias if bias else out
        (g,) = torch.autograd.grad(summed_loss(model.head(torch.tanh(out)), target, "cross_entropy"), out)
        a = torch.einsum("...i,...j->...ij", left, right).reshape(-1, 6)
        outer.append(torch.cat([a, torch.ones(a.shape[0], 1)], 1) if bias else a)
        back.append(g.reshape(-1, 4))
    a, g = torch.cat(outer), torch.cat(back)
    (ordinal,) = [layer.ordinal for layer in whole.layers if layer.name == "pair"]
    factors = whole.load(ordinal)
    assert relative_error(factors.A, a.T @ a / a.shape[0]) < EXACT
    assert relative_error(factors.G, g.T @ g / y.numel()) < EXACT


def test_a_bilinear_layer_too_wide_for_a_factor_keeps_its_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_rewrites, "_WIDEST", 5)
    torch.manual_seed(0)
    model = Paired().double()
    x, y = torch.randn(6, 5, 3, dtype=torch.float64), torch.randint(0, 3, (6, 5))
    whole = collect(model, [(x, y)], "classification", fisher="empirical")
    forms = {layer.name: layer.form for layer in whole.layers}
    assert forms == {"pair": "diagonal_block", "pair.bias": "diagonal_block", "head": "kronecker"}
    compare(whole, model, x, y)


Bag = Callable[[nn.EmbeddingBag, Tensor, Tensor], Tensor]


def ragged(bag: nn.EmbeddingBag, ids: Tensor, x: Tensor) -> Tensor:
    """Of each example the ids that are even, and its first, packed."""
    taken = ids % 2 == 0
    taken[:, 0] = True
    ends = taken.sum(1).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends if bag.include_last_offset else ends[:-1]])
    return bag(ids[taken], starts)


def some_empty(bag: nn.EmbeddingBag, ids: Tensor, x: Tensor) -> Tensor:
    """Of each example the ids above its sum, packed: some examples have none."""
    taken = ids.cumsum(1) > ids[:, :1] * 9
    starts = taken.sum(1).cumsum(0) - taken.sum(1)
    return bag(ids[taken], starts)


BAGS: dict[str, tuple[dict[str, Any], Bag]] = {
    "sum": ({"mode": "sum"}, lambda bag, ids, x: bag(ids)),
    "mean": ({"mode": "mean"}, lambda bag, ids, x: bag(ids)),
    "max": ({"mode": "max"}, lambda bag, ids, x: bag(ids)),
    "mean without padding": ({"mode": "mean", "padding_idx": 2}, lambda bag, ids, x: bag(ids)),
    "max without padding": ({"mode": "max", "padding_idx": -7}, lambda bag, ids, x: bag(ids)),
    "weights": ({"mode": "sum"}, lambda bag, ids, x: bag(ids, per_sample_weights=torch.sin(x))),
    "offsets": ({"mode": "mean"}, lambda bag, ids, x: bag(ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1]))),
    "ragged": ({"mode": "mean"}, ragged),
    "ragged maximum": ({"mode": "max", "include_last_offset": True}, ragged),
    "empty": ({"mode": "sum"}, some_empty),
    "empty mean": ({"mode": "mean"}, some_empty),
    "empty maximum": ({"mode": "max"}, some_empty),
    "two bags of each": (
        {"mode": "sum"},
        lambda bag, ids, x: bag(ids.view(-1, 3)).view(ids.shape[0], 2, -1).tanh().sum(1),
    ),
}


class Bagged(nn.Module):
    """Ids out of what enters, put into bags."""

    def __init__(self, options: dict[str, Any], use: Bag) -> None:
        super().__init__()
        self.bag, self.head, self.use = nn.EmbeddingBag(9, 4, **options), nn.Linear(4, 3), use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.use(self.bag, (x.abs() * 7).long() % 9, x)))


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("name", BAGS)
@pytest.mark.parametrize("batch_size", [4, 1])
def test_a_bag_of_embeddings_is_covered(name: str, batch_size: int) -> None:
    torch.manual_seed(0)
    model = Bagged(*BAGS[name]).double()
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.randint(0, 3, (7,))
    compare(collect(model, [(x, y)], "classification", fisher="empirical", batch_size=batch_size), model, x, y)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("batch_size", [4, 1])
def test_a_table_that_divides_gradients_by_how_often_an_example_has_an_id_is_covered(
    padding: int | None, batch_size: int
) -> None:
    torch.manual_seed(0)
    model = Bagged({}, lambda bag, ids, x: bag(ids).sum(1)).double()
    model.bag = nn.Embedding(9, 4, padding_idx=padding, scale_grad_by_freq=True).double()  # type: ignore[assignment]
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.randint(0, 3, (7,))
    compare(collect(model, [(x, y)], "classification", fisher="empirical", batch_size=batch_size), model, x, y)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"max_norm": 1.0}, "embedding_renormalised"), ({"scale_grad_by_freq": True, "mode": "sum"}, "unknown_operation")],
)
def test_a_bag_that_renormalises_itself_or_divides_gradients_is_refused(options: dict[str, Any], reason: str) -> None:
    """The frequencies are those of the call, in torch's kernel not even of the id itself."""
    torch.manual_seed(0)
    model = Bagged(options, lambda bag, ids, x: bag(ids)).double()
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.randint(0, 3, (7,))
    whole = collect(model, [(x, y)], "classification", fisher="empirical")
    assert {layer.name: layer.reason for layer in whole.declared} == {"bag": reason}
