"""One map written in several ways has one curvature: the same A, the same G, the same trace.

The traces of a Linear on (N, T, d) and of the Conv1d of kernel 1 that computes the same differ by
exactly T in other libraries, which divide one by positions and the other by examples. Here A
divides by positions and G by loss terms, whatever the module.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from engine.factors.kronecker_factors import Factors
from tests.oracles import collect, ggn_block, kronecker, relative_error, row_vector

EXACT = 1e-12
POSITIONS = 5


class Positions(nn.Module):
    """A layer on (N, T, 3), with a loss term at every position, or one that hears of all of them."""

    def __init__(self, layer: nn.Module, axes: int, pooled: bool) -> None:
        super().__init__()
        self.layer, self.axes, self.pooled = layer, axes, pooled
        generator = torch.Generator().manual_seed(4)
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        if self.axes:
            x = x.transpose(1, 2).reshape(x.shape[0], -1, *[POSITIONS if axis == 0 else 1 for axis in range(self.axes)])
        x = self.layer(x)
        if self.axes:
            x = x.flatten(2).transpose(1, 2)
        return torch.tanh(x).mean(1) if self.pooled else x


def transposed(layer: nn.Module) -> nn.Module:
    """The layer that stores its weight (in, out), with the numbers of the one that stores it (out, in)."""
    weight: Any = layer.weight
    weight.data = weight.data.reshape(2, 3).T.reshape(weight.shape).clone()
    return layer


SAME: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "Linear": (lambda: nn.Linear(3, 2), 0),
    "Conv1D of GPT-2": (lambda: Conv1D(2, 3), 0),
    "Conv1d": (lambda: nn.Conv1d(3, 2, 1), 1),
    "Conv2d": (lambda: nn.Conv2d(3, 2, 1), 2),
    "Conv3d": (lambda: nn.Conv3d(3, 2, 1), 3),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 2, 1), 1),
}


def examples(pooled: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, POSITIONS, 3, dtype=torch.float64, generator=generator)
    shape = (6, 2) if pooled else (6, POSITIONS, 2)
    return x, torch.randn(shape, dtype=torch.float64, generator=generator)


def measured(name: str, pooled: bool, **options: Any) -> Factors:
    make, axes = SAME[name]
    model = Positions(make(), axes, pooled)
    if name in ("Conv1D of GPT-2", "ConvTranspose1d"):
        transposed(model.layer)
    return collect(model, [examples(pooled)], "regression", **options).load(0)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("name", [name for name in SAME if name != "Linear"])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}, {"fisher": "empirical"}])
def test_a_map_of_every_position_is_one_layer_however_it_is_written(
    name: str, pooled: bool, options: dict[str, Any]
) -> None:
    truth, found = measured("Linear", pooled, **options), measured(name, pooled, **options)
    assert relative_error(found.A, truth.A) < EXACT
    assert relative_error(found.G, truth.G) < EXACT
    assert float(found.A.trace() * found.G.trace()) == pytest.approx(float(truth.A.trace() * truth.G.trace()), 1e-12)


def test_the_trace_is_the_blocks_own() -> None:
    """Where K-FAC is exact, the common trace is that of the Gauss-Newton block: no factor T is lost or gained."""
    x, y = examples(pooled=False)
    model = Positions(nn.Linear(3, 2), 0, pooled=False)
    truth = ggn_block(model, x, y, "mse", ("layer.weight", "layer.bias"), row_vector("layer.weight", "layer.bias"))
    for name in SAME:
        factors = measured(name, pooled=False)
        assert float(factors.A.trace() * factors.G.trace()) == pytest.approx(float(truth.trace()), 1e-12)


class Everywhere(nn.Module):
    """A convolution with a loss term at every position, its input padded beforehand where a test says so."""

    def __init__(self, conv: nn.Module, pad: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.conv, self.pad = conv, pad

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x if self.pad is None else self.pad(x)).flatten(2).transpose(1, 2)


def same_numbers(made: nn.Module, like: nn.Module) -> nn.Module:
    made.load_state_dict(like.state_dict())
    return made


@pytest.mark.part(of=16, by=("sharing",))
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("dilation", [2, (1, 3)])
def test_dilation_is_a_kernel_with_zeros_between(dilation: Any, sharing: str) -> None:
    torch.manual_seed(0)
    dilated = nn.Conv2d(2, 3, 2, dilation=dilation).double()
    steps = dilation if isinstance(dilation, tuple) else (dilation, dilation)
    extent = tuple(step + 1 for step in steps)
    stuffed = nn.Conv2d(2, 3, extent).double()
    stuffed.weight.data.zero_()
    stuffed.weight.data[:, :, :: steps[0], :: steps[1]] = dilated.weight.data
    stuffed.bias.data = dilated.bias.data.clone()  # type: ignore[union-attr]
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    y = torch.randn(4, (6 - steps[0]) * (6 - steps[1]), 3, dtype=torch.float64)
    left, right = (
        collect(Everywhere(conv), [(x, y)], "regression", sharing=sharing).load(0) for conv in (dilated, stuffed)
    )
    numbers = torch.arange(2 * extent[0] * extent[1]).view(2, *extent)[:, :: steps[0], :: steps[1]].flatten().tolist()
    kept = [*numbers, 2 * extent[0] * extent[1]]
    assert relative_error(left.A, right.A[kept][:, kept]) < EXACT
    assert relative_error(left.G, right.G) < EXACT


@pytest.mark.part(of=32, by=("mode",))
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("stride", [1, 2])
def test_padding_of_every_mode_is_padding_beforehand(mode: str, sharing: str, stride: int) -> None:
    torch.manual_seed(0)
    padded = nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode=mode, stride=stride).double()
    plain = same_numbers(nn.Conv2d(2, 3, 3, stride=stride).double(), padded)
    x = torch.randn(4, 2, 5, 6, dtype=torch.float64)
    y = torch.randn_like(Everywhere(padded)(x)).detach()
    by_hand = Everywhere(plain, lambda x: functional.pad(x, (1, 1, 2, 2), mode="constant" if mode == "zeros" else mode))
    left, right = (
        collect(model, [(x, y)], "regression", sharing=sharing).load(0) for model in (Everywhere(padded), by_hand)
    )
    assert relative_error(left.A, right.A) < EXACT
    assert relative_error(left.G, right.G) < EXACT


def test_a_transposed_convolution_is_one_of_the_spread_out_input() -> None:
    torch.manual_seed(0)
    upward = nn.ConvTranspose1d(2, 3, 3, stride=2).double()
    plain = nn.Conv1d(2, 3, 3, padding=2).double()
    plain.weight.data = upward.weight.data.transpose(0, 1).flip(2).clone()
    plain.bias.data = upward.bias.data.clone()  # type: ignore[union-attr]

    def spread(x: Tensor) -> Tensor:
        return torch.stack([x, torch.zeros_like(x)], 3).flatten(2)[:, :, :-1]

    x = torch.randn(4, 2, 5, dtype=torch.float64)
    y = torch.randn(4, 11, 3, dtype=torch.float64)
    left, right = (
        collect(model, [(x, y)], "regression").load(0) for model in (Everywhere(upward), Everywhere(plain, spread))
    )
    reversed_taps = [channel * 3 + tap for channel in range(2) for tap in (2, 1, 0)] + [6]
    assert relative_error(left.A, right.A[reversed_taps][:, reversed_taps]) < EXACT
    assert relative_error(left.G, right.G) < EXACT


def test_a_lookup_is_a_linear_map_of_one_hot_rows() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(7, 3).double()

    class Looked(nn.Module):
        def __init__(self, hot: bool) -> None:
            super().__init__()
            self.hot = hot
            self.table: nn.Module = nn.Linear(7, 3, bias=False).double() if hot else table
            if hot:
                self.table.weight.data = table.weight.data.T.clone()  # type: ignore[union-attr]

        def forward(self, ids: Tensor) -> Tensor:
            x = functional.one_hot(ids, 7).double() if self.hot else ids
            return torch.tanh(self.table(x))

    ids, y = torch.randint(0, 7, (5, 6)), torch.randn(5, 6, 3, dtype=torch.float64)
    left, right = (kronecker(collect(Looked(hot), [(ids, y)], "regression"), "table") for hot in (False, True))
    assert relative_error(left, right) < EXACT
