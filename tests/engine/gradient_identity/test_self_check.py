"""The self-check: faults behind recognition are named by the identity that they break, and no right bit changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from engine.accumulation import hooked_model, hooks
from engine.accumulation.output_gradients import arrival
from engine.collect import collect_or_read
from engine.errors import NothingToAnalyse
from engine.factors.factor_set import FactorSet
from engine.factors.kronecker_factors import digest
from engine.layers.linear import LinearLayer
from engine.planning import probe_model
from tests.oracles import collect, workspace

EXACT = 1e-9


class Net(nn.Module):
    """Two linear layers over positions, and a head."""

    def __init__(self, use: Callable[["Net", Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.use = use
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.second(h))
        return self.head(h if self.use is None else self.use(self, h)).mean(1)


def data(examples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, 6, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (examples,), generator=generator)


def measured(model: nn.Module, **options: Any) -> tuple[FactorSet | None, list[str]]:
    """The collection, None where nothing was left of it, and what was said."""
    lines: list[str] = []
    made = workspace(model, [data(options.pop("examples", 8))], "classification", fisher="empirical", **options)
    made.ports.log = lambda _, message: lines.append(message)
    try:
        return collect_or_read(made), lines
    except NothingToAnalyse:
        return None, lines


def exact_trace(model: Net, layer: nn.Linear, examples: int = 8) -> float:
    """Mean squared norm of each example's gradient, by plain autograd."""
    x, y = data(examples)
    total = 0.0
    for one in range(examples):
        loss = functional.cross_entropy(model(x[one : one + 1]), y[one : one + 1])
        total += sum(float(each.square().sum()) for each in torch.autograd.grad(loss, list(layer.parameters())))
    return total / examples


def scaled(self: LinearLayer, gradient: Tensor) -> Tensor:
    return 1.01 * gradient.reshape(-1, gradient.shape[-1])


def swapped(*given: Any, **more: Any) -> Callable[[Tensor], None]:
    """Each example gets the gradient of the one before it."""
    enter = arrival(*given, **more)
    return lambda gradient: enter(gradient.roll(1, 0))


def shortened(self: LinearLayer, gradient: Tensor) -> Tensor:
    rows = gradient.reshape(-1, gradient.shape[-1]).clone()
    rows[0] = 0
    return rows


FAULTS = [
    (LinearLayer, "gradient_rows", scaled),
    (hooks, "arrival", swapped),
    (LinearLayer, "gradient_rows", shortened),
]


@pytest.mark.parametrize(("place", "name", "fault"), FAULTS)
def test_wrong_rows_are_named_with_the_identity_that_they_break(
    place: object, name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, fault)
    whole, lines = measured(Net())
    assert whole is None
    for layer in ("first", "second", "head"):
        assert any(f"layer `{layer}`" in line and "of the gradient identity" in line for line in lines)
    model = Net()
    unchecked, _ = measured(model, self_check="off")
    assert unchecked is not None
    truth = [exact_trace(model, own) for own in (model.first, model.second, model.head)]
    errors = [abs((layer.exact_trace or 0) / own - 1) for layer, own in zip(unchecked.layers, truth, strict=True)]
    assert max(errors) > 1e-3


def test_what_the_identity_shows_right_is_right() -> None:
    model = Net()
    whole, _ = measured(model)
    assert whole is not None
    for layer, own in zip(whole.layers, (model.first, model.second, model.head), strict=True):
        assert layer.exact_trace == pytest.approx(exact_trace(model, own), rel=1e-12)
        assert layer.gradient_identity is not None
        assert layer.gradient_identity < 1e-13
        # four of the first batch of four, and one of the second
        assert (layer.examples_checked, layer.checked_against) == (5, "alone")


@contextmanager
def nobody_stands_in(*_: object) -> Iterator[list[object]]:
    yield []


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing sees a parameter that is used outside of its module's calls."""
    monkeypatch.setattr(probe_model, "find_shared_parameters", lambda *_: frozenset())
    monkeypatch.setattr(hooked_model, "install_stand_ins", nobody_stands_in)


def test_a_parameter_read_elsewhere_is_found_by_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    blind(monkeypatch)

    def use(model: Net, h: Tensor) -> Tensor:
        return h + torch.tanh(h @ model.second.weight.T)

    model = Net(use)
    whole, lines = measured(model)
    assert any("layer `second`" in line and "completeness" in line for line in lines)
    assert whole is not None
    kronecker = {layer.name for layer in whole.layers if layer.form == "kronecker"}
    assert "second" not in kronecker
    unchecked, _ = measured(model, self_check="off")
    assert unchecked is not None
    (second,) = (layer for layer in unchecked.layers if layer.name == "second")
    assert abs((second.exact_trace or 0) / exact_trace(model, model.second) - 1) > 1e-2


def test_a_use_of_later_batches_alone_is_found_where_they_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    blind(monkeypatch)
    # each of the fifth batch's examples is one, so that none depends on the others
    marked = data(24)[0][16:20, 0, 0]

    def use(model: Net, h: Tensor) -> Tensor:
        return h + h @ model.second.weight.T if model.seen else h

    model = Net(use)
    model.seen = False  # type: ignore[assignment]
    model.register_forward_pre_hook(
        lambda own, args: setattr(own, "seen", bool(torch.isin(args[0][:, 0, 0], marked).all()))
    )
    growing, lines = measured(model, examples=24)
    assert growing is not None
    assert [row.name for row in growing.declared if row.reason == "gradient_identity"] == ["second"]
    assert any("layer `second`: in batch 5" in line for line in lines)
    first, _ = measured(model, examples=24, self_check="first")
    assert first is not None
    assert first.declared == ()


def test_examples_that_mix_leave_only_what_lies_apart() -> None:
    def use(_: Net, h: Tensor) -> Tensor:
        return h - h.mean(0, keepdim=True)

    whole, lines = measured(Net(use))
    assert whole is None
    assert any("depends on the others" in line for line in lines)
    # without gradients, what comes before the mixing is right
    ahead = collect(Net(use), [data()], "classification", fisher="forward_only")
    assert [layer.name for layer in ahead.layers] == ["first", "second"]
    assert [row.reason for row in ahead.declared] == ["examples_mix"]
    assert {layer.checked_against for layer in ahead.layers} == {"inputs"}


def test_a_model_that_draws_is_held_to_one_forward_pass() -> None:
    def use(_: Net, h: Tensor) -> Tensor:
        return functional.dropout(h, 0.5, training=True)

    whole, lines = measured(Net(use))
    assert whole is not None
    assert {(layer.checked_against, layer.examples_checked) for layer in whole.layers} == {("same_forward", 0)}
    assert all((layer.gradient_identity or 0) < EXACT for layer in whole.layers)
    assert whole.nondeterministic is not None
    assert any("random" in name for name in whole.nondeterministic)
    assert any("draws random numbers" in line for line in lines)


def test_batches_of_one_example_say_so() -> None:
    whole, _ = measured(Net(), batch_size=1)
    assert whole is not None
    assert {layer.checked_against for layer in whole.layers} == {"single"}


def small_gpt2() -> tuple[nn.Module, Any, None, str]:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=31, n_positions=16, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 31, (9, 8))}, None, "causal_lm"


def small_convolutions() -> tuple[nn.Module, Any, Tensor, str]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=3), nn.GroupNorm(2, 6),
        nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2), nn.Flatten(), nn.Linear(4 * 8 * 8, 3),
    )  # fmt: skip
    return model, torch.randn(9, 2, 8, 8), torch.randint(0, 3, (9,)), "classification"


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("problem", [small_gpt2, small_convolutions])
@pytest.mark.parametrize(
    "options", [{"sharing": "reduce", "fisher": "mc"}, {"fisher": "empirical"}, {"fisher": "type2"}]
)
def test_the_check_changes_no_bit(problem: Callable[[], tuple[Any, ...]], options: dict[str, Any]) -> None:
    found = []
    for mode in ("off", "growing"):
        model, inputs, targets, task = problem()
        torch.manual_seed(7)
        whole = collect(model, [(inputs, targets)], task, dtype="float32", self_check=mode, **options)
        assert whole.declared == ()
        factors = [whole.load(layer.ordinal) for layer in whole.layers]
        found.append([(digest(each.A), digest(each.G), float(torch.rand(()))) for each in factors])
        if mode == "growing":
            assert max(layer.gradient_identity or 0 for layer in whole.layers) < 1e-4
    assert found[0] == found[1]


def test_gradients_and_flags_of_the_caller_stay() -> None:
    model, (x, y) = Net(), data()
    functional.cross_entropy(model(x), y).backward()
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    collect(model, [(x, y)], "classification")
    assert all(parameter.requires_grad for parameter in model.parameters())
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, kept)


def test_a_gradient_that_nothing_follows_is_no_missing_one() -> None:
    class Hidden(torch.autograd.Function):
        """A product that no operation shows."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return gradient @ weight.T, x.flatten(0, 1).T @ gradient.flatten(0, 1)

    def use(model: Net, h: Tensor) -> Tensor:
        return Hidden.apply(h, model.second.weight)  # type: ignore[no-any-return, no-untyped-call]

    class Around(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(use(self, torch.tanh(self.first(x)))).mean(1)

    whole, _ = measured(Around())
    assert whole is not None
    covered = {name for layer in whole.layers for name in layer.parameters}
    reasons = {name: row.reason for row in whole.declared for name in row.parameters}
    assert "second.weight" in covered or reasons["second.weight"] != "no_gradient"
    assert reasons["second.bias"] == "no_gradient"


class Experts(nn.Module):
    """Each position goes to one of three matrices of one parameter, whichever its first number chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.matrices = nn.Parameter(torch.randn(3, 5, 5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[..., 0].sigmoid() * 3).long().flatten()
        h = torch.tanh(self.first(x)).flatten(0, 1)
        total = torch.zeros_like(h)
        for place in range(3):
            (own,) = torch.where(chosen == place)
            total = total.index_add(0, own, h[own] @ self.matrices[place])
        return self.head(torch.tanh(total).view(*x.shape[:2], 5)).mean(1)


def test_an_expert_that_an_example_does_not_choose_is_no_fault() -> None:
    whole, lines = measured(Experts(), examples=12)
    assert whole is not None
    assert whole.declared == ()
    assert len(whole.layers) == 5
    assert not any("gradient identity" in line for line in lines)
    (x, y), model = data(12), Experts()
    total = torch.zeros(3, dtype=torch.float64)
    for one in range(12):
        loss = functional.cross_entropy(model(x[one : one + 1]), y[one : one + 1])
        (gradient,) = torch.autograd.grad(loss, [model.matrices])
        total += gradient.square().sum((1, 2)) / 12
    traces = {layer.name: layer.exact_trace for layer in whole.layers}
    for place in range(3):
        assert traces[f"matrices[{place}]"] == pytest.approx(float(total[place]), rel=1e-10)
