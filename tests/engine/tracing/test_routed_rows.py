"""Experts that are given their rows by an index are covered whole, each token counted at its expert."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.oracles import collect, relative_error, require_traces

EXPERTS = 3


class Mixture(nn.Module):
    """A router and experts, joined by the function that a test gives."""

    def __init__(self, run: Callable[["Mixture", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.head, self.run = nn.Linear(6, EXPERTS), nn.Linear(8, 4), run
        self.experts = nn.ModuleList(nn.Linear(6, 8) for _ in range(EXPERTS))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self, x, self.router(x).argmax(-1)).tanh())


def index_added(model: Mixture, x: Tensor, choice: Tensor) -> Tensor:
    left = x.new_zeros(len(x), 8)
    for number, expert in enumerate(model.experts):
        taken = (choice == number).nonzero()[:, 0]
        left = left.index_add(0, taken, expert(x[taken]))
    return left


def masked(model: Mixture, x: Tensor, choice: Tensor) -> Tensor:
    left = x.new_zeros(len(x), 8)
    for number, expert in enumerate(model.experts):
        left[choice == number] = expert(x[choice == number])
    return left


def copied(model: Mixture, x: Tensor, choice: Tensor) -> Tensor:
    left = x.new_zeros(len(x), 8)
    for number, expert in enumerate(model.experts):
        (taken,) = torch.where(choice == number)
        left = left.index_copy(0, taken, expert(x.index_select(0, taken)))
    return left


def squeezed(model: Mixture, x: Tensor, choice: Tensor) -> Tensor:
    """As ``AdaptiveLogSoftmaxWithLoss`` picks rows: a single one by a number, not by a list of one."""
    left = x.new_zeros(len(x), 8)
    for number, expert in enumerate(model.experts):
        taken = (choice == number).nonzero().squeeze()
        left = left.index_add(0, taken.reshape(-1), expert(x.index_select(0, taken)))
    return left


def gathered(model: Mixture, x: Tensor, choice: Tensor) -> Tensor:
    left = x.new_zeros(len(x), 8)
    for number, expert in enumerate(model.experts):
        taken = (choice == number).nonzero()
        left = left.scatter_add(0, taken.expand(-1, 8), expert(x.gather(0, taken.expand(-1, 6))))
    return left


def sorted_by_expert(model: Mixture, x: Tensor, choice: Tensor) -> Tensor:
    order = choice.argsort(stable=True)
    parts = x[order].split(torch.bincount(choice, minlength=EXPERTS).tolist())
    left = torch.cat([expert(part) for expert, part in zip(model.experts, parts, strict=True)])
    return left[order.argsort()]


def by_masks(model: Mixture, x: Tensor, choice: Tensor) -> Tensor:
    """The harmless twin: every expert sees every example, and a mask decides."""
    return sum((expert(x) * (choice == n)[:, None] for n, expert in enumerate(model.experts)), x.new_zeros(()))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 6, dtype=torch.float64, generator=generator), torch.randint(0, 4, (24,), generator=generator)


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("batch_size", [1, 4, 8])
@pytest.mark.parametrize("run", [index_added, masked, copied, squeezed, gathered, sorted_by_expert])
def test_experts_fed_by_index_are_covered_whole(
    run: Callable[[Mixture, Tensor, Tensor], Tensor], batch_size: int
) -> None:
    model, (x, y) = Mixture(run), data()
    whole = collect(model, [(x, y)], "classification", fisher="empirical", batch_size=batch_size)
    assert {layer.name: layer.reason for layer in whole.declared} == {"router": "no_gradient"}
    choice = model.router(x).argmax(-1)
    facts = {layer.name: layer for layer in whole.layers}
    twin = collect(Mixture(by_masks), [(x, y)], "classification", fisher="empirical", batch_size=batch_size)
    apart = {layer.name: layer.ordinal for layer in twin.layers}
    for number in range(EXPERTS):
        own = facts[f"experts.{number}"]
        factors = whole.load(own.ordinal)
        rows = torch.cat([x[choice == number], x.new_ones(int((choice == number).sum()), 1)], 1)
        assert own.positions == len(rows)
        assert relative_error(factors.A / factors.A[-1, -1], rows.T @ rows / len(rows)) < 1e-12
        assert relative_error(factors.G, twin.load(apart[own.name]).G) < 1e-12
    if run is gathered and batch_size > 1:
        # the first expert's rows have no order that a trial has shown, so that it has no exact trace
        return
    losses = (functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1]) for row in range(24))
    require_traces(model, whole, losses, 24)


class AdaptiveHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 5, [2, 4], div_value=2.0)
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return (self.head(self.first(x).tanh(), labels).loss,)


def test_an_adaptive_softmax_with_one_example_in_a_cluster_is_covered_whole() -> None:
    model, (x, _) = AdaptiveHead(), data()
    labels = torch.tensor([0, 1, 0, 2, 1, 0, 4, 3])
    whole = collect(model, [(x[:8], labels)], "classification", "model", fisher="empirical")
    assert not whole.declared
    require_traces(model, whole, (model(x[row : row + 1], labels[row : row + 1])[0] for row in range(8)), 8)
