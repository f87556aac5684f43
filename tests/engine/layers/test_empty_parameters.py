"""Parameters and layers without a single number: nothing fails, and the coverage law adds up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.capacity import CapacityParams
from engine.analyses.capacity import Capacity
from engine.collect import collect_or_read
from engine.errors import NothingToAnalyse
from engine.factors.factor_set import FactorSet
from tests.oracles import collect, summed_loss, workspace

Use = Callable[[Any, Tensor, Tensor], Tensor]


class Around(nn.Module):
    """Two layers, and between them something ``empty``, used on x (N, 4) and h (N, 5)."""

    def __init__(self, empty: Any, use: Use) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.empty, self.use = empty, use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self.empty, x, torch.tanh(self.body(x))))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


EMPTY: dict[str, tuple[Callable[[], Any], Use]] = {
    "linear without inputs": (lambda: nn.Linear(0, 5), lambda z, x, h: h + z(x[:, :0])),
    "linear without inputs or bias": (lambda: nn.Linear(0, 5, bias=False), lambda z, x, h: h + z(x[:, :0])),
    "linear without outputs": (lambda: nn.Linear(5, 0), lambda z, x, h: torch.cat([h, z(h)], 1)),
    "cell without inputs": (lambda: nn.RNNCell(0, 5), lambda z, x, h: h + z(x[:, :0], h)),
    "table of no width": (lambda: nn.Embedding(3, 0), lambda z, x, h: torch.cat([h, z(x[:, 0].long() * 0)], 1)),
    "table without rows, never called": (lambda: nn.Embedding(0, 5), lambda z, x, h: h),
    "norm of nothing": (lambda: nn.LayerNorm(0), lambda z, x, h: torch.cat([h, z(h[:, :0])], 1)),
    "vector": (lambda: parameter(0), lambda z, x, h: torch.cat([h, z.expand(len(x), 0)], 1)),
    "vector, unused": (lambda: parameter(0), lambda z, x, h: h),
    "prompt": (
        lambda: parameter(1, 0, 5),
        lambda z, x, h: torch.cat([z.expand(len(x), -1, -1), h[:, None]], 1).mean(1),
    ),
    "matrix": (lambda: parameter(5, 0), lambda z, x, h: torch.cat([h, h @ z], 1)),
}


@pytest.mark.part(of=24, by=("options",))
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("options", [{"fisher": "empirical", "ekfac": True}, {"fisher": "forward_only"}])
def test_what_holds_no_number_is_said_and_all_else_is_covered(name: str, options: dict[str, Any]) -> None:
    make, use = EMPTY[name]
    torch.manual_seed(0)
    model = Around(make(), use).double()
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,))
    space = workspace(model, [(x, y)], "classification", **options)
    list(Capacity(CapacityParams(), space).rows())
    whole: Any = collect_or_read(space)
    assert isinstance(whole, FactorSet)
    empty = {name for name, parameter in model.named_parameters() if not parameter.numel()}
    assert {layer.reason for layer in whole.declared} == {"no_numbers"}
    assert {name for layer in whole.declared for name in layer.parameters} == empty
    assert sum(layer.parameter_count for layer in whole.declared) == 0
    assert whole.covered_parameters == whole.trainable_parameters == sum(p.numel() for p in model.parameters())
    if options["fisher"] == "forward_only":
        return
    squares = dict.fromkeys(dict(model.named_parameters()), 0.0)
    for example, target in zip(x, y, strict=True):
        model.zero_grad()
        summed_loss(model(example[None])[0], target, "cross_entropy").backward()
        for key, each in model.named_parameters():
            squares[key] += 0.0 if each.grad is None else float(each.grad.square().sum())
    for layer in whole.layers:
        truth = sum(squares[key] for key in layer.parameters) / len(x)
        assert layer.exact_trace == pytest.approx(truth, rel=1e-10)


def test_a_model_of_nothing_else_is_refused() -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = parameter(0, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x

    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randint(0, 3, (4,))
    with pytest.raises(NothingToAnalyse, match="no_numbers"):
        collect(Nothing().double(), [(x, y)], "classification")
