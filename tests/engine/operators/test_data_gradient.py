"""The gradient of the mean loss is that of torch's own losses, over the examples that entered the factors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.requests.inputs import Task
from engine.collect import collect_or_read
from engine.collection.pass_job import PassJob
from engine.errors import EmptyData, NonFiniteLoss, WrongShape
from engine.operators import data_gradient
from engine.operators.data_gradient import DataGradient, GradientPass
from engine.workspace import Workspace
from tests.oracles import workspace

GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(10, 6, dtype=torch.float64, generator=GENERATOR)
CLASSES = torch.tensor([0, 1, 2, 3, 0, -100, 2, 3, 1, 0])
NUMBERS = torch.randn(10, 4, dtype=torch.float64, generator=GENERATOR)
LABELS = (NUMBERS > 0).double()
WEIGHTS = (0.5, 2.0, 1.0, 3.0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def taken(model: nn.Module, space: Workspace, **changes: Any) -> DataGradient:
    factors = collect_or_read(space)
    job = replace(
        PassJob.of(space, space.machine.device), collection=factors.collection, micro_batch=factors.micro_batch
    )
    names = [name for name, _ in model.named_parameters()]
    return GradientPass(job=replace(job, **changes), names=names, updates=factors.updates, report=lambda: None).run()


def check(model: nn.Module, found: DataGradient, loss: Tensor) -> None:
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
        assert float((found.by_name[name] - gradient).norm()) <= 1e-12 * float(gradient.norm()), name


def split(inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]


LOSSES: dict[str, tuple[dict[str, Any], Tensor, Callable[[Tensor], Tensor]]] = {
    "ignored targets": (
        {"type": "classification"},
        CLASSES,
        lambda outputs: nn.functional.cross_entropy(outputs, CLASSES),
    ),
    "weights and smoothing": (
        {"type": "classification", "class_weights": WEIGHTS, "label_smoothing": 0.1},
        CLASSES,
        lambda outputs: nn.functional.cross_entropy(
            outputs, CLASSES, torch.tensor(WEIGHTS, dtype=torch.float64), label_smoothing=0.1
        ),
    ),
    "squares": ({"type": "regression"}, NUMBERS, lambda outputs: nn.functional.mse_loss(outputs, NUMBERS)),
    "positive weights": (
        {"type": "classification", "loss": "bce", "positive_weights": WEIGHTS},
        LABELS,
        lambda outputs: nn.functional.binary_cross_entropy_with_logits(
            outputs, LABELS, pos_weight=torch.tensor(WEIGHTS, dtype=torch.float64)
        ),
    ),
}


@pytest.mark.part(of=24, by=("micro_batch",))
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_the_gradient_is_that_of_torchs_own_mean_loss(name: str, micro_batch: int | None) -> None:
    fields, targets, loss = LOSSES[name]
    model = net()
    space = workspace(model, split(INPUTS, targets), "classification", fisher="mc", batch_size=4)
    space.inputs.task = Task(**fields)
    check(model, taken(model, space, micro_batch=micro_batch), loss(model(INPUTS)))


class WithLoss(nn.Module):
    """A model that returns its own mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.inner(x), targets, label_smoothing=0.2)


def test_the_gradient_of_the_models_own_loss() -> None:
    model = WithLoss()
    classes = CLASSES.clamp_min(0)
    space = workspace(model, split(INPUTS, classes), "classification", "model", fisher="empirical", batch_size=4)
    check(model, taken(model, space), model(INPUTS, classes))


def test_dropped_batches_stay_out_and_a_moving_average_weighs_as_in_the_factors() -> None:
    model = net()
    classes = CLASSES.clamp_min(0)
    chunks = [(INPUTS[place : place + 2], classes[place : place + 2]) for place in range(0, 10, 2)]
    space = workspace(model, chunks, "classification", fisher="mc", batch_size=2, update_freq=2, ema_decay=0.7)
    # batches 0, 2 and 4 enter; each later one halves what came before by 0.7
    entered = [(0.49, chunks[0]), (0.7, chunks[2]), (1.0, chunks[4])]
    losses = [weight * nn.functional.cross_entropy(model(x), y, reduction="sum") for weight, (x, y) in entered]
    divisor = sum(2 * weight for weight, _ in entered)
    found = taken(model, space)
    assert found.divisor == pytest.approx(divisor, rel=1e-14)
    check(model, found, sum(losses, torch.zeros(())) / divisor)


def test_the_model_is_left_as_it_was() -> None:
    model = net()
    model[2].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    space = workspace(model, split(INPUTS, CLASSES), "classification", fisher="mc")
    factors = collect_or_read(space)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    job = PassJob.of(space, space.machine.device)
    found = GradientPass(job=job, names=names, updates=factors.updates, report=lambda: None).run()
    assert set(found.by_name) == {"0.weight", "0.bias", "2.weight"}
    assert model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, True, True, False]
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert all(parameter.grad is None for parameter in (model[0].bias, model[2].weight))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_slice_that_runs_out_of_memory_is_halved_and_enters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    space = workspace(model, split(INPUTS, CLASSES), "classification", fisher="mc", batch_size=10)
    whole, sizes = data_gradient.predict, []

    def tight(model: nn.Module, batch: Any, task: Task) -> Any:
        sizes.append(batch.size)
        if batch.size > 3:
            raise torch.OutOfMemoryError
        return whole(model, batch, task)

    collect_or_read(space)
    monkeypatch.setattr(data_gradient, "predict", tight)
    check(model, taken(model, space), nn.functional.cross_entropy(model(INPUTS), CLASSES))
    # half of ten, half of that, and the rest in slices of that size
    assert sizes[:3] == [10, 5, 3]
    assert max(sizes[3:]) == 3


def test_what_has_no_gradient_is_refused() -> None:
    model = net()
    bare = workspace(model, [(INPUTS, None)], "classification", fisher="mc")
    with pytest.raises(WrongShape, match=r"needs targets, and the data has none.*natural_gradient\.gradient"):
        taken(model, bare)
    collected = workspace(model, [(INPUTS, CLASSES)], "classification", fisher="mc")
    collect_or_read(collected)
    collected.inputs.batches = lambda: iter([(INPUTS, torch.full((10,), -100))])
    with pytest.raises(EmptyData, match="no loss term of the data weighs anything"):
        taken(model, collected)
    huge = workspace(model, [(INPUTS, 1e300 * NUMBERS)], "regression", fisher="mc")
    collect_or_read(huge)
    huge.inputs.batches = lambda: iter([(INPUTS, torch.full((10, 4), 1.7e308, dtype=torch.float64))])
    with pytest.raises(NonFiniteLoss, match=r"the gradient of `0\.(weight|bias)` holds"):
        taken(model, huge)
