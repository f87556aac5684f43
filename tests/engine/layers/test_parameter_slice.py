"""A label names the numbers of a parameter that a window shows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.layers.parameter_slice import label_of, place_of, slices_of
from tests.oracles import collect

View = Callable[[Tensor], Tensor]


def _dense(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def label(parameter: Tensor, view: View) -> str:
    place = place_of(view(parameter), parameter, "u")
    assert place is not None
    return label_of(place, parameter)


KEPT: list[tuple[Tensor, View, str]] = [
    (_dense(8, 6), lambda u: u, "u"),
    (_dense(8, 6), lambda u: u.T, "u"),
    (_dense(8, 6), lambda u: u[:4], "u[0:4]"),
    (_dense(8, 6), lambda u: u[4:].T, "u[4:8]"),
    (_dense(8, 6), lambda u: u[2:3], "u[2:3]"),
    (_dense(8, 6), lambda u: u[3], "u[3]"),
    (_dense(8, 6), lambda u: u[:4].view(8, 3), "u[0:4]"),
    (_dense(8, 6), lambda u: u[:, 3:], "u[3+8x3]"),
    (_dense(8, 6), lambda u: u[:, :4], "u[0+8x4]"),
    (_dense(8, 6), lambda u: u[:4, :4], "u[0+4x4]"),
    (_dense(8), lambda u: u[2:5], "u[2:5]"),
    (_dense(8), lambda u: u[2], "u[2]"),
    (_dense(3, 6, 8), lambda u: u[1], "u[1]"),
    (_dense(3, 6, 8), lambda u: u[2].T, "u[2]"),
    (_dense(3, 6, 8), lambda u: u[2].view(8, 6), "u[2]"),
    (_dense(3, 6, 8), lambda u: u[1:], "u[1:3]"),
    (_dense(1, 6, 8), lambda u: u[0], "u"),
    (_dense(6, 8).T, lambda u: u[:4], "u[0:4]"),
    (_dense(6, 8).T, lambda u: u[4:], "u[4+4x6]"),
    (_dense(3, 2, 6, 6), lambda u: u[2, 0], "u[144+6x6]"),
    (_dense(3, 6, 8).transpose(1, 2), lambda u: u[1], "u[1]"),
    (_dense(3, 6, 8).transpose(1, 2), lambda u: u[1:], "u[1:3]"),
    (_dense(8, 12)[:, :6], lambda u: u[:4], "u[0:4]"),
    (_dense(4, 4, 4).permute(2, 0, 1), lambda u: u[0], "u[0]"),
    (_dense(4, 4, 4).permute(2, 0, 1), lambda u: u[1], "u[1+4x4]"),
]
"""Windows whose label has always been right."""

CORRECTED: list[tuple[Tensor, View, str]] = [
    (_dense(8, 6), lambda u: u[:, :3], "u[:, 0:3]"),
    (_dense(8, 6), lambda u: u[:, :3].T, "u[:, 0:3]"),
    (_dense(8, 6), lambda u: u[:, ::2], "u[:, 0:6:2]"),
    (_dense(8, 6), lambda u: u[::2], "u[0:8:2]"),
    (_dense(8, 6), lambda u: u[1::2], "u[1:8:2]"),
    (_dense(8, 6), lambda u: u[::2].T, "u[0:8:2]"),
    (_dense(8, 6), lambda u: u[2::5], "u[2:8:5]"),
    (_dense(8, 6), lambda u: u[2::2, :2], "u[2:8:2, 0:2]"),
    (_dense(8, 6), lambda u: u[:4, :3], "u[0:4, 0:3]"),
    (_dense(6, 6), lambda u: u[:, :1], "u[:, 0:1]"),
    (_dense(6, 6), lambda u: u[:, 0], "u[:, 0]"),
    (_dense(8), lambda u: u[::2], "u[0:8:2]"),
    (_dense(4, 4, 4), lambda u: u[:, 0], "u[:, 0]"),
    (_dense(4, 4, 4), lambda u: u[:, :, 0].T, "u[:, :, 0]"),
    (_dense(4, 4, 4), lambda u: u[:, :2], "u[:, 0:2]"),
    (_dense(6, 8).T, lambda u: u[:, :3], "u[:, 0:3]"),
    (_dense(6, 8).T, lambda u: u[:, 3:], "u[:, 3:6]"),
    (_dense(8, 12)[:, :6], lambda u: u[4:], "u[4:8]"),
    (_dense(8, 6), lambda u: u.view(48)[::2].view(4, 6), "u[0+4x6 by 12x2]"),
]
"""Windows that were named as a run of rows, which they are not."""


@pytest.mark.parametrize(("parameter", "view", "name"), KEPT + CORRECTED)
def test_a_window_is_named_by_the_numbers_that_it_shows(parameter: Tensor, view: View, name: str) -> None:
    assert label(parameter, view) == name


@pytest.mark.parametrize(("parameter", "view", "name"), [case for case in KEPT + CORRECTED if "+" not in case[2]])
def test_a_name_that_is_a_subscript_selects_these_numbers(parameter: Tensor, view: View, name: str) -> None:
    selected = eval(name, {"u": parameter})
    assert sorted(selected.flatten().tolist()) == sorted(view(parameter).flatten().tolist())


def test_only_whole_slices_are_like_others() -> None:
    stack, cube = _dense(3, 6, 8), _dense(4, 4, 4)

    def count(view: Tensor, parameter: Tensor) -> int | None:
        place = place_of(view, parameter, "u")
        return None if place is None else slices_of(place, parameter)

    assert [count(stack[n], stack) for n in range(3)] == [3, 3, 3]
    assert count(stack[1].T, stack) == 3
    assert count(stack[1:2], stack) is None
    assert count(cube[:, 0], cube) is None
    assert count(cube[:, :, 0], cube) is None
    assert count(stack.transpose(1, 2)[1], stack.transpose(1, 2)) == 3
    # slices that lie between one another
    turned = _dense(4, 4, 4).permute(2, 0, 1)
    assert count(turned[0], turned) is None
    single = _dense(1, 6, 8)
    assert count(single[0], single) == 1


class Product(nn.Module):
    """A product by windows of ``u``, shape (8, 6), and a head."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.u, self.h, self.use = nn.Parameter(torch.randn(8, 6)), nn.Linear(width, 5), use
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.h(self.use(x, self.u).tanh())
        return hidden


USES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, dict[str, View]]] = {
    "columns": (
        lambda x, u: functional.linear(x[:, :3], u[:, :3]) * functional.linear(x[:, 3:], u[:, 3:]),
        8,
        {"u[:, 0:3]": lambda u: u[:, :3], "u[3+8x3]": lambda u: u[:, 3:]},
    ),
    "every other row": (
        lambda x, u: functional.linear(x, u[::2]) * functional.linear(x, u[1::2]),
        4,
        {"u[0:8:2]": lambda u: u[::2], "u[1:8:2]": lambda u: u[1::2]},
    ),
    "rows": (
        lambda x, u: functional.linear(x, u[:4]) * functional.linear(x, u[4:]),
        4,
        {"u[0:4]": lambda u: u[:4], "u[4:8]": lambda u: u[4:]},
    ),
}


@pytest.mark.parametrize("case", USES)
def test_a_layer_has_the_trace_of_the_part_that_its_name_says(case: str) -> None:
    use, width, parts = USES[case]
    model = Product(use, width)
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(5, (12,))
    whole = collect(model, [(x, y)], "classification", fisher="empirical", batch_size=4, min_coverage=1.0)
    losses = [functional.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) for n in range(len(x))]
    plain = [torch.autograd.grad(loss, model.u)[0] for loss in losses]
    layers = {layer.name: layer for layer in whole.layers}
    assert layers.keys() == {*parts, "h"}
    for name, view in parts.items():
        squares = sum(float(view(gradient).square().sum()) for gradient in plain)
        assert layers[name].parameters == (name,)
        assert layers[name].exact_trace == pytest.approx(squares / len(x), rel=1e-10)


def test_a_column_of_a_cube_is_no_expert() -> None:
    """A window across the slices of a stack has no others like it."""

    class Column(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.u, self.h = nn.Parameter(torch.randn(6, 6, 6)), nn.Linear(6, 5)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.h(functional.linear(x, self.u[:, 0]).tanh())
            return hidden

    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(5, (12,))
    whole = collect(Column(), [(x, y)], "classification", fisher="empirical", batch_size=4)
    assert {layer.name for layer in whole.layers} == {"u[:, 0]", "h"}
    assert [(row.parameters, row.parameter_count) for row in whole.declared] == [(("u",), 180)]
