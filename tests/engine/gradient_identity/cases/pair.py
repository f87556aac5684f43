"""A pair of models: one whose examples depend on each other in some way, and a twin that does the same to each example.

Every model has a linear layer ``a``, a mechanism, and a linear layer ``h``; a pair may add modules. What a pair is
called says which mechanism it is. Whether a model mixes at some batch size is not written here: the oracle finds out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 5

Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Two linear layers and what stands between them."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def inputs(examples: int = 24) -> Tensor:
    return torch.randn(examples, 6, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)


def with_a_rare_example() -> Tensor:
    """One example of the fourth batch of 8, the seventh of 4."""
    x = inputs(32)
    x[26, 0] = 25.0
    return x


def tokens() -> Tensor:
    """Texts of three tokens."""
    return torch.randn(24, 3, 6, generator=torch.Generator().manual_seed(2)).clamp(-3, 3)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two models that differ in whether an example's numbers depend on the other examples."""

    kind: str
    name: str
    mixing: Forward
    apart: Forward
    more: Callable[[], Mapping[str, Any]] = field(default=dict)
    """Modules, parameters and state beside the two layers, made anew for every model."""
    inputs: Callable[[], Tensor] = field(default=inputs)


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of a pair, made anew at every call."""

    pair: Pair
    is_twin: bool

    def __call__(self) -> Net:
        torch.manual_seed(0)
        net = Net(self.pair.apart if self.is_twin else self.pair.mixing)
        for name, value in self.pair.more().items():
            setattr(net, name, value)
        return net

    @property
    def name(self) -> str:
        return f"{self.pair.kind}: {self.pair.name}{', each example by itself' if self.is_twin else ''}"

    def data(self) -> tuple[Tensor, Tensor]:
        x = self.pair.inputs()
        return x, torch.randint(CLASSES, (len(x),), generator=torch.Generator().manual_seed(3))
