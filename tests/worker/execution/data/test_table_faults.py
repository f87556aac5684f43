"""Faults of tables and tensor files: one line that says what was found, and what to do; and types that are none."""

import datetime as dt
import hashlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
from torch import nn

from catalog.requests.data_sources import DataFile
from catalog.requests.inputs import HuggingFaceData
from worker.execution.data import file, huggingface
from worker.execution.data.labels import Labels
from worker.execution.data.stream import DataRequest
from worker.execution.data.table_files import read_columns
from worker.execution.factor_cache import enter_tree
from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.refusal import Refusal

HEAD = b"text,label\nab,1\n"
CSV = "give a header and as many fields in every row, and quote texts that hold commas or line breaks"
PARQUET = r"give an intact parquet file, or name a file of another kind by its own suffix \(\.csv, \.jsonl\)"
FAULTS = {
    "a short row": ("a.csv", HEAD + b"ab\n", f"Row #3: Expected 2 columns, got 1: ab; {CSV}"),
    "a long row": ("a.csv", HEAD + b"ab,1,2\n", f"Row #3: Expected 2 columns, got 3: ab,1,2; {CSV}"),
    "an open quote": ("a.csv", HEAD + b'"a b,1\nc,2\n', rf'Row #3: .*got 1: "a b,1 c,2; {CSV}'),
    "no header": ("a.csv", b"", f"Empty CSV file; {CSV}"),
    "no parquet": ("a.parquet", b"PAR1" + b"x" * 20, f"not a parquet file; {PARQUET}"),
    "nothing": ("a.parquet", b"", f"; {PARQUET}"),
    "a file cut short": ("a.parquet", b"PAR1xxxxxxx\x01\0\0\0PAR1", f"; {PARQUET}"),
}
BYTES = LoadedModel(model=nn.Linear(3, 2), vocabulary=Vocabulary(size=256, max_length=16, tokenizer=None))


@pytest.fixture
def read(request_for: Callable[..., Any]) -> Callable[[Path], Any]:
    def load(path: Path, task: str = "sequence_classification") -> Any:
        return file.load(DataFile(source="file", path=str(path)), request_for(BYTES, task))

    return load


@pytest.mark.parametrize("kind", FAULTS)
def test_a_table_that_cannot_be_read_has_a_remedy_in_one_line(
    tmp_path: Path, read: Callable[[Path], Any], kind: str
) -> None:
    name, content, said = FAULTS[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refusal, match=said + "$") as refused:
        read(tmp_path / name)
    assert refused.value.code == "wrong_format"
    assert refused.value.message.splitlines() == [refused.value.message]
    assert refused.value.message.count("; ") == 1


def test_a_file_without_inputs_says_what_it_holds(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    safetensors.torch.save_file({"targets": torch.zeros(3)}, tmp_path / "a.safetensors")
    said = (
        "holds no `inputs`, only `targets`; save the inputs beside them as `inputs`, or under the names of the model's"
    )
    with pytest.raises(Refusal, match=said) as refused:
        read(tmp_path / "a.safetensors")
    assert refused.value.code == "empty_data"


LISTS = [[1, 0], [2, 1], [0, 0]]
DECIMALS = [Decimal("0.10"), None, Decimal("-3.25")]
TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "fixed": (pa.list_(pa.int8(), 2), LISTS),
    "large": (pa.large_list(pa.int8()), LISTS),
    "view": (pa.list_view(pa.string()), [["a"], [], None]),
    "decimal": (pa.decimal128(20, 2), DECIMALS),
    "wide": (pa.decimal256(76, 0), [Decimal(10) ** 75, Decimal(2**53 + 1), Decimal(0)]),
    "decimals": (pa.list_(pa.decimal128(5, 1), 1), [[Decimal("1.5")], [None], [Decimal("2.0")]]),
}


def parquet(path: Path, **columns: Any) -> Path:
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


def test_lists_of_each_kind_and_decimals_are_their_values(tmp_path: Path, request_for: Callable[..., Any]) -> None:
    arrays = {name: pa.array(values, found) for name, (found, values) in TYPES.items()}
    parquet(tmp_path / "a.parquet", **arrays)
    opened = OpenFolder.by_itself(tmp_path, "/data/path").file("a.parquet")
    assert isinstance(opened, OpenFile)
    labels = Labels(column="", request=request_for(BYTES, "masked_lm"), pointer="/data/path")
    found = read_columns(opened, "", {name: name for name in TYPES}, None, labels, "/data/path").columns
    expected = [
        LISTS,
        LISTS,
        [["a"], [], None],
        [0.1, None, -3.25],
        [10**75, 2**53 + 1, 0],
        [[1.5], [None], [2]],
    ]
    assert found == expected
    assert [type(each) for each in found[4]] == [int, int, int]


T = ["ab", "cd"]
DAY = pa.array([dt.date(2020, 1, 2), dt.date(2021, 1, 2)])
THIRDS = pa.array([Decimal("0." + "3" * 20), Decimal(1)], pa.decimal128(30, 20))
CAST = r"; texts, numbers and their lists are read: cast its values to string with pyarrow \(`column.cast\(...\)`\)$"
FIELDS = pa.array([{f"field{number}": 1 for number in range(100)}] * 2)
NUMBER = r"write it as a number, or leave out the row"
COLUMNS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a date": ("sequence_classification", {"text": DAY, "label": [0, 1]}, r"column `text` holds date32\[day\]" + CAST),
    "bytes": ("sequence_classification", {"text": [b"a", b"b"], "label": [0, 1]}, "column `text` holds binary" + CAST),
    "a part": (
        "regression",
        {"text": T, "label": FIELDS},
        r"`label` holds struct<field0.*; texts, .* read: write the part of it that is meant as a column$",
    ),
    "a decimal": (
        "regression",
        {"text": T, "label": THIRDS},
        r"`label` holds 0\.3{20}, which float64 would round to 0\.3{16}; .* \(`column\.cast\('float64'\)`\)$",
    ),
    "a flag": ("regression", {"text": T, "label": [True, False]}, r"must be a number \(got True\); write 0 and 1$"),
    "no score": ("regression", {"text": T, "label": [0.5, None]}, rf"row 1: .* \(got None\); {NUMBER}$"),
    "no class": (
        "sequence_classification",
        {"text": T, "label": [0, None]},
        rf"row 1: .* \(got None\); {NUMBER}, or write -100, which is not counted$",
    ),
    "several": (
        "sequence_classification",
        {"text": T, "label": [[0.5, 1.0]] * 2},
        r"\(got \[0\.5, 1\.0\]\); several numbers in place of one come as `targets` of a `\.safetensors` file",
    ),
    "no text": (
        "sequence_classification",
        {"text": ["ab", None], "label": [0, 1]},
        r"row 1: `text` must be a string \(got None\); leave out the row, or write its text",
    ),
    "a long score": ("regression", {"text": T, "label": [2**53 + 1, 1]}, "float64 holds .*; write 9007199254740992 if"),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_value_that_cannot_be_read_has_a_remedy(tmp_path: Path, read: Callable[..., Any], kind: str) -> None:
    task, columns, said = COLUMNS[kind]
    with pytest.raises(Refusal, match=said):
        read(parquet(tmp_path / "a.parquet", **columns), task)


def test_the_remedies_are_ones(tmp_path: Path, read: Callable[..., Any]) -> None:
    path = tmp_path / "a.parquet"
    dates, thirds = pa.chunked_array([DAY]).cast("string"), pa.chunked_array([THIRDS]).cast("float64")
    ((_, targets, _),) = read(parquet(path, text=dates, label=thirds), "regression").batches()
    assert targets.tolist() == [1 / 3, 1.0]
    ((_, targets, _),) = read(parquet(path, text=T, label=[-100, 1])).batches()
    assert targets.tolist() == [-100, 1]


def test_a_column_of_labels_that_is_not_read_may_be_of_any_type(tmp_path: Path, read: Callable[..., Any]) -> None:
    assert read(parquet(tmp_path / "a.parquet", text=T, label=DAY), "causal_lm").examples == 2


def test_a_header_with_a_blank_is_named_as_it_is(
    tmp_path: Path, read: Callable[..., Any], request_for: Callable[..., Any]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text, label\nab, 1\n")
    with pytest.raises(Refusal, match=r"needs a column of tags or labels; name it, of `text`, ` label`") as refused:
        read(path)
    assert refused.value.pointer == "/data/label_key"
    asked = request_for(BYTES, "sequence_classification")
    named = file.load(DataFile(source="file", path=str(path), label_key=" label"), asked)
    assert [chunk[1].tolist() for chunk in named.batches()] == [[1]]
    with pytest.raises(Refusal, match="of `text`, ` label`") as refused:
        huggingface.load(HuggingFaceData(source="huggingface", id=str(path), input_column="text"), asked)
    assert refused.value.pointer == "/data/target_column"


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_scores_are_those_of_the_file_in_float64_and_in_float32_where_that_holds_them(
    tmp_path: Path, request_for: Callable[..., DataRequest], suffix: str
) -> None:
    def targets(scores: list[float]) -> torch.Tensor:
        path = tmp_path / f"a.{suffix}"
        rows = [f'{{"text": "ab", "label": {score!r}}}' for score in scores]
        path.write_text(
            "\n".join(rows if suffix == "jsonl" else ["text,label", *(f"ab,{score!r}" for score in scores)])
        )
        stream = file.load(DataFile(source="file", path=str(path)), request_for(BYTES, "regression"))
        assert stream.labels is not None
        ((labels, places),) = stream.labels()
        assert places.tolist() == list(range(len(scores)))
        batches = torch.cat([chunk[1] for chunk in stream.batches()])
        assert torch.equal(labels, batches)
        assert labels.dtype == batches.dtype
        return batches

    def digest(tensor: torch.Tensor) -> str:
        made = hashlib.sha256()
        enter_tree(made, tensor)
        return made.hexdigest()

    exact = [0.5, 3, -0.0, 2.0**-149, 1.5, 2]
    rounded = [0.1, 16777217, 5e-324, 1.0, 2**53, 3.25]
    assert digest(targets(exact)) == digest(torch.tensor(exact, dtype=torch.float32))
    assert digest(targets(rounded)) == digest(torch.tensor(rounded, dtype=torch.float64))
    assert targets(rounded).tolist() == rounded
