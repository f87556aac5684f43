"""Two columns of usual names for one thing: read where they agree, refused with the remedy where a row differs."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from torch import nn

from catalog.requests.data_sources import DataFile
from worker.execution.data import file
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.refusal import Refusal

BYTES = Vocabulary(size=256, max_length=16, tokenizer=None)
For = Callable[..., Any]
Row = dict[str, Any]


def written(folder: Path, suffix: str, rows: list[Row]) -> Path:
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.fixture
def targets(tmp_path: Path, request_for: For) -> Callable[..., Any]:
    def read(rows: list[Row], suffix: str = ".jsonl", task: str = "sequence_classification", **more: Any) -> Any:
        asked = request_for(LoadedModel(model=nn.Linear(3, 2), vocabulary=BYTES), task)
        source = DataFile(source="file", path=str(written(tmp_path, suffix, rows)), **more)
        ((_, found, _),) = file.load(source, asked).batches()
        return found.tolist()

    return read


def labelled(other: str, *values: Any) -> list[Row]:
    return [{"text": "ab", "label": place % 2, other: value} for place, value in enumerate(values)]


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("other", ["labels", "target", "Targets"])
def test_two_labels_that_differ_in_a_row_are_refused(targets: Callable[..., Any], suffix: str, other: str) -> None:
    rows = labelled(other, 0, 1, 1)
    said = rf"`label` is '?0'? and `{other}` is '?1'?, and either .*; name the one to read \(`data\.label_key: label`\)"
    where = r"line 3: " if suffix == ".jsonl" else r"row 2: "
    with pytest.raises(Refusal, match=where + said) as refused:
        targets(rows, suffix)
    assert refused.value.code == "ambiguous_fields"
    assert targets(rows, suffix, label_key="label") == [0, 1, 0]
    assert targets(rows, suffix, label_key=other) == [0, 1, 1]
    assert targets(rows, suffix, limit=2) == [0, 1]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_two_labels_that_agree_are_read(targets: Callable[..., Any], suffix: str) -> None:
    assert targets(labelled("labels", 0, 1, 0), suffix) == [0, 1, 0]


def test_a_label_that_is_missing_beside_another_is_not_another_reading(targets: Callable[..., Any]) -> None:
    rows = labelled("labels", 0, None, "0")
    assert targets(rows) == [0, 1, 0]
    del rows[0]["labels"]
    assert targets(rows) == [0, 1, 0]


def test_labels_that_the_task_does_not_read_may_differ(targets: Callable[..., Any]) -> None:
    targets(labelled("labels", 1, 1), task="causal_lm")


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("task", ["sequence_classification", "causal_lm"])
def test_two_texts_that_differ_in_a_row_are_refused(targets: Callable[..., Any], suffix: str, task: str) -> None:
    rows: list[Row] = [{"text": "ab", "sentence": "ab", "label": 1}, {"text": "ab", "sentence": "x" * 99, "label": 0}]
    said = r"`text` is 'ab' and `sentence` is 'x{20,40}.*; name the one to read \(`data\.text_key: text`\)"
    with pytest.raises(Refusal, match=said):
        targets(rows, suffix, task)
    targets(rows[:1], suffix, task)
    targets(rows, suffix, task, text_key="text")


def test_a_column_that_cannot_be_a_text_or_label_is_not_another_reading(targets: Callable[..., Any]) -> None:
    rows: list[Row] = [{"text": "ab", "sentence": place, "label": place, "target": b"ab"} for place in range(2)]
    assert targets(rows, ".parquet") == [0, 1]
