import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from catalog.requests.inputs import BuiltinData, BuiltinModel, Task
from engine.errors import StopRequested
from worker.execution.data import builtin as builtin_data
from worker.execution.data.builtin import TEST_EXAMPLES, digits
from worker.execution.data.stream import DataRequest
from worker.execution.loader_context import LoaderContext
from worker.execution.models import builtin
from worker.execution.models.builtin import load

CNN = BuiltinModel(source="builtin", name="digits_cnn")
TASK = Task(type="classification")


def test_the_cnn_classifies_digits_it_never_saw(context: LoaderContext) -> None:
    loaded = load(CNN, TASK, context)
    images, classes = digits()
    with torch.no_grad():
        right = loaded.model(images[-TEST_EXAMPLES:]).argmax(1) == classes[-TEST_EXAMPLES:]
    assert right.double().mean() > 0.95
    assert not loaded.model.training


@pytest.mark.parametrize("name", ["digits_cnn", "digits_mlp"])
def test_weights_of_the_package_are_those_of_its_note_and_train_nothing(
    tmp_path: Path, name: Literal["digits_cnn", "digits_mlp"]
) -> None:
    trained: list[Any] = []
    context = LoaderContext(store=tmp_path, report=lambda *frame: trained.append(frame))
    loaded = load(BuiltinModel(source="builtin", name=name), TASK, context)
    (weights,) = builtin.PACKAGED.glob(f"{name}-*.safetensors")
    noted = json.loads(weights.with_suffix(".json").read_text())
    assert loaded.provenance == f"builtin {name} sha256:{hashlib.sha256(weights.read_bytes()).hexdigest()}"
    assert noted["sha256"] in loaded.provenance
    images, classes = digits()
    with torch.no_grad():
        right = loaded.model(images[-TEST_EXAMPLES:]).argmax(1) == classes[-TEST_EXAMPLES:]
    assert float(right.double().mean()) == pytest.approx(noted["measured"]["test_accuracy"], abs=0.01)
    assert trained == []
    assert not list(tmp_path.iterdir())


@pytest.fixture
def nothing_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "PACKAGED", tmp_path / "none")


@pytest.mark.usefixtures("nothing_packaged")
def test_a_damaged_file_is_trained_again_to_the_same_bytes(tmp_path: Path) -> None:
    # the folder of the store is not there yet
    context, reports = LoaderContext(store=tmp_path / "a" / "b"), []
    mlp = BuiltinModel(source="builtin", name="digits_mlp")
    first = load(mlp, TASK, replace(context, report=lambda *frame: reports.append(frame))).provenance
    assert {frame[0] for frame in reports} == {"model"}
    assert reports[-1][1] == reports[-1][2]
    (weights,) = context.store.glob("builtin/digits_mlp*.safetensors")
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    torch.manual_seed(123)  # the caller's seed has no say
    assert load(mlp, TASK, context).provenance == first
    assert json.loads(weights.with_suffix(".json").read_text())["sha256"] in first


@pytest.mark.usefixtures("nothing_packaged")
def test_training_stops_at_a_checkpoint_and_leaves_no_file(tmp_path: Path) -> None:
    def stop() -> None:
        raise StopRequested

    with pytest.raises(StopRequested):
        load(CNN, TASK, LoaderContext(store=tmp_path, checkpoint=stop))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_positions_of_the_tiny_gpt_have_gradients_per_example() -> None:
    from worker.execution.models.builtin import TinyGPT  # noqa: PLC0415 - the class alone is looked at

    torch.manual_seed(0)
    model, seen = TinyGPT(), []
    model.positions.register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    model(torch.zeros(3, 5, dtype=torch.int64))
    assert seen == [torch.Size([3, 5])]


def test_digits_are_images_and_english_is_bytes(
    context: LoaderContext, request_for: Callable[..., DataRequest]
) -> None:
    loaded = load(CNN, TASK, context)
    stream = builtin_data.load(
        BuiltinData(source="builtin", name="digits", limit=10), request_for(loaded, "classification")
    )
    ((images, classes),) = stream.batches()
    assert images.shape == (10, 1, 8, 8)
    assert classes.dtype == torch.int64
    assert stream.examples == 10
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
