"""Rows that an index puts elsewhere (edges, nodes, experts), each example alone in plain autograd."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from engine.factors.factor_set import FactorSet
from engine.tracing.batch_provenance import Rows
from engine.tracing.moved_rows import follow_join, follow_scatter
from tests.oracles import collect, relative_error, summed_loss

EXACT = 1e-10
NODES = 5


class Convolution(nn.Module):
    """A layer of a graph network with parameters of its own: messages along edges, put together at their ends."""

    def __init__(self, aggregate: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.weight, self.own = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.bias, self.aggregate = nn.Parameter(torch.randn(4)), aggregate

    def forward(self, x: Tensor, start: Tensor, end: Tensor) -> Tensor:
        messages = self.aggregate(x.index_select(0, start), end, x.shape[0])
        return messages @ self.weight.T + self.bias + x @ self.own


class Graphs(nn.Module):
    """Two such layers over the nodes of all graphs as one; some nodes have no edge that ends there."""

    def __init__(self, aggregate: Callable[[Tensor, Tensor, int], Tensor], *, ragged: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Convolution(aggregate), Convolution(aggregate)
        self.head, self.ragged = nn.Linear(4, 3), ragged
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        present = x[..., 4] > -0.8 if self.ragged else torch.ones(x.shape[:2], dtype=torch.bool)
        present[:, 0] = True
        graph, start, end = (links(x) & present[:, :, None] & present[:, None, :]).nonzero(as_tuple=True)
        place = present.flatten().cumsum(0) - 1
        start, end = place[graph * NODES + start], place[graph * NODES + end]
        nodes = x[..., :4][present]
        hidden = torch.tanh(self.second(torch.tanh(self.first(nodes, start, end)), start, end))
        owner = present.nonzero()[:, 0]
        return self.head(hidden.new_zeros(x.shape[0], 4).index_add(0, owner, hidden))


def links(x: Tensor) -> Tensor:
    """(N, 5, 5) edges that depend on the data; few enough that some nodes have none."""
    return torch.sin(7 * x[:, :, None, 0] + 3 * x[:, None, :, 1]) > 0.5


def scatter_sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    return values.new_zeros(size, values.shape[1]).scatter_add_(0, index[:, None].expand_as(values), values)


def scatter_largest(values: Tensor, index: Tensor, size: int) -> Tensor:
    own = torch.zeros(size, values.shape[1], dtype=values.dtype)
    return own.scatter_reduce(0, index[:, None].expand_as(values), values, "amax", include_self=False)


def added_mean(values: Tensor, index: Tensor, size: int) -> Tensor:
    count = torch.bincount(index, minlength=size).clamp(min=1)
    return torch.zeros(size, values.shape[1], dtype=values.dtype).index_add_(0, index, values) / count[:, None]


AGGREGATIONS = {"sum": scatter_sum, "largest": scatter_largest, "mean": added_mean}


def oracle(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of each example alone with respect to every parameter, (N, *shape) by name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for example, target in zip(x, y, strict=True):
        loss = summed_loss(model(example[None])[0], target, "cross_entropy")
        parts = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        for name, part in zip(names, parts, strict=True):
            found[name].append(part)
    return {name: torch.stack(parts) for name, parts in found.items()}


def hold(whole: FactorSet, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """All parameters are covered, and exact traces and diagonals are those of each example alone."""
    assert whole.declared == ()
    truth = oracle(model, x, y)
    for layer in whole.layers:
        squares = {name: gradients.square() for name, gradients in truth.items() if name in layer.parameters}
        parameter, _, expert = layer.name.rstrip("]").partition("[")
        if expert:
            squares = {parameter: truth[parameter][:, int(expert)].square()}
        square = sum(float(each.sum()) for each in squares.values())
        assert layer.exact_trace == pytest.approx(square / y.numel(), rel=EXACT), layer.name
        if layer.form == "diagonal_block":
            (name,) = layer.parameters
            diagonal = truth[name].square().sum(0).flatten() / y.numel()
            assert relative_error(whole.load(layer.ordinal).G, diagonal) < EXACT


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("batch_size", [4, 1])
def test_layers_behind_a_sum_over_edges_are_covered(aggregation: str, ragged: bool, batch_size: int) -> None:
    model = Graphs(AGGREGATIONS[aggregation], ragged=ragged)
    x, y = torch.randn(7, NODES, 6, dtype=torch.float64), torch.randint(0, 3, (7,))
    whole = collect(model, [(x, y)], "classification", fisher="empirical", batch_size=batch_size)
    hold(whole, model, x, y)
    forms = {layer.name: layer.form for layer in whole.layers}
    assert forms["first"] == forms["first.own"] == "kronecker"


class Sorted(nn.Module):
    """Experts that are handed sections of the tokens, sorted by their expert in no order of the examples'."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4, 4)), nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[..., :4].reshape(-1, 4)
        expert = (7 * tokens[:, 0].abs()).long() % 3
        # turned about, so that what an expert gets of one example stands in another order beside others
        order = (expert * 1000 + (17 * torch.arange(len(tokens))) % len(tokens)).argsort()
        sections = tokens[order].split(torch.bincount(expert, minlength=3).tolist())
        made = torch.cat([section @ self.weight[place].T for place, section in enumerate(sections)])
        back = torch.zeros_like(tokens).index_add(0, order, torch.tanh(made)) + self.bias
        return self.head(torch.tanh(back).view(x.shape[0], -1, 4).mean(1))


@pytest.mark.parametrize("batch_size", [4, 1])
def test_experts_of_sorted_sections_are_covered(batch_size: int) -> None:
    model = Sorted()
    x, y = torch.randn(7, 6, 5, dtype=torch.float64), torch.randint(0, 3, (7,))
    whole = collect(model, [(x, y)], "classification", fisher="empirical", batch_size=batch_size)
    hold(whole, model, x, y)


def test_examples_that_meet_in_a_sum_have_no_rows() -> None:
    source = Rows(dim=0, minor=2, size=6)
    left = torch.zeros(4, 3)
    assert follow_scatter(source, None, torch.tensor([0, 1, 1, 2, 3, 3]), 0, left, 3) is None


def test_a_row_that_nothing_is_put_into_belongs_to_the_layout_of_the_source_or_to_nobody() -> None:
    nodes = Rows(dim=0, minor=1, size=5, labels=torch.tensor([0, 0, 0, 2, 2]))
    edges = Rows(dim=0, minor=1, size=5, labels=torch.tensor([0, 2]), origin=nodes)
    rows = follow_scatter(edges, None, torch.tensor([1, 3]), 0, torch.zeros(5, 3), 3)
    assert rows is not None
    assert torch.equal(rows.owners(3), nodes.owners(3))
    assert follow_scatter(edges, None, torch.tensor([1, 2]), 0, torch.zeros(4, 3), 3) is None


def test_joined_rows_keep_the_order_that_they_have() -> None:
    cpu = torch.device("cpu")
    one = Rows(dim=0, minor=1, size=3)
    assert follow_join([one, one], 3, cpu) == Rows(dim=0, minor=1, size=6)
    picked = Rows(dim=0, minor=2, size=6, labels=torch.tensor([5, 0]))
    assert follow_join([picked, one], 3, cpu).owners(3).tolist() == [2, 0, 0, 1, 2]
