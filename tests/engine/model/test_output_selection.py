"""Outputs: the loss is of the tensor that is named, or of the only one there is."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from catalog.record import FieldError
from catalog.requests.inputs import Task
from engine.collect import collect_or_read
from engine.errors import WrongShape
from engine.factors.factor_set import FactorSet
from tests.oracles import workspace

Wrap = Callable[[Tensor, Tensor], Any]


@dataclass
class Decoded:
    """An output as home-made models return it."""

    hidden: Tensor
    scores: Tensor


class Pair(NamedTuple):
    """An output of two tensors, by name and by place."""

    hidden: Tensor
    scores: Tensor


class Wrapped(nn.Module):
    """A net of two layers that returns its hidden tensor and its scores as a test says."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 3), nn.Linear(3, 3)
        self.wrap = wrap
        self.double()

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        return self.wrap(hidden, self.head(hidden))


def measured(wrap: Wrap, output: str | None = None, task: str = "classification") -> FactorSet:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (8,), generator=generator)
    space = workspace(Wrapped(wrap), [(x, y if task == "classification" else x[:, :3])], task)
    space.inputs.task = Task(type=task, output=output)  # type: ignore[arg-type]
    return collect_or_read(space)


ALONE: list[Wrap] = [
    lambda _, scores: {"prediction": scores},
    lambda _, scores: OrderedDict(sample=scores, cache=None, states=(scores, scores)),
    lambda hidden, scores: {"loss": hidden.mean(), "scores": scores},
    lambda hidden, scores: {"logits": scores, "hidden": hidden},
]


@pytest.mark.parametrize("wrap", ALONE)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_only_tensor_of_a_mapping_needs_no_name(wrap: Wrap, task: str) -> None:
    plain, whole = measured(lambda _, scores: scores, task=task), measured(wrap, task=task)
    for ordinal in range(2):
        assert torch.equal(whole.load(ordinal).G, plain.load(ordinal).G)


SEVERAL: list[Wrap] = [
    lambda hidden, scores: {"hidden": hidden, "scores": scores},
    Decoded,
    Pair,
]


@pytest.mark.parametrize("wrap", SEVERAL)
def test_a_named_output_is_the_one_the_loss_is_of(wrap: Wrap) -> None:
    for name, plain in (("scores", lambda _, scores: scores), ("hidden", lambda hidden, _: hidden)):
        truth, whole = measured(plain), measured(wrap, name)
        covered = [layer.name for layer in truth.layers]
        assert [layer.name for layer in whole.layers] == covered
        for ordinal in range(len(covered)):
            assert torch.equal(whole.load(ordinal).G, truth.load(ordinal).G)


@pytest.mark.parametrize("wrap", SEVERAL[:2])
def test_several_tensors_without_a_name_are_listed_with_the_remedy(wrap: Wrap) -> None:
    with pytest.raises(
        WrongShape, match=r"2 tensors \(`hidden` \(2, 3\), `scores` \(2, 3\)\).*`task\.output`"
    ) as raised:
        measured(wrap)
    assert raised.value.pointer == "/task/output"


def test_a_name_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(WrongShape, match=r"got 'score'\); `dict` holds `hidden` \(2, 3\), `scores` \(2, 3\)"):
        measured(SEVERAL[0], "score")
    with pytest.raises(WrongShape, match=r"got 'scores'\); `Tensor` holds none by name"):
        measured(lambda _, scores: scores, "scores")
    with pytest.raises(WrongShape, match="`dict` without a tensor"):
        measured(lambda *_: {"scores": None})


def test_the_models_own_loss_has_no_other_output() -> None:
    with pytest.raises(FieldError, match="has no place in `loss: model`"):
        Task(type="classification", loss="model", output="scores")
