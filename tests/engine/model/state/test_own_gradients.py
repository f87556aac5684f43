"""Own gradients: a model that takes gradients of its own parameters in a pass is measured, and left as it was."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import ModelRefused
from engine.estimate import estimate
from engine.model.state.own_gradients import takes_own_gradients, with_own_gradients
from engine.model.state.preserve_state import preserve_state
from kronoscope.local import PartlyCovered, measure
from tests.oracles import collect, require_traces, workspace


class Again(torch.autograd.Function):
    """Add ``f(x)`` to x, and compute it again on the way back, as reversible blocks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.f, _ = f, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + f(x)

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            first, *others = torch.autograd.grad(ctx.f(own), [own, *ctx.f.parameters()], direction)
        return (direction + first, None, *others)


class Net(nn.Module):
    def __init__(self, middle: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.register_buffer("support", torch.randn(4, 8))
        self.middle = middle
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self, self.first(x).tanh()).tanh())


def recomputed(net: Net, h: Tensor) -> Tensor:
    return Again.apply(h, net.inner, *net.inner.parameters())  # type: ignore[no-any-return,no-untyped-call]


def fast_weights(net: Net, h: Tensor) -> Tensor:
    """Step once along the gradient of a loss on stored examples, and go back through the step."""
    weight = net.inner.weight
    (step,) = torch.autograd.grad(net.inner(net.support).square().mean(), [weight], create_graph=True)
    return functional.linear(h, weight - 0.1 * step, net.inner.bias)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(10, 6, dtype=torch.float64, generator=generator), torch.randint(0, 5, (10,), generator=generator)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Iterator[Tensor]:
    return (functional.cross_entropy(model(x[place : place + 1]), y[place : place + 1]) for place in range(len(x)))


def hooks_of(parameters: Sequence[nn.Parameter]) -> list[Any]:
    return [each._post_accumulate_grad_hooks for each in parameters if each._post_accumulate_grad_hooks]


@pytest.mark.parametrize(
    "options", [{}, {"fisher": "empirical"}, {"fisher": "empirical", "self_check": "off"}], ids=["type2", "all", "none"]
)
@pytest.mark.parametrize("middle", [recomputed, fast_weights])
def test_the_layers_around_it_are_covered(middle: Callable[[Net, Tensor], Tensor], options: dict[str, Any]) -> None:
    model, (x, y) = Net(middle), data()
    whole = collect(model, [(x, y)], "classification", exact_trace=True, **options)
    assert {layer.name for layer in whole.layers} == {"first", "head"}
    assert {layer.name: layer.reason for layer in whole.declared} == {"inner": "used_elsewhere"}
    if options:
        require_traces(model, whole, losses(model, x, y), len(x))
    parameters = list(model.parameters())
    assert all(each.requires_grad and each.grad is None for each in parameters)
    assert not hooks_of(parameters)


def test_what_is_computed_again_has_the_factors_of_its_plain_twin() -> None:
    (x, y), found = data(), {}
    for name, middle in (("again", recomputed), ("twin", lambda net, h: h + net.inner(h))):
        whole = collect(Net(middle), [(x, y)], "classification", fisher="mc", samples=2)
        found[name] = {layer.name: whole.load(layer.ordinal) for layer in whole.layers}
    for layer in ("first", "head"):
        assert torch.allclose(found["again"][layer].A, found["twin"][layer].A, rtol=1e-12)
        assert torch.allclose(found["again"][layer].G, found["twin"][layer].G, rtol=1e-11, atol=1e-15)


def test_analyses_that_pass_over_the_data_again_take_them_too() -> None:
    options: dict[str, Any] = {"task": "classification", "collection": {"dtype": "float64", "batch_size": 4}}
    x, y = data()
    model = Net(recomputed)
    # a second job finds the model as the first one did
    for _ in range(2):
        with pytest.warns(PartlyCovered):
            found = measure(model, (x, y), kinds=("influence",), query=(x[:2], y[:2]), **options)
        assert {row.layer: row.reason for row in found.layers if row.reason} == {"inner": "used_elsewhere"}


def test_it_can_be_estimated() -> None:
    model, (x, y) = Net(fast_weights), data()
    assert estimate(workspace(model, [(x, y)], "classification"))["fits"]


def test_gradients_that_nothing_waits_for_are_let_go_of() -> None:
    model, arrived = Net(recomputed), []
    x, _ = data()

    def run() -> Tensor:
        model(x).sum().backward()
        return model.inner.weight

    with preserve_state(model, torch.float64):
        weight = with_own_gradients(model, run)
        assert takes_own_gradients(model)
        assert weight.grad is None
        model.head.bias.register_post_accumulate_grad_hook(lambda each: arrived.append(each.grad))
        run()
    assert torch.equal(arrived[0], torch.full((5,), 10.0, dtype=torch.float64))


def test_a_gradient_taken_in_a_later_batch_alone_is_refused_with_what_to_do() -> None:
    def middle(net: Net, h: Tensor) -> Tensor:
        if bool((h > 0.9999).any()):
            torch.autograd.grad(net.inner(h.detach()).sum(), [net.inner.weight])
        return net.inner(h)

    x, y = data()
    x[9] = 99.0
    with pytest.raises(ModelRefused, match="only if it does so in the first batch") as caught:
        collect(Net(middle), [(x, y)], "classification")
    assert caught.value.pointer == "/model"
    assert "belong together" not in caught.value.message


def test_a_model_that_takes_none_needs_none() -> None:
    model, (x, y) = Net(lambda net, h: net.inner(h)), data()
    collect(model, [(x, y)], "classification")
    assert not takes_own_gradients(model)
