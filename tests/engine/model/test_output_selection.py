"""Outputs: the loss is of the tensor that is named, or of the only one there is."""

import types
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
from engine.model.batches import make_batches
from engine.model.outputs import predict
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


def measured(wrap: Wrap, output: str | None = None, task: str = "classification", **options: Any) -> FactorSet:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (8,), generator=generator)
    space = workspace(Wrapped(wrap), [(x, y if task == "classification" else x[:, :3])], task, **options)
    space.inputs.task = Task(type=task, output=output)  # type: ignore[arg-type]
    return collect_or_read(space)


ALONE: list[Wrap] = [
    lambda _, scores: {"prediction": scores},
    lambda _, scores: OrderedDict(sample=scores, cache=None, states=(scores, scores)),
    lambda hidden, scores: {"loss": hidden.mean(), "scores": scores},
    lambda hidden, scores: {"logits": scores, "hidden": hidden},
]


@pytest.mark.part(of=24, by=("task",))
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


@pytest.mark.part(of=16, by=())
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


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("fisher", ["mc", "type2", "empirical", "forward_only"])
def test_complex_outputs_are_refused_with_the_remedy(task: str, fisher: str) -> None:
    with pytest.raises(WrongShape, match=r"outputs must be real .*complex128\).*`torch\.view_as_real`") as raised:
        measured(lambda hidden, scores: torch.complex(scores, hidden), task=task, fisher=fisher)
    assert raised.value.pointer == "/model"


@pytest.mark.parametrize("loss", ["mse", "bce", "cross_entropy"])
def test_complex_targets_are_refused_unless_the_model_takes_them_itself(loss: str) -> None:
    model, x, y = nn.Linear(6, 3), torch.randn(4, 6), torch.rand(4, 3).to(torch.complex64)
    task = Task(type="classification" if loss == "cross_entropy" else "regression", loss=loss)  # type: ignore[arg-type]
    (batch,) = make_batches(iter([(x, y)]), 4)
    with pytest.raises(WrongShape, match=r"targets must be real .*`torch\.view_as_real`") as raised:
        predict(model, batch, task)
    assert raised.value.pointer == "/data"


def test_complex_targets_of_the_models_own_loss_are_terms_of_as_many_numbers() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x[:, :3] - y).abs().square().mean()

    (batch,) = make_batches(iter([(torch.randn(4, 6), torch.rand(4, 3).to(torch.complex64))]), 4)
    assert predict(Net(), batch, Task(type="regression", loss="model")).terms == 4


def test_the_models_own_loss_has_no_other_output() -> None:
    with pytest.raises(FieldError, match="has no place in `loss: model`"):
        Task(type="classification", loss="model", output="scores")


@pytest.mark.parametrize(
    ("shape", "mean"),
    [
        ((2, 3), lambda hidden: hidden),
        ((2, 5, 3), lambda hidden: hidden.mean(1)),
        ((2, 3, 2, 4), lambda hidden: hidden.mean((2, 3))),
        ((2, 3, 2, 2, 2), lambda hidden: hidden.mean((2, 3, 4))),
    ],
    ids=lambda each: str(len(each)) if isinstance(each, tuple) else "",
)
def test_an_embedding_is_the_mean_over_positions_of_any_input(
    shape: tuple[int, ...], mean: Callable[[Tensor], Tensor]
) -> None:
    hidden = torch.randn(shape, dtype=torch.float64)
    x = torch.randn(2, 7, dtype=torch.float64)
    # a mask of the inputs' 7 samples says nothing of the tower's own positions
    batch = next(make_batches([({"x": x, "attention_mask": torch.ones(2, 7)}, None)], 2))

    class Tower(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Any:
            return {"last_hidden_state": hidden + 0 * x.sum() * attention_mask.sum()}

    found = predict(Tower(), batch, Task(type="embedding"))
    assert found.targets is None
    torch.testing.assert_close(found.outputs, mean(hidden)[:, None])


def test_an_embedding_of_a_tower_with_channels_last_has_its_channels() -> None:
    hidden = torch.randn(2, 4, 5, 3)

    class Tower(nn.Module):
        config = types.SimpleNamespace(model_type="sam2_vision_model")

        def forward(self, pixels: Tensor) -> Any:
            return {"last_hidden_state": hidden + 0 * pixels.sum()}

    batch = next(make_batches([(torch.randn(2, 3, 8, 8), None)], 2))
    found = predict(Tower(), batch, Task(type="embedding"))
    torch.testing.assert_close(found.outputs, hidden.mean((1, 2))[:, None])


def test_padded_sound_is_averaged_over_its_own_frames() -> None:
    """The frames of each example by the lengths of the convolutions: floor((L − k) / s) + 1, twice."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model  # noqa: PLC0415 - as no module of tests imports it at once

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    convolutions = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    torch.manual_seed(0)
    model = Wav2Vec2Model(Wav2Vec2Config(**sizes, **convolutions, **positions)).eval()
    x, mask = torch.randn(2, 200), torch.ones(2, 200, dtype=torch.long)
    mask[1, 120:] = 0
    batch = next(make_batches([({"input_values": x, "attention_mask": mask}, None)], 2))
    hidden = model(input_values=x, attention_mask=mask).last_hidden_state
    frames = [((length - 10) // 5 + 1 - 3) // 2 + 1 for length in (200, 120)]
    assert hidden.shape[1] == frames[0] > frames[1]
    expected = torch.stack([hidden[place, :count].mean(0) for place, count in enumerate(frames)])
    torch.testing.assert_close(predict(model, batch, Task(type="embedding")).outputs, expected[:, None])


def test_padding_that_no_frame_is_known_for_is_refused() -> None:
    mask = torch.ones(2, 7)
    mask[1, 4:] = 0

    class Tower(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Any:
            return {"last_hidden_state": torch.zeros(2, 3, 5) + 0 * x.sum() * attention_mask.sum()}

    batch = next(make_batches([({"x": torch.randn(2, 7), "attention_mask": mask}, None)], 2))
    with pytest.raises(WrongShape, match=r"has 7 positions and marks some as padding, but the hidden states have 3"):
        predict(Tower(), batch, Task(type="embedding"))
