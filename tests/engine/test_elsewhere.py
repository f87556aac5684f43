"""Parameters that a model reads outside the calls of the modules that hold them: never measured as if it did not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.curvature.collected import Collected
from tests.oracles import collect


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


def measured(head: Callable[[Language, Tensor], Tensor], model: Language | None = None) -> Collected:
    ids = torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(0))
    return collect(model or Language(head), [(ids, ids)], "causal_lm", fisher="mc")


def reasons(whole: Collected) -> dict[str, str]:
    return {layer.name: layer.reason for layer in whole.declared if layer.reason != "no_gradient"}


@pytest.mark.parametrize(("head", "elsewhere"), [
    (lambda m, x: x @ m.table.weight.T, {"table"}),
    (lambda m, x: functional.linear(x, m.table.weight, m.words.bias), {"table"}),
    (lambda m, x: m.words(x) + m.first.bias.sum() + (x @ m.second.weight).sum(-1, keepdim=True), {"first", "second"}),
    (lambda m, x: m.words(x) * m.norm.weight.mean(), {"norm"}),
    (lambda m, x: m.words(m.first.forward(x)), {"first"}),
])  # fmt: skip
def test_a_use_that_no_hook_sees_is_declared(head: Callable[[Language, Tensor], Tensor], elsewhere: set[str]) -> None:
    whole = measured(head)
    assert reasons(whole) == dict.fromkeys(elsewhere, "used_elsewhere")
    trainable = sum(parameter.numel() for parameter in Language(head).parameters())
    assert whole.covered_parameters + sum(layer.parameter_count for layer in whole.declared) == trainable


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
    assert reasons(measured(model.head, model)) == {"table": "used_elsewhere"}
