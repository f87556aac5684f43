"""A model that calls its layers inside a transform of ``torch.func`` is refused for what it does, not for its data."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from engine.errors import ModelRefused
from tests.oracles import collect


class Transformed(nn.Module):
    def __init__(self, run: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.head, self.run = nn.Linear(5, 5), nn.Linear(5, 3), run

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.stem, x))


def mapped(stem: nn.Linear, x: Tensor) -> Tensor:
    return vmap(lambda example: stem(example).tanh())(x)


def differentiated(stem: nn.Linear, x: Tensor) -> Tensor:
    return vmap(grad(lambda example: stem(example).tanh().sum()))(x)


@pytest.mark.parametrize("run", [mapped, differentiated])
def test_a_transform_around_layers_is_named(run: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    data = [(torch.randn(8, 5), torch.randint(0, 3, (8,)))]
    with pytest.raises(ModelRefused, match=r"inside a transform of `torch\.func`") as refused:
        collect(Transformed(run), data, "classification")
    assert refused.value.pointer == "/model"


def test_a_transform_without_layers_is_none_of_it() -> None:
    def norms(stem: nn.Linear, x: Tensor) -> Tensor:
        return vmap(lambda example: example / example.norm())(stem(x))

    data = [(torch.randn(8, 5), torch.randint(0, 3, (8,)))]
    assert {layer.name for layer in collect(Transformed(norms), data, "classification").layers} == {"stem", "head"}
