"""Parameters that a model reads outside the calls of the modules that hold them: never measured as if it did not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from engine.factors.factor_set import FactorSet
from tests.oracles import collect, require_traces


class Language(nn.Module):
    """A table, two layers and a head that a test gives."""

    def __init__(self, head: Callable[["Language", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.second = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.words = nn.Linear(4, 9)
        self.norm = nn.LayerNorm(4)
        self.head = head
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.second(torch.tanh(self.first(self.table(ids))))))
        return self.head(self, x)


def measured(head: Callable[[Language, Tensor], Tensor], model: Language | None = None) -> FactorSet:
    ids = torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(0))
    return collect(model or Language(head), [(ids, ids)], "causal_lm", fisher="mc")


def reasons(whole: FactorSet) -> dict[str, str]:
    return {layer.name: layer.reason for layer in whole.declared if layer.reason != "no_gradient"}


class Rounded(torch.autograd.Function):
    """Eight bits, with the gradient of the number itself."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor) -> Tensor:
        return (numbers * 16).round().to(torch.int8).to(numbers.dtype) / 16

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def straight_through(numbers: Tensor) -> Tensor:
    return numbers + ((numbers * 16).round().to(torch.int8).to(numbers.dtype) / 16 - numbers).detach()


def scaled(model: Language, x: Tensor) -> Tensor:
    """The words, called with twice their weights."""
    return functional_call(model.words, {"weight": model.words.weight * 2, "bias": model.words.bias}, (x,))


def hooked(model: Language, x: Tensor) -> Tensor:
    handle = model.first.register_forward_hook(lambda module, _, output: output + module.bias)
    x = model.first(x)
    handle.remove()
    return model.words(x)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(("head", "elsewhere"), [
    (lambda m, x: x @ m.table.weight.T, {"table"}),
    (lambda m, x: functional.linear(x, m.table.weight, m.words.bias), {"table", "words"}),
    (lambda m, x: m.words(x) + m.first.bias.sum() + (x @ m.second.weight).sum(-1, keepdim=True), {"first", "second"}),
    (lambda m, x: m.words(x) * m.norm.weight.mean(), {"norm"}),
    (lambda m, x: m.words(m.first.forward(x)), set()),
    (lambda m, x: x @ m.table.weight.nan_to_num().T, {"table"}),
    (lambda m, x: x @ torch.where(m.table.weight > 0, m.table.weight, 0.0).T, {"table"}),
    (lambda m, x: x @ straight_through(m.table.weight).T, {"table"}),
    (lambda m, x: functional.embedding(m.words(x).argmax(-1), m.table.weight) @ m.words.weight.T, {"table", "words"}),
    (scaled, set()),
    (hooked, {"first"}),
])  # fmt: skip
def test_a_use_that_no_hook_sees_is_measured_with_the_others(
    head: Callable[[Language, Tensor], Tensor], elsewhere: set[str]
) -> None:
    ids = torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(0))
    model = Language(head)
    whole = collect(model, [(ids, ids)], "causal_lm", fisher="empirical")
    assert reasons(whole) == {}
    found = {layer.name.removesuffix(".bias") for layer in whole.layers if layer.form == "diagonal_block"}
    assert found == elsewhere
    losses = (functional.cross_entropy(model(each[None])[0, :-1], each[1:], reduction="sum") for each in ids)
    require_traces(model, whole, losses, 24)


def test_a_use_of_later_data_is_declared() -> None:
    def head(model: Language, x: Tensor) -> Tensor:
        # each example decides for itself; the first one, which the dry run repeats, decides against it
        used = x[:, :1, :1] < 0.5
        return model.words(x) + (used * (x @ model.second.weight).sum(-1, keepdim=True) if used.any() else 0)

    assert reasons(measured(head)) == {"second": "unforeseen_use"}


def test_a_module_called_with_other_weights_is_not_measured_by_its_calls() -> None:
    def head(model: Language, x: Tensor) -> Tensor:
        weight = torch.outer(torch.arange(9.0).double(), torch.ones(4).double())
        return functional_call(model.words, {"weight": weight, "bias": model.words.bias.detach()}, (x,))

    whole = measured(head)
    assert "words" in {layer.name for layer in whole.declared}


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("head", [
    lambda m, x: m.words(x),
    lambda m, x: m.words(m.first(x)),
    lambda m, x: m.words(x.to(m.table.weight.dtype)[..., : m.table.weight.shape[1]]),
    lambda m, x: m.words(x) + 0 * len(m.first.weight),
])  # fmt: skip
def test_calls_and_shapes_are_no_other_use(head: Callable[[Language, Tensor], Tensor]) -> None:
    model = Language(head)
    parameters = dict(model.named_parameters())
    # a hook is part of the call it hangs on
    model.first.register_forward_hook(lambda module, _, output: output + module.bias.detach())
    model.first.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.detach().norm(),))
    whole = measured(head, model)
    assert reasons(whole) == {}
    assert whole.declared == ()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not any(m._forward_pre_hooks for m in (model.table, model.second, model.words))


def test_tied_layers_are_read_in_their_own_calls() -> None:
    model = Language(lambda m, x: m.words(x))
    model.words.weight = model.table.weight
    model.second.weight = model.first.weight
    assert reasons(measured(model.head, model)) == {}
    model = Language(lambda m, x: m.words(x) + m.table.weight.sum())
    model.words.weight = model.table.weight
    whole = measured(model.head, model)
    assert reasons(whole) == {}
    assert {layer.name: layer.form for layer in whole.layers}["table"] == "diagonal_block"


def test_a_write_to_a_view_of_an_output_hides_no_gradient() -> None:
    def head(model: Language, x: Tensor) -> Tensor:
        left = model.words(x)
        # autograd takes up the history at what the output itself is a view of
        left.view(-1, 3, 3).mul_(2)
        return left

    model = Language(head)
    ids = torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(0))
    whole = collect(model, [(ids, ids)], "causal_lm", fisher="empirical", min_coverage=1.0)
    losses = (functional.cross_entropy(model(each[None])[0, :-1], each[1:], reduction="sum") for each in ids)
    require_traces(model, whole, losses, 24)
