"""Layers that a model calls inside a transform of ``torch.func`` are declared, and all others are measured."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

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


def forward_mode(stem: nn.Linear, x: Tensor) -> Tensor:
    return jvp(lambda rows: stem(rows).tanh(), (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("run", [mapped, differentiated, forward_mode])
def test_a_transform_around_layers_is_named(run: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    data = [(torch.randn(8, 5), torch.randint(0, 3, (8,)))]
    whole = collect(Transformed(run), data, "classification")
    assert {layer.name for layer in whole.layers} == {"head"}
    assert {layer.name: layer.reason for layer in whole.declared} == {"stem": "transformed"}


def test_a_transform_without_layers_is_none_of_it() -> None:
    def norms(stem: nn.Linear, x: Tensor) -> Tensor:
        return vmap(lambda example: example / example.norm())(stem(x))

    data = [(torch.randn(8, 5), torch.randint(0, 3, (8,)))]
    assert {layer.name for layer in collect(Transformed(norms), data, "classification").layers} == {"stem", "head"}
