"""Weights that are linear in their parameters have factors: those of plain hooks on each example alone, written out."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.factors.factor_set import FactorSet
from tests.oracles import collect, relative_error, require_traces

EXACT = 1e-12
Multiply = Callable[[str, Tensor, Tensor], Tensor]
"""The product of a named weight with what enters it, watched."""
ORDER = torch.tensor([3, 1, 0, 2])
ROWS = torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)


class Used(nn.Module):
    """Parameters p, q, r between two linear layers, used as a function of the model and the data."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.use = use
        for name, shape in zip("pqr", shapes, strict=False):
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.use(self, torch.tanh(self.first(x)))).mean(1))


def data(examples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    entered = torch.randn(examples, 5, 4, dtype=torch.float64, generator=generator)
    return entered, torch.randint(0, 3, (examples,), generator=generator)


def require_factors(model: Used, twin: Callable[[Any, Tensor, Multiply], Tensor], whole: FactorSet) -> None:
    """A and G of every parameter that ``twin``, the same written out, multiplies by; each example alone."""
    x, y = data()
    rows: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    squares: Counter[str] = Counter()
    for one, target in zip(x, y, strict=True):
        calls: list[tuple[str, Tensor, Tensor]] = []

        def multiply(name: str, entered: Tensor, weight: Tensor, calls: list[Any] = calls) -> Tensor:
            left = functional.linear(entered, weight)
            calls.append((name, entered, left))
            return left

        used = twin(model, torch.tanh(model.first(one[None])), multiply)
        outputs = model.head(torch.tanh(used).mean(1))
        assert relative_error(outputs.detach(), model(one[None]).detach()) < EXACT
        loss = functional.cross_entropy(outputs[0], target)
        gradients = torch.autograd.grad(loss, [left for _, _, left in calls])
        whole_gradients: dict[str, Tensor | float] = {}
        for (name, entered, _), gradient in zip(calls, gradients, strict=True):
            product = gradient.flatten(0, -2).T @ entered.detach().flatten(0, -2)
            whole_gradients[name] = whole_gradients.get(name, 0.0) + product
            own = rows.setdefault(name, ([], []))
            own[0].append(entered.detach().flatten(0, -2))
            own[1].append(gradient.flatten(0, -2))
        squares.update({name: float(torch.as_tensor(each).square().sum()) for name, each in whole_gradients.items()})
    assert rows.keys() == {layer.name for layer in whole.layers} - {"first", "head"}
    for layer in whole.layers:
        if layer.name not in rows:
            continue
        a, g = (torch.cat(side) for side in rows[layer.name])
        factors = whole.load(layer.ordinal)
        assert (layer.form, layer.positions) == ("kronecker", a.shape[0])
        assert relative_error(factors.A, a.T @ a / a.shape[0]) < EXACT
        assert relative_error(factors.G, g.T @ g / len(y)) < EXACT
        assert layer.exact_trace == pytest.approx(squares[layer.name] / len(y), rel=EXACT)
        assert layer.gradient_identity is not None
        assert layer.gradient_identity < EXACT
    if all(layer.name in "pqr" for layer in whole.layers if layer.name in rows):
        # and by the model itself
        losses = (functional.cross_entropy(model(one[None])[0], target) for one, target in zip(x, y, strict=True))
        require_traces(model, whole, losses, len(y))


def straight_through(model: Used, x: Tensor) -> Tensor:
    rounded = torch.round(model.p * 4) / 4
    return functional.linear(x, model.p + (rounded - model.p).detach())


def rounded_twin(model: Used, x: Tensor, multiply: Multiply) -> Tensor:
    rest = (torch.round(model.p * 4) / 4 - model.p).detach()
    return multiply("p", x, model.p) + functional.linear(x, rest)


def low_rank_twin(model: Used, x: Tensor, multiply: Multiply) -> Tensor:
    return multiply("p", x, model.p) + 0.5 * multiply("r", multiply("q", x, model.q), model.r)


def experts_twin(model: Used, x: Tensor, multiply: Multiply) -> Tensor:
    first, second = (multiply(f"p[{place}]", x, model.p[place]) for place in (0, 1))
    return 2 * first - torch.sin(2 * second)


def experts(model: Used, x: Tensor) -> Tensor:
    first, second = 2 * model.p
    return functional.linear(x, first) - torch.sin(functional.linear(x, second))


def scaled_rows_twin(model: Used, x: Tensor, multiply: Multiply) -> Tensor:
    return multiply("p", x, model.p) * ROWS


CASES: dict[str, tuple[Any, Any, tuple[tuple[int, ...], ...]]] = {
    "scaled": (
        lambda m, x: functional.linear(x, m.p * 0.3),
        lambda m, x, multiply: 0.3 * multiply("p", x, m.p),
        ((4, 4),),
    ),
    "divided and transposed": (
        lambda m, x: x @ (-m.p / 7).T,
        lambda m, x, multiply: multiply("p", x, m.p) / -7,
        ((4, 4),),
    ),
    "halves of a scaled one": (
        lambda m, x: torch.cat([x @ half.T for half in (m.p * 2).chunk(2)], -1),
        lambda m, x, multiply: 2 * torch.cat([multiply(f"p[{s}:{s + 2}]", x, m.p[s : s + 2]) for s in (0, 2)], -1),
        ((4, 4),),
    ),
    "joined rows": (
        lambda m, x: functional.linear(x, torch.cat([m.p, 3 * m.q])),
        lambda m, x, multiply: torch.cat([multiply("p", x, m.p), 3 * multiply("q", x, m.q)], -1),
        ((1, 4), (3, 4)),
    ),
    "joined columns": (
        lambda m, x: x @ torch.cat([m.p, m.q], 1).T,
        lambda m, x, multiply: multiply("p", x[..., :1], m.p) + multiply("q", x[..., 1:], m.q),
        ((4, 1), (4, 3)),
    ),
    "low rank": (lambda m, x: functional.linear(x, m.p + 0.5 * (m.r @ m.q)), low_rank_twin, ((4, 4), (2, 4), (4, 2))),
    "low rank, transposed": (lambda m, x: x @ (m.p + 0.5 * (m.r @ m.q)).T, low_rank_twin, ((4, 4), (2, 4), (4, 2))),
    "low rank alone": (
        lambda m, x: x @ (torch.eye(4).double() + m.p @ m.q),
        lambda m, x, multiply: x + multiply("q", multiply("p", x, m.p.T), m.q.T),
        ((4, 2), (2, 4)),
    ),
    "permuted": (
        lambda m, x: functional.linear(x, m.p[ORDER].flip(1)),
        lambda m, x, multiply: multiply("p", x.flip(-1), m.p)[..., ORDER],
        ((4, 4),),
    ),
    "one row for all": (
        lambda m, x: functional.linear(x, (2 * m.p).expand(4, 4)),
        lambda m, x, multiply: 2 * multiply("p", x, m.p).expand_as(x),
        ((1, 4),),
    ),
    "scaled by row": (lambda m, x: functional.linear(x, m.p * ROWS[:, None]), scaled_rows_twin, ((4, 4),)),
    "scaled by column": (
        lambda m, x: functional.linear(x, m.p * ROWS),
        lambda m, x, multiply: multiply("p", x * ROWS, m.p),
        ((4, 4),),
    ),
    "without infinities": (
        lambda m, x: functional.linear(x, torch.nan_to_num(m.p).clone()),
        lambda m, x, multiply: multiply("p", x, m.p),
        ((4, 4),),
    ),
    "chosen, but all of it": (
        lambda m, x: functional.linear(x, torch.where(m.p.abs() < 99, m.p, torch.zeros_like(m.p))),
        lambda m, x, multiply: multiply("p", x, m.p),
        ((4, 4),),
    ),
    "straight through": (straight_through, rounded_twin, ((4, 4),)),
    "scaled experts": (experts, experts_twin, ((2, 4, 4),)),
    "twice": (
        lambda m, x: x @ m.p.T + functional.linear(torch.sin(x), 2 * m.p),
        lambda m, x, multiply: multiply("p", x, m.p) + 2 * multiply("p", torch.sin(x), m.p),
        ((4, 4),),
    ),
}


@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch_size", [2, 4])
def test_the_factors_are_those_of_the_products_written_out(case: str, batch_size: int) -> None:
    use, twin, shapes = CASES[case]
    model = Used(use, *shapes)
    whole = collect(model, [data()], "classification", fisher="empirical", batch_size=batch_size, min_coverage=1.0)
    require_factors(model, twin, whole)


@pytest.mark.parametrize(("batch_size", "form"), [(1, "diagonal_block"), (2, "kronecker")])
def test_the_form_of_a_computed_weight_depends_on_the_batch_and_its_trace_does_not(batch_size: int, form: str) -> None:
    """As the convention says."""
    use, _, shapes = CASES["straight through"]
    model = Used(use, *shapes)
    whole = collect(model, [data()], "classification", fisher="empirical", batch_size=batch_size, min_coverage=1.0)
    assert {layer.name: layer.form for layer in whole.layers}["p"] == form
    losses = (functional.cross_entropy(model(x[None])[0], y) for x, y in zip(*data(), strict=True))
    require_traces(model, whole, losses, 6)


def test_a_scaled_bias_beside_a_scaled_weight_is_a_row_of_its_own() -> None:
    model = Used(lambda m, x: functional.linear(x, 0.5 * m.p, torch.cat([2 * m.q, m.r])), (4, 4), (1,), (3,))
    x, y = data()
    whole = collect(model, [(x, y)], "classification", fisher="empirical", min_coverage=1.0)
    rows = {layer.name: layer for layer in whole.layers}
    assert {name: rows[name].form for name in "pqr"} == dict.fromkeys("pqr", "kronecker")
    for name, scale, span in (("q", 2, slice(0, 1)), ("r", 1, slice(1, 4))):
        gradients = []
        for one, target in zip(x, y, strict=True):
            left = functional.linear(
                torch.tanh(model.first(one[None])), 0.5 * model.p, torch.cat([2 * model.q, model.r])
            )
            loss = functional.cross_entropy(model.head(torch.tanh(left).mean(1))[0], target)
            gradients.append(scale * torch.autograd.grad(loss, left)[0][0, :, span])
        g = torch.cat(gradients)
        factors = whole.load(rows[name].ordinal)
        assert torch.equal(factors.A, torch.ones(1, 1, dtype=torch.float64))
        assert relative_error(factors.G, g.T @ g / len(y)) < EXACT
    losses = (functional.cross_entropy(model(one[None])[0], target) for one, target in zip(x, y, strict=True))
    require_traces(model, whole, losses, len(y))


BARE: dict[str, Any] = {
    "a function of each number": lambda m, x: functional.linear(x, torch.tanh(m.p)),
    "a norm": lambda m, x: functional.linear(x, m.p / m.p.norm()),
    "some of its numbers": lambda m, x: functional.linear(x, torch.where(m.p > 0, m.p, torch.zeros_like(m.p))),
    "its square": lambda m, x: functional.linear(x, m.p @ m.p),
    "written to since": lambda m, x: functional.linear(x, (m.p * 2).mul_(3)),
    "a part of it written to since": lambda m, x: _overwritten(m.p * 2, x),
    "beside another use": lambda m, x: functional.linear(x, 2 * m.p) + functional.linear(x, torch.tanh(m.p)),
}


def _overwritten(scaled: Tensor, x: Tensor) -> Tensor:
    both = scaled + 0.0
    scaled.mul_(2)
    return functional.linear(x, both) + functional.linear(x, torch.exp(scaled))


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("case", BARE)
def test_what_is_not_linear_keeps_its_exact_diagonal_or_exact_products(case: str) -> None:
    model = Used(BARE[case], (4, 4))
    x, y = data()
    whole = collect(model, [(x, y)], "classification", fisher="empirical", min_coverage=1.0)
    (layer,) = (each for each in whole.layers if each.name == "p")
    assert layer.form == ("kronecker" if case == "its square" else "diagonal_block")
    losses = (functional.cross_entropy(model(one[None])[0], target) for one, target in zip(x, y, strict=True))
    require_traces(model, whole, losses, len(y))


def test_without_gradients_the_inputs_alone_are_known() -> None:
    model = Used(lambda m, x: functional.linear(x, m.p + 0.5 * (m.r @ m.q)), (4, 4), (2, 4), (4, 2))
    x, y = data()
    whole = collect(model, [(x, y)], "classification", fisher="forward_only", min_coverage=1.0)
    entered = torch.tanh(model.first(x)).detach().flatten(0, 1)
    truth = {"p": entered, "q": entered, "r": entered @ model.q.detach().T}
    for layer in whole.layers:
        if layer.name in truth:
            a = truth[layer.name]
            assert relative_error(whole.load(layer.ordinal).A, a.T @ a / len(a)) < EXACT
    assert truth.keys() <= {layer.name for layer in whole.layers}


def test_a_gradient_that_the_model_stops_is_none() -> None:
    def stopped(model: Used, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = model.p * 2
        return functional.linear(x, frozen + model.q)

    model = Used(stopped, (4, 4), (4, 4))
    x, y = data()
    whole = collect(model, [(x, y)], "classification", fisher="empirical")
    assert [layer.name for layer in whole.layers if layer.name in "pq"] == ["q"]
    total = 0.0
    for one, target in zip(x, y, strict=True):
        loss = functional.cross_entropy(model(one[None])[0], target)
        total += float(torch.autograd.grad(loss, model.q)[0].square().sum())
    (layer,) = (each for each in whole.layers if each.name == "q")
    assert layer.exact_trace == pytest.approx(total / len(y), rel=EXACT)
