"""A probe that cannot run says nothing: the model is measured, and what is wrong with its data a plain call says."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn import functional

from engine.errors import ModelRefused
from tests.oracles import collect, require_traces


class Net(nn.Module):
    """Two layers, joined by the function that a test gives."""

    def __init__(self, run: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.run = nn.Linear(6, 8), nn.Linear(8, 3), run
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self, x))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(12, 6, dtype=torch.float64, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def adapted(model: Net, x: Tensor) -> Tensor:
    """MAML's inner step."""
    own = {
        name: each if each.requires_grad else each.detach().requires_grad_()
        for name, each in model.first.named_parameters()
    }
    loss = functional_call(model.first, own, (torch.ones_like(x[:1]),)).square().mean()
    steps = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    return functional_call(
        model.first, {name: each - 0.1 * step for (name, each), step in zip(own.items(), steps, strict=True)}, (x,)
    ).tanh()


def nested(model: Net, x: Tensor) -> Tensor:
    rows = torch.nested.as_nested_tensor([each[None] for each in x], layout=torch.jagged)
    padded: Tensor = torch.nested.to_padded_tensor(model.first(rows), 0.0)
    return padded.squeeze(1).tanh()


def tangent(model: Net, x: Tensor) -> Tensor:
    return jvp(lambda rows: model.first(rows).tanh(), (x,), (torch.ones_like(x),))[1]


def force(model: Net, x: Tensor) -> Tensor:
    """The gradient of an energy with respect to the input."""
    entered = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.first(entered).tanh().sum(), entered, create_graph=True)
    return torch.cat([gradient, gradient[:, :2]], 1)


def perturbed(model: Net, x: Tensor) -> Tensor:
    """An adversarial step, whose own gradient enters nothing."""
    entered = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.first(entered).tanh().sum(), entered)
    return model.first(x + 0.1 * gradient.sign()).tanh()


def no_copies(model: Net, x: Tensor) -> Tensor:
    if len(x) > 1 and torch.equal(x[0], x[-1]):
        raise RuntimeError("a batch of copies")
    return model.first(x).tanh()


def no_three(model: Net, x: Tensor) -> Tensor:
    return model.first(x).tanh().view(2, -1, 8).flatten(0, 1) if len(x) > 1 else model.first(x).tanh()


def with_graph(model: Net, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        raise RuntimeError("this needs a graph")
    return model.first(x).tanh()


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(("run", "reason"), [
    (adapted, "used_elsewhere"), (nested, "nested_tensor"), (tangent, "transformed"), (force, "gradient_identity"),
    (perturbed, None), (no_copies, None), (no_three, None), (with_graph, None),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_model_that_a_probe_cannot_run_is_measured(run: Callable[[Net, Tensor], Tensor], reason: str | None) -> None:
    model, (x, y) = Net(run), data()
    whole = collect(model, [(x, y)], "classification", fisher="empirical")
    assert {layer.name: layer.reason for layer in whole.declared} == ({} if reason is None else {"first": reason})
    losses = (functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1]) for row in range(12))
    require_traces(model, whole, losses, 12)


def test_a_model_that_cannot_be_called_is_told_that_data_and_model_do_not_match() -> None:
    x, y = data()
    with pytest.raises(ModelRefused, match="check that data and model belong together") as refused:
        collect(Net(lambda model, rows: model.first(rows[:, :5])), [(x, y)], "classification")
    assert refused.value.pointer == "/data"


def test_the_data_are_not_blamed_where_the_model_runs_by_itself() -> None:
    def hooked(model: Net, x: Tensor) -> Tensor:
        if any(each.requires_grad for each in model.parameters()) or model.first._forward_hooks:
            raise RuntimeError("nobody is to watch")
        return torch.tanh(model.first(x))

    x, y = data()
    with pytest.raises(ModelRefused, match="by itself the model runs on its first batch") as refused:
        collect(Net(hooked), [(x, y)], "classification")
    assert refused.value.pointer == "/model"
