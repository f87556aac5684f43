"""Steps of an optimiser: one an episode, by gradients that are unscaled and clipped, with skipped ones counted."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import NonFiniteLoss
from engine.training.mixed_precision import TrainingPrecision
from engine.training.optimiser_step import OptimiserName, OptimiserStep, make_optimiser
from engine.training.split_gradients import split_gradients

NAMES: tuple[OptimiserName, ...] = ("AdamW", "Adam", "SGD")


def scaled(scale: float = 2.0**9) -> TrainingPrecision:
    return TrainingPrecision(scaler=torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def episode(model: nn.Module, step: OptimiserStep, precision: TrainingPrecision | None, number: int) -> bool:
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    loss = split_gradients(model, lambda z: z.square().mean(), x, chunk=3, precision=precision)
    return step.take(loss, f"episode {number}")


def weights(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("precision", [None, scaled()])
def test_steps_are_those_of_plain_torch(name: OptimiserName, max_norm: float | None, precision: Any) -> None:
    """A scale that is a power of two changes nothing; the norm that is clipped is that of the unscaled gradients."""
    model = net()
    twin = copy.deepcopy(model)
    step = OptimiserStep(make_optimiser(name, model.parameters(), 0.1, 0.01, 0.8), precision, max_norm)
    kind: Any = getattr(torch.optim, name)
    plain = kind(twin.parameters(), lr=0.1, weight_decay=0.01, **({"momentum": 0.8} if name == "SGD" else {}))
    for number in range(5):
        assert episode(model, step, precision, number)
        assert all(each.grad is None for each in model.parameters())
        x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        plain.zero_grad()
        twin(x).square().mean().backward()
        if max_norm is not None:
            norm = torch.cat([each.grad.flatten() for each in twin.parameters()]).norm()
            assert norm > max_norm
            for each in twin.parameters():
                each.grad *= max_norm / (norm + 1e-6)
        plain.step()
    assert (weights(model) - weights(twin)).abs().max() <= 1e-12
    assert step.skipped == 0


def test_an_overflow_skips_the_step_is_counted_and_halves_the_scale() -> None:
    model, precision = nn.Linear(4, 2), scaled(2.0**112)
    step = OptimiserStep(make_optimiser("AdamW", model.parameters(), 0.1), precision)
    scaler = precision.scaler
    assert scaler is not None
    overflowed = []
    for number in range(12):
        x, before = 1e3 * torch.randn(7, 4, generator=torch.Generator().manual_seed(number)), weights(model).clone()
        truth = torch.autograd.grad(model(x).square().mean(), model.weight)[0].abs().max().double()
        scale = scaler.get_scale()
        overflowed.append(bool(truth * scale > torch.finfo(torch.float32).max))
        loss = split_gradients(model, lambda z: z.square().mean(), x, chunk=3, precision=precision)
        assert step.take(loss) != overflowed[-1]
        assert torch.equal(weights(model), before) == overflowed[-1]
        assert (scaler.get_scale() == scale / 2) == overflowed[-1]
        assert all(each.grad is None for each in model.parameters())
    assert 0 < step.skipped == sum(overflowed) < 12


def test_a_gradient_that_no_scale_makes_finite_is_refused() -> None:
    model, precision = nn.Linear(4, 2), scaled(2.0**-23)
    step = OptimiserStep(make_optimiser("SGD", model.parameters(), 0.1), precision)

    def take() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.inf)
        assert precision.scaler is not None
        precision.scaler.scale(torch.zeros(()))
        step.take(1.0, "episode 3")

    take()
    with pytest.raises(NonFiniteLoss, match="gradients of episode 3 overflow float16"):
        take()
    assert step.skipped == 2


@pytest.mark.parametrize("loss", [float("nan"), torch.tensor(torch.inf)])
@pytest.mark.parametrize("precision", [None, scaled()])
def test_a_loss_that_is_not_finite_is_named_and_moves_nothing(loss: Any, precision: Any) -> None:
    model = net()
    step, before = OptimiserStep(make_optimiser("SGD", model.parameters(), 0.1), precision), weights(model).clone()
    with pytest.raises(NonFiniteLoss, match=r"the loss of episode 12 must be finite \(got (nan|inf)\)"):
        step.take(loss, "episode 12")
    assert torch.equal(weights(model), before)


def test_gradients_that_are_not_finite_move_nothing() -> None:
    """A root at zero: the loss is finite, its gradient is not."""
    model = net()
    step, before = OptimiserStep(make_optimiser("AdamW", model.parameters(), 0.1)), weights(model).clone()
    loss = split_gradients(model, lambda z: (z - z).sum().sqrt(), torch.randn(5, 4, dtype=torch.float64))
    with pytest.raises(
        NonFiniteLoss, match=r"the gradients of episode 1 must be finite \(their norm is nan, the loss 0\)"
    ):
        step.take(loss, "episode 1")
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make_precision", [lambda: None, scaled])
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(name: OptimiserName, make_precision: Any) -> None:
    model, precision = net(), make_precision()
    step = OptimiserStep(make_optimiser(name, model.parameters(), 0.1), precision)
    for number in range(4):
        episode(model, step, precision, number)
    step.skipped = 5
    kept, stored = copy.deepcopy(step.state_dict()), copy.deepcopy(model.state_dict())
    other, other_precision = net(), make_precision()
    other.load_state_dict(stored)
    resumed = OptimiserStep(make_optimiser(name, other.parameters(), 0.1), other_precision)
    resumed.load_state_dict(kept)
    for number in range(4, 8):
        episode(model, step, precision, number)
        episode(other, resumed, other_precision, number)
    assert torch.equal(weights(model), weights(other))
    assert resumed.state_dict()["scaler"] == step.state_dict()["scaler"]
    assert resumed.skipped == 5


def test_a_run_of_another_precision_is_not_taken_up() -> None:
    steps = [OptimiserStep(make_optimiser("SGD", net().parameters(), 0.1), each) for each in (None, scaled())]
    for one, other in (steps, steps[::-1]):
        with pytest.raises(ValueError, match="must train in one precision"):
            one.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(("adamw", True, 0.1), "one of AdamW, Adam, SGD"), (("SGD", True, 0.0), "above 0 and finite"),
     (("SGD", True, float("nan")), "above 0 and finite"), (("SGD", False, 0.1), "a parameter to train")],
)  # fmt: skip
def test_optimisers_that_cannot_be_are_refused(arguments: tuple[Any, bool, float], sentence: str) -> None:
    name, trained, rate = arguments
    with pytest.raises(ValueError, match=sentence):
        make_optimiser(name, net().requires_grad_(trained).parameters(), rate)
