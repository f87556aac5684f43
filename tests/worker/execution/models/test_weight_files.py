"""Weights that are missing, and files of weights that are not read: each sentence is true of its folder."""

import json
from pathlib import Path

import pytest
import torch

from tests.worker.execution.models.test_unused_contents import Saved, bert, loaded, save, tensors
from worker.execution.refusal import Refusal

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def without(folder: Path, *parts: str) -> None:
    save(folder, {name: each for name, each in tensors(folder).items() if not any(part in name for part in parts)})


def shard(folder: Path) -> None:
    """Write the tensors once more as two shards with an index."""
    state = tensors(folder)
    halves = [dict(list(state.items())[place::2]) for place in range(2)]
    for name, half in zip(SHARDS, halves, strict=True):
        save(folder, half, name)
    places = {name: file for file, half in zip(SHARDS, halves, strict=True) for name in half}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("task", ["sequence_classification", "regression"])
def test_a_pooler_that_the_head_reads_is_named_where_it_is_missing(saved: Saved, task: str) -> None:
    folder = saved("AutoModelForSequenceClassification", bert())
    without(folder, ".pooler.")
    said = r"2 tensors are missing from the files: `bert\.pooler\.dense\.bias`, `bert\.pooler\.dense\.weight`; the chec"
    with pytest.raises(Refusal, match=said) as refused:
        loaded(folder, task)
    assert (refused.value.code, refused.value.pointer) == ("missing_tensor", "/model/path")


def test_a_checkpoint_without_head_and_pooler_is_told_that_the_task_needs_the_head(saved: Saved) -> None:
    folder = saved("AutoModelForMaskedLM", bert())
    with pytest.raises(Refusal, match=r"classifier\.weight`.*; this task needs that head") as refused:
        loaded(folder, "sequence_classification")
    assert refused.value.code == "missing_head"


def test_a_pooler_that_no_head_reads_may_be_missing(saved: Saved) -> None:
    folder = saved("AutoModelForTokenClassification", bert())
    assert loaded(folder, "token_classification")[0].model.bert.pooler is None
    assert loaded(folder)[0].model.pooler is None


def test_weights_beside_a_whole_file_are_said_to_give_way_to_it(saved: Saved) -> None:
    folder = saved("AutoModelForMaskedLM", bert())
    save(folder, {"more": torch.ones(2)}, "other.safetensors")
    shard(folder)
    _, notes = loaded(folder)
    assert sorted(notes.notices) == [
        f"the tensors of `{name}` are not read: `model.safetensors` is read by itself, as transformers does"
        for name in (*SHARDS, "other.safetensors")
    ]


def test_weights_that_an_index_does_not_name_are_said_so(saved: Saved) -> None:
    folder = saved("AutoModelForMaskedLM", bert())
    shard(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    _, notes = loaded(folder)
    assert notes.notices == ["the tensors of `other.safetensors` are not read: the checkpoint's index does not name it"]


def test_shards_without_their_index_and_weights_of_another_name_have_their_own_remedies(saved: Saved) -> None:
    folder = saved("AutoModelForMaskedLM", bert())
    shard(folder)
    (folder / INDEX).unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        Refusal, match=rf"has `{SHARDS[0]}`, `{SHARDS[1]}` and no {INDEX}.*; add the index that"
    ) as refused:
        loaded(folder)
    assert refused.value.code == "not_found"
    (folder / SHARDS[1]).unlink()
    (folder / SHARDS[0]).rename(folder / "weights.safetensors")
    with pytest.raises(Refusal, match=r"has `weights\.safetensors` and no model\.safetensors; .* rename it to model\."):
        loaded(folder)
    (folder / "weights.safetensors").unlink()
    with pytest.raises(Refusal, match=r"has no model\.safetensors; save the model with `save_pretrained`"):
        loaded(folder)
