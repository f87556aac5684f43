"""Fields of a head in config.json: used, listed where they are not, and a notice where they contradict what is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from catalog.requests.inputs import DirectoryModel, Task
from tests.worker.execution.models.test_unused_contents import Notes, Saved, bert, rewrite
from worker.execution.models.checkpoint import load
from worker.execution.refusal import Refusal

PROBLEM = "config.json: `problem_type`"
Said = Callable[..., Notes]


@pytest.fixture
def said(saved: Saved) -> Said:
    """Return what the loader says of a classifier with other fields in its config.json."""

    def say(auto: str = "AutoModelForSequenceClassification", task: Any = None, **fields: Any) -> Notes:
        folder: Path = saved(auto, bert(id2label={0: "a", 1: "b", 2: "c"}, label2id={"a": 0, "b": 1, "c": 2}))
        rewrite(folder, **fields)
        notes = Notes()
        asked = task or Task(type="sequence_classification")
        load(DirectoryModel(source="directory", path=str(folder)), asked, notes.context(folder))
        return notes

    return say


@pytest.mark.parametrize(
    ("problem", "task", "remedy"),
    [
        ("multi_label_classification", Task(type="sequence_classification"), "take `task.loss: bce`"),
        ("regression", Task(type="sequence_classification"), "take `task: {type: regression}`"),
        ("single_label_classification", Task(type="regression"), "take a classification with `loss: cross_entropy`"),
        ("single_label_classification", Task(type="sequence_classification"), None),
        ("multi_label_classification", Task(type="sequence_classification", loss="bce"), None),
        ("regression", Task(type="regression"), None),
        ("regression", Task(type="sequence_classification", loss="model"), None),
        (None, Task(type="sequence_classification"), None),
    ],
)
def test_a_problem_type_of_another_loss_is_a_notice(said: Said, problem: Any, task: Task, remedy: str | None) -> None:
    notes = said(task=task, problem_type=problem)
    assert (PROBLEM in notes.unused) == (remedy is not None)
    assert len(notes.notices) == (remedy is not None)
    if remedy is not None:
        assert f"`problem_type` is `{problem}`" in notes.notices[0]
        assert f"`{task.type}` measures `{task.likelihood}`" in notes.notices[0]
        assert notes.notices[0].count(remedy) == 1


def test_a_problem_type_without_a_head_is_listed(said: Said) -> None:
    notes = said("AutoModelForMaskedLM", Task(type="masked_lm"), problem_type="regression")
    assert PROBLEM in notes.unused
    assert notes.notices == []


@pytest.mark.parametrize("count", [7, 2, "3", True])
def test_a_number_of_labels_that_the_names_contradict_is_a_notice(said: Said, count: Any) -> None:
    notes = said(num_labels=count)
    assert "config.json: `num_labels`" in notes.unused
    (notice,) = notes.notices
    assert f"`num_labels` is {count!r} and `id2label` names 3 classes" in notice
    assert "write `num_labels: 3`, or leave it out" in notice


def test_a_number_of_labels_that_agrees_or_stands_alone_is_used(said: Said) -> None:
    notes = said(num_labels=3)
    assert "config.json: `num_labels`" not in notes.unused
    assert notes.notices == []
    with pytest.raises(Refusal, match="another shape"):
        said(id2label=None, num_labels=7)


def test_transformers_trains_each_problem_with_the_loss_that_the_notice_names() -> None:
    losses = Path(transformers.__file__).with_name("loss") / "loss_utils.py"
    text = losses.read_text()
    for problem, loss in (("regression", "MSELoss"), ("multi_label_classification", "BCEWithLogitsLoss")):
        assert loss in text[text.index(f'== "{problem}"') :][:200]
