"""Names of classes: one text among the model's own names makes every other text one of them, or an error."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
from torch import nn

from catalog.requests.data_sources import DataFile
from catalog.requests.inputs import HuggingFaceData, Task
from worker.execution.data import file, huggingface
from worker.execution.data.apart import table_program
from worker.execution.data.stream import DataRequest
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal

UNNAMED = ("LABEL_0", "LABEL_1", "LABEL_2")
BYTES = Vocabulary(size=256, max_length=16, tokenizer=None)


@pytest.mark.parametrize("other", ["label_1", "pos", "LABEL_3", "1"])
def test_a_text_beside_the_models_own_names_is_refused(tmp_path: Path, context: LoaderContext, other: str) -> None:
    path = tmp_path / "rows.jsonl"
    labels = ("LABEL_0", other, "LABEL_2")
    path.write_text("".join(json.dumps({"text": "ab", "label": label}) + "\n" for label in labels))
    loaded = LoadedModel(model=nn.Linear(3, 3), vocabulary=BYTES, class_names=UNNAMED)
    request = DataRequest(
        task=Task(type="sequence_classification"), loaded=loaded, batch_size=8, seed=0, context=context
    )
    said = rf"line 2: `label` is `{other}`, and the model's classes are `LABEL_0`, `LABEL_1`, `LABEL_2`"
    with pytest.raises(Refusal, match=rf"{said} .*; write one of these, or their numbers"):
        file.load(DataFile(source="file", path=str(path)), request)


NAMED = ("neg", "neu", "pos")
CLASSES = datasets.ClassLabel(names=["pos", "neu", "neg"])


def read_table(
    source: str, table: Any, classes: tuple[str, ...], folder: Path, context: LoaderContext, monkeypatch: Any
) -> tuple[list[int], list[str], dict[str, Any]]:
    """Read a table of texts through one of the three doors; return its targets, and what was said and recorded."""
    notices: list[str] = []
    record: dict[str, Any] = {}
    loaded = LoadedModel(model=nn.Linear(3, 3), vocabulary=BYTES, class_names=classes)
    own = replace(context, note=notices.append, describe=record.__setitem__)
    request = DataRequest(task=Task(type="sequence_classification"), loaded=loaded, batch_size=8, seed=0, context=own)
    table.to_parquet(str(folder / "train.parquet"))
    if source == "file":
        stream = file.load(DataFile(source="file", path=str(folder / "train.parquet")), request)
    else:
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
        place = str(folder) if source == "folder" else "owner/table"
        named = HuggingFaceData(source="huggingface", id=place, input_column="text", target_column="label")
        stream = huggingface.load(named, request)
    return [int(each) for _, targets, _ in stream.batches() for each in targets], notices, record


def table_of(labels: list[int], feature: Any) -> Any:
    features = datasets.Features({"text": datasets.Value("string"), "label": feature})
    return datasets.Dataset.from_dict({"text": ["ab"] * len(labels), "label": labels}, features=features)


@pytest.mark.parametrize("source", ["file", "folder", "hub"])
@pytest.mark.parametrize("classes", [NAMED, ("NEG", "NEU", "Pos"), UNNAMED, CLASSES.names])
def test_numbers_that_a_schema_names_go_by_their_names(
    source: str, classes: Any, tmp_path: Path, context: LoaderContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is the library's own reading of each number."""
    given = [0, 2, 1, 0]
    found, notices, record = read_table(
        source, table_of(given, CLASSES), tuple(classes), tmp_path, context, monkeypatch
    )
    own = [name.lower() for name in classes]
    expected = given if classes is UNNAMED else [own.index(CLASSES.int2str(number)) for number in given]
    assert found == expected
    if classes is not UNNAMED:
        assert record["labels"]["numbers"] == {CLASSES.int2str(a): b for a, b in zip(given, expected, strict=True)}
    assert len(notices) == (expected != given)


@pytest.mark.parametrize("source", ["file", "hub"])
def test_numbers_whose_names_the_model_does_not_know_are_refused(
    source: str, tmp_path: Path, context: LoaderContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    stars = ("1 star", "2 stars", "3 stars")
    with pytest.raises(Refusal, match=r"`label` has the class `pos` by the file's schema, .* `1 star`, `2 stars`"):
        read_table(source, table_of([2, 0], CLASSES), stars, tmp_path, context, monkeypatch)
    # a class that no row has needs no name in the model
    found, *_ = read_table(source, table_of([2], CLASSES), ("bad", "neg"), tmp_path, context, monkeypatch)
    assert found == [1]


def test_files_that_number_their_classes_differently_are_refused(
    tmp_path: Path, context: LoaderContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = datasets.ClassLabel(names=["neg", "neu", "pos"])
    table_of([0], other).to_parquet(str(tmp_path / "train-2.parquet"))
    with pytest.raises(Refusal, match="the schemas of two files give the classes of `label` different names"):
        read_table("folder", table_of([0], CLASSES), NAMED, tmp_path, context, monkeypatch)


def test_tags_that_a_schema_names_go_by_their_names(tmp_path: Path) -> None:
    features = datasets.Features({"tags": datasets.List(CLASSES), "text": datasets.Value("string")})
    table = datasets.Dataset.from_dict({"tags": [[0, 2]], "text": ["a b"]}, features=features)
    table.to_parquet(str(tmp_path / "tags.parquet"))
    schema = pyarrow.parquet.read_schema(tmp_path / "tags.parquet")
    assert table_program.class_names(schema) == {"tags": CLASSES.names}
    assert huggingface.class_names(table.features["tags"]) == CLASSES.names
