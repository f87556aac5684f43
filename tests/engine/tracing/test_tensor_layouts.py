"""A rewritten operation leaves its numbers in the memory layout that torch's own result has."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from engine.model.torch_functions import arrange_like, layout_of
from tests.oracles import collect, curvature_traces

WIDTH = 4


class Viewing(nn.Module):
    """A projection by a bare weight, of which the result is viewed."""

    def __init__(self, project: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.head = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.project = project

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.project(self.stem(x).tanh(), self.weight).tanh())
        return hidden


def _time_first(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("ntd,dh->tnh", hidden, weight).view(-1, WIDTH).view(hidden.shape[1], -1, WIDTH).mean(0)


def _from_the_left(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(weight, hidden.transpose(1, 2)).view(len(hidden), -1)[:, :WIDTH]


@pytest.mark.part(of=32, by=("project",))
@pytest.mark.parametrize("project", [_time_first, _from_the_left])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_a_view_that_the_model_takes_of_a_product_stays_possible(
    project: Callable[[Tensor, Tensor], Tensor], batch_size: int
) -> None:
    torch.manual_seed(0)
    model, x, y = Viewing(project), torch.randn(6, 3, 5, dtype=torch.float64), torch.randint(0, 3, (6,))
    whole = collect(model, [(x, y)], "classification", min_coverage=1.0, batch_size=batch_size)
    traces = curvature_traces(model, x, y, "cross_entropy")
    for layer in whole.layers:
        truth = float(sum(traces[name].sum() for name in layer.parameters)) / len(x)
        assert layer.exact_trace == pytest.approx(truth, rel=1e-10), layer.name


def test_only_another_order_is_copied() -> None:
    plain = torch.randn(2, 1, 3)
    same = arrange_like(plain, torch.empty(2, 1, 3, device="meta"))
    assert same is plain
    turned = arrange_like(plain, torch.empty(3, 1, 2, device="meta").permute(2, 1, 0))
    assert turned.stride(0) == 1
    assert torch.equal(turned, plain)


def test_a_layout_is_that_of_torch() -> None:
    left, right = torch.randn(2, 3, 4), torch.randn(4, 5)
    layout = layout_of(lambda change: torch.einsum("ntd,dh->tnh", change(left), change(right)))
    assert layout.is_meta
    assert layout.stride() == torch.einsum("ntd,dh->tnh", left, right).stride()
