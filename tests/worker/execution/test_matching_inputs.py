"""Model and data that cannot match: refused before a model is trained, and before a pass over the data is made."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import BertConfig

from catalog.frames import Failed, Progress
from engine.collect import collect_or_read
from engine.collection.nan_check import require_known_labels
from engine.errors import EngineError, WrongShape
from tests.oracles import workspace
from tests.worker.execution.test_execution import assignment, run
from worker.execution.attempt import parse_document
from worker.execution.failures import failure_of
from worker.execution.job_inputs import load_data, load_model, try_before_training
from worker.execution.loader_context import LoaderContext
from worker.execution.models import builtin
from worker.execution.refusal import Refusal

IMAGES = torch.rand(40, 1, 8, 8)
CLASSES = torch.arange(40) % 10
BEYOND = torch.where(torch.arange(40) == 33, 41, CLASSES)


def document(model: Any, data: Any, task: str, kind: str = "capacity") -> dict[str, Any]:
    if isinstance(model, str):
        model = {"source": "builtin", "name": model}
    return {"kind": kind, "model": model, "data": data, "task": {"type": task}}


def tensors(folder: Path, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    safetensors.torch.save_file({"inputs": inputs, "targets": targets}, folder / "data.safetensors")
    return {"source": "file", "path": str(folder / "data.safetensors")}


def texts(folder: Path, label: int = 1) -> dict[str, Any]:
    rows = [{"text": f"hello number {number}", "label": label if number == 33 else 0} for number in range(40)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return {"source": "file", "path": str(folder / "data.jsonl")}


def test_a_label_beyond_the_head_ends_the_job_before_its_model_is_trained(tmp_path: Path) -> None:
    store, artifacts = tmp_path / "store", tmp_path / "artifacts"
    artifacts.mkdir()
    asked = document("digits_cnn", tensors(tmp_path, IMAGES, BEYOND), "classification")
    frames, code = run(assignment(store, artifacts, asked))
    assert code == 2
    failed = frames[-1]
    assert isinstance(failed, Failed)
    assert (failed.category, failed.code, failed.pointer) == ("usage", "wrong_shape", "/data")
    assert failed.message.startswith("the label of example 33 is 41, but the model has 10 classes (0 to 9); correct")
    assert not [frame for frame in frames if isinstance(frame, Progress) and frame.unit == "steps"]
    assert not list(store.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("model", "data", "task", "words"),
    [
        ("digits_cnn", texts, "classification", "these are texts, but the model reads no tokens"),
        (
            "digits_cnn",
            lambda folder: tensors(folder, torch.rand(40, 3, 8, 8), CLASSES),
            "classification",
            "given (1, 3, 8, 8)",
        ),
        (
            "digits_mlp",
            lambda folder: tensors(folder, torch.rand(40, 7), CLASSES),
            "classification",
            "in_features=64, out_features=64, bias=True), which was given (1, 7)",
        ),
        ("digits_cnn", {"source": "builtin", "name": "english"}, "causal_lm", "the model raised on inputs of shape"),
        ("digits_mlp", {"source": "builtin", "name": "digits"}, "regression", "`mse` needs the same shape"),
        ("tiny_gpt", {"source": "builtin", "name": "digits"}, "causal_lm", "are images, but the model reads tokens"),
        (
            "tiny_gpt",
            {"source": "synthetic", "shape": [16], "vocabulary": 900, "examples": 40},
            "causal_lm",
            "the model has 0 to 255",
        ),
    ],
    ids=["texts", "channels", "width", "bytes", "regression", "images", "tokens"],
)
def test_data_of_another_kind_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, data: Any, task: str, words: str
) -> None:
    monkeypatch.setattr(builtin, "PACKAGED", tmp_path / "none")  # as of a model that is still to be trained
    asked = parse_document(document(model, data(tmp_path) if callable(data) else data, task))
    with pytest.raises((Refusal, EngineError)) as caught:
        try_before_training(asked, LoaderContext(store=tmp_path / "store"))
    failed = failure_of(caught.value)
    assert failed.category == "usage"
    assert failed.pointer is not None
    assert failed.pointer.startswith(("/data", "/task"))
    assert words in failed.message
    assert not (tmp_path / "store").exists()


def test_data_that_fit_are_tried_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "PACKAGED", tmp_path / "none")
    asked = parse_document(document("digits_mlp", {"source": "builtin", "name": "digits"}, "classification"))
    state = torch.get_rng_state()
    try_before_training(asked, LoaderContext(store=tmp_path / "store"))
    assert torch.equal(torch.get_rng_state(), state)
    assert not (tmp_path / "store").exists()


def test_labels_of_any_model_are_compared_before_the_first_pass() -> None:
    batches = [(IMAGES[start : start + 4].flatten(1), CLASSES[start : start + 4]) for start in range(0, 40, 4)]
    read = []

    def stream() -> Iterator[Any]:
        for batch in batches:
            read.append(batch)
            yield batch

    made = workspace(torch.nn.Linear(64, 10), batches, "classification")
    made.inputs.batches = stream
    made.inputs.labels = lambda: iter([(BEYOND, torch.arange(40))])
    with pytest.raises(WrongShape, match="the label of example 33 is 41"):
        collect_or_read(made)
    assert len(read) == 1


@pytest.mark.parametrize(("labels", "task"), [([0, -100, 9], "classification"), ([0, 400, 9], "causal_lm")])
def test_ignored_labels_and_tokens_are_no_classes(labels: list[int], task: str) -> None:
    chunk = (torch.tensor(labels), torch.arange(3))
    asked = parse_document(document("digits_mlp", {"source": "builtin", "name": "digits"}, task))
    assert asked.task is not None
    require_known_labels(lambda: iter([chunk]), 10, asked.task)


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused_when_the_texts_are_read(
    tmp_path: Path, minilm: Path, saved: Callable[..., Path]
) -> None:
    small = BertConfig(
        vocab_size=500,
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=32,
        num_labels=2,
    )
    folder = saved("AutoModelForSequenceClassification", small)
    (folder / "tokenizer.json").write_bytes((minilm / "tokenizer.json").read_bytes())
    model = {"source": "directory", "path": str(folder)}
    asked = parse_document(document(model, texts(tmp_path), "sequence_classification"))
    context = LoaderContext(store=tmp_path)
    with pytest.raises(Refusal, match=r"gives token id \d+ in text 0, but the model's embedding has 500 rows"):
        load_data(asked, load_model(asked, context), context)
