"""Extensions: the factors of one job over all the examples, or a refusal."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from catalog.record import FieldError
from engine.errors import EngineError
from tests.worker.execution.pieces.conftest import Run, Runner
from tests.worker.execution.pieces.test_division import require_equal
from worker.execution.refusal import Refusal


def write_digits(path: Path, begin: int, end: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    images, classes = torch.rand(120, 64, generator=generator), torch.randint(0, 10, (120,), generator=generator)
    tensors = {"inputs": images[begin:end].clone(), "targets": classes[begin:end].clone()}
    safetensors.torch.save_file(tensors, path)
    return {"source": "file", "path": str(path)}


@pytest.fixture
def digits(tmp_path: Path) -> Callable[[int, int], dict[str, Any]]:
    return lambda begin, end: write_digits(tmp_path / f"digits-{begin}-{end}.safetensors", begin, end)


def document(data: dict[str, Any], **collection: Any) -> dict[str, Any]:
    return {
        "kind": ["factors", "capacity"],
        "model": {"source": "builtin", "name": "digits_mlp"},
        "data": data,
        "task": {"type": "classification"},
        "collection": {"batch_size": 16, "dtype": "float64", "seed": 7, "self_check": "off", **collection},
    }


def describe(run: Run, asked: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Write the run's `job.json` as a foreground run does; return what extends it."""
    job = {
        "document": asked,
        "state": "succeeded",
        "model_sha256": run.finished.model_sha256,
        "data_sha256": run.finished.data_sha256,
        **changes,
    }
    (run.folder / "job.json").write_text(json.dumps(job))
    return {"path": str(run.folder)}


def test_two_extensions_give_the_factors_of_one_run_over_all(runner: Runner, digits: Any) -> None:
    whole = runner.job("whole", document(digits(0, 120)))
    first_document = document(digits(0, 50), self_check="first")
    first = runner.job("first", first_document)
    second_document = {"kind": ["factors", "capacity"], "data": digits(50, 90)}
    second_document["extends"] = describe(first, first_document)
    second = runner.job("second", second_document)
    assert second.finished.examples == 90
    third_document = {"kind": ["factors", "capacity"], "data": digits(90, 120)}
    third_document["extends"] = describe(second, second_document)
    third = runner.job("third", third_document)
    # 50 and 90 end within a batch: rounded otherwise, and no example is left out
    for layer in third.factors.layers:
        assert layer.positions == 120
    assert third.finished.examples == 120
    assert third.finished.model_sha256 == whole.finished.model_sha256
    found, expected = third.factors, whole.factors
    assert found.updates == 4 + 3 + 2
    require_equal(found, dataclasses.replace(expected, updates=9), 1e-12)
    metrics = {(row["kind"], row["layer"]): row["metrics"] for row in whole.rows}
    for row in third.rows:
        for name in ("effective_rank", "stable_rank") if row["kind"] == "capacity" else ("trace_A", "trace_G"):
            expected_metrics = metrics[row["kind"], row["layer"]]
            assert row["metrics"][name] == pytest.approx(expected_metrics[name], rel=1e-8), name


def test_a_divided_job_can_be_extended(runner: Runner, digits: Any) -> None:
    whole = runner.job("whole", document(digits(0, 120)))
    divided_document = {**document(digits(0, 96)), "shards": 2}
    divided = runner.job("divided", divided_document)
    asked = {"kind": "factors", "data": digits(96, 120), "extends": describe(divided, divided_document)}
    require_equal(runner.job("extended", asked).factors, whole.factors, 1e-12)


@pytest.mark.parametrize(
    ("collection", "message"),
    [
        ({"ema_decay": 0.9}, "names a job with `collection.ema_decay`"),
        ({"nested": True}, "names a job with `collection.nested`"),
        ({"update_freq": 2}, "`collection.update_freq: 2`: in one run over all the data other batches would enter"),
    ],
)
def test_what_is_not_exact_is_refused(runner: Runner, digits: Any, collection: Any, message: str) -> None:
    asked = document(digits(0, 50), **collection)
    earlier = runner.job("earlier", asked)
    with pytest.raises(Refusal) as caught:
        runner.job("later", {"kind": "factors", "data": digits(50, 90), "extends": describe(earlier, asked)})
    assert message in caught.value.message
    assert caught.value.pointer == "/extends"
    assert caught.value.code == "not_extensible"


def test_other_models_and_broken_folders_are_refused(runner: Runner, digits: Any) -> None:
    asked = document(digits(0, 50))
    earlier = runner.job("earlier", asked)

    def refusal(**changes: Any) -> Refusal:
        later = {"kind": "factors", "data": digits(50, 90), "extends": describe(earlier, asked, **changes)}
        with pytest.raises(Refusal) as caught:
            runner.job("later", later)
        return caught.value

    found = refusal(model_sha256="0" * 64)
    assert found.code == "model_differs"
    assert "0" * 64 in found.message
    assert str(earlier.finished.model_sha256) in found.message
    # the index knows the model too, where nobody wrote down the digest
    other = {**asked, "model": {"source": "builtin", "name": "digits_cnn"}}
    assert "is running" in refusal(state="running").message
    assert "is not that of a run" in refusal(document=None).message
    assert "measured no model" in refusal(document={"kind": "capacity", "factors": {"path": "x"}}).message
    chain = {"kind": "factors", "data": digits(0, 50), "extends": {"path": str(earlier.folder)}}
    assert "and so on to none" in refusal(document=chain).message
    extends = describe(earlier, other, model_sha256=None)
    with pytest.raises(EngineError, match="model"):
        runner.job("other", {"kind": "factors", "data": digits(50, 90), "extends": extends})
    # an edited record, whose numbers would be those of two tasks
    extends = describe(earlier, {**asked, "task": {"type": "classification", "label_smoothing": 0.5}})
    with pytest.raises(EngineError, match=r"`task.label_smoothing` must be the same .* 0.0 in set 1 and 0.5 in set 2"):
        runner.job("edited", {"kind": "factors", "data": digits(50, 90), "extends": extends})


def test_analyses_are_checked_against_the_extended_collection(runner: Runner, digits: Any) -> None:
    asked = document(digits(0, 50))
    earlier = runner.job("earlier", asked)
    later = {
        "kind": "spectrum",
        "spectrum": {"of": "ekfac"},
        "data": digits(50, 90),
        "extends": describe(earlier, asked),
    }
    with pytest.raises(FieldError, match="needs it"):
        runner.job("later", later)


def test_a_job_of_a_service_is_extended_by_what_its_parent_laid_out(runner: Runner, digits: Any) -> None:
    asked = document(digits(0, 50))
    earlier = runner.job("earlier", asked)
    later = {"kind": "factors", "data": digits(50, 90), "extends": {"job": "abc"}}
    with pytest.raises(Refusal, match="names a job of the service"):
        runner.job("alone", later)
    laid_out = {
        "path": str(earlier.folder / "artifacts" / "factors"),
        "document": asked,
        "model_sha256": earlier.finished.model_sha256,
        "data_sha256": earlier.finished.data_sha256,
    }
    found = runner.job("later", later, extends=laid_out)
    assert found.finished.examples == 90
    assert {layer.positions for layer in found.factors.layers} == {90}
