"""Second moments of windows that are never written out, against those of the windows themselves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engine.factors.kronecker_factors import mirrored_
from engine.layers import patch_moments as module
from engine.layers.convolution import ConvolutionLayer, TransposedConvolutionLayer
from engine.layers.patch_moments import Geometry, Patches
from engine.linalg.gram import add_grams_
from tests.memory_profile import peak_bytes

KINDS = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
    (3, True): nn.ConvTranspose3d,
}


def layer_of(conv: nn.modules.conv._ConvNd) -> ConvolutionLayer:
    kind = TransposedConvolutionLayer if conv.transposed else ConvolutionLayer
    return kind("conv", conv, True, conv.bias is not None)


def moments(layer: ConvolutionLayer, x: Tensor, way: str) -> Tensor:
    seen = layer.patches(x, x.dtype)
    total = x.new_zeros(*((layer.groups,) if layer.groups > 1 else ()), layer.fan_in, layer.fan_in)
    {"shifts": seen._add_by_shifts_, "slices": seen._add_by_slices_}[way](total)
    return layer.in_parameter_order_(mirrored_(total))


def check(conv: nn.modules.conv._ConvNd, x: Tensor) -> None:
    layer = layer_of(conv)
    rows = layer.activation_rows(x)
    shape = layer.geometry(x.shape)
    assert shape.positions == rows.shape[0] == conv(x.float()).movedim(1, -1).flatten(0, -2).shape[0]
    truth = mirrored_(add_grams_(x.new_zeros(layer.groups, layer.fan_in, layer.fan_in), rows))
    for way in ("slices", "shifts") if set(shape.stride) == {1} else ("slices",):
        found = moments(layer, x, way)
        assert found.shape == (truth.shape if layer.groups > 1 else truth.shape[1:])
        assert torch.allclose(found, truth, rtol=0, atol=1e-12 * float(truth.abs().max() + 1)), way
    seen = layer.patches(x, x.dtype)
    kernel = math.prod(conv.kernel_size)

    def ordered(found: Tensor) -> Tensor:
        places = found.view(*found.shape[:-1], layer.groups, kernel, -1)
        return (places.flip(-2) if conv.transposed else places).transpose(-1, -2).flatten(-3)

    assert torch.allclose(ordered(seen.sums().view(-1)), rows.sum(0), atol=1e-11)
    assert torch.allclose(ordered(seen.means()), rows.view(x.shape[0], -1, rows.shape[1]).mean(1), atol=1e-12)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.modules.conv._ConvNd, tuple[int, ...]]:
    axes, transposed = draw(st.integers(1, 3)), draw(st.booleans())
    groups, each = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    several = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(axes))  # noqa: E731 - four lists alike
    kernel, dilation, stride, padding = several(1, 4), several(1, 2), several(1, 2), several(0, 3)
    options: dict[str, object] = {"dilation": dilation, "stride": stride, "groups": groups, "padding": padding}
    if transposed:
        options["output_padding"] = tuple(step - 1 for step in stride)
    else:
        options["padding_mode"] = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
        if draw(st.booleans()):
            options |= {"padding": "same", "stride": 1}
    conv = KINDS[axes, transposed](groups * each, groups * each, kernel, **options)
    # the largest reach of any padding that reflects or wraps
    least = [max(1, dilation[a] * (kernel[a] - 1)) + 2 * padding[a] * transposed for a in range(axes)]
    extents = tuple(draw(st.integers(low + 3, low + 5)) for low in least)
    return conv, (draw(st.integers(1, 2)), groups * each, *extents)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=60, deadline=None)
@given(convolutions())
def test_every_convolution_both_ways(drawn: tuple[nn.modules.conv._ConvNd, tuple[int, ...]]) -> None:
    conv, shape = drawn
    check(conv, torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("extent", [(1, 1), (1, 2), (2, 5), (3, 3)])
def test_a_kernel_larger_than_the_image(extent: tuple[int, ...]) -> None:
    check(nn.Conv2d(3, 2, 5, padding=3), torch.randn(2, 3, *extent, dtype=torch.float64))
    check(nn.Conv2d(3, 2, (7, 3), padding=(6, 2), dilation=(2, 1)), torch.randn(2, 3, *extent, dtype=torch.float64))


def test_a_transposed_convolution_that_cuts_its_output() -> None:
    for stride in (1, 2):
        conv = nn.ConvTranspose2d(2, 3, 3, stride=stride, padding=4)
        check(conv, torch.randn(2, 2, 9, 8, dtype=torch.float64))


def test_channels_that_lie_last_and_other_strides() -> None:
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    check(nn.Conv2d(4, 2, 3, padding=1), x.to(memory_format=torch.channels_last))
    check(nn.Conv2d(4, 2, 3, padding=1), x.mT)
    check(nn.Conv2d(4, 2, 1, stride=2), x[:, :, ::2])


def test_windows_come_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 500)
    layer = layer_of(nn.Conv2d(3, 2, 3, stride=2))
    x = torch.randn(5, 3, 9, 9, dtype=torch.float64)
    assert 1 < -(-5 // layer.geometry(x.shape).examples_at_once()) < 6
    check(layer.module, x)


def geometry(**changes: object) -> Geometry:
    usual = {
        "examples": 16,
        "channels": 32,
        "groups": 1,
        "extents": (18, 18),
        "kernel": (3, 3),
        "stride": (1, 1),
        "dilation": (1, 1),
        "margins": ((1, 1), (1, 1)),
    }
    return Geometry(**(usual | changes))  # type: ignore[arg-type]


def test_the_quicker_way_is_taken() -> None:
    cpu = torch.device("cpu")
    assert geometry().by_shifts(cpu)
    assert geometry(kernel=(1, 1), margins=((0, 0), (0, 0))).by_shifts(cpu)
    assert not geometry(stride=(2, 2)).by_shifts(cpu)
    # few channels, and a kernel of many places: more single steps than arithmetic
    assert not geometry(channels=3, kernel=(7, 7), examples=1).by_shifts(cpu)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stride": (2, 2), "examples": 40},
        {"groups": 4},
        {"groups": 32},
        {"margins": ((0, 0), (0, 0))},
        {"channels": 200, "extents": (6, 6)},
        {"stride": (2, 2), "groups": 32},
    ],
)
def test_scratch_holds_what_is_held(changes: dict[str, object]) -> None:
    shape = geometry(**changes)
    cpu = torch.device("cpu")
    total = torch.zeros(shape.groups, shape.width, shape.width)
    total = total[0] if shape.groups == 1 else total

    def work() -> None:
        image = torch.zeros(shape.examples, *shape.extents, shape.channels)
        Patches(image=image, shape=shape).add_gram_(total)

    work()
    assert 0.75 <= peak_bytes(work) / (4 * shape.scratch(cpu)) <= 1.02
