"""Faults of tables and tensor files: one line that says what was found, and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from catalog.requests.data_sources import DataFile
from worker.execution.data import file
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


@pytest.fixture
def read(request_for: Callable[..., Any]) -> Callable[[Path], None]:
    loaded = LoadedModel(model=nn.Linear(3, 2), vocabulary=Vocabulary(size=256, max_length=16, tokenizer=None))

    def load(path: Path) -> None:
        file.load(DataFile(source="file", path=str(path)), request_for(loaded, "sequence_classification"))

    return load


@pytest.mark.parametrize("kind", FAULTS)
def test_a_table_that_cannot_be_read_has_a_remedy_in_one_line(
    tmp_path: Path, read: Callable[[Path], None], kind: str
) -> None:
    name, content, said = FAULTS[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refusal, match=said + "$") as refused:
        read(tmp_path / name)
    assert refused.value.code == "wrong_format"
    assert refused.value.message.splitlines() == [refused.value.message]
    assert refused.value.message.count("; ") == 1


def test_a_file_without_inputs_says_what_it_holds(tmp_path: Path, read: Callable[[Path], None]) -> None:
    safetensors.torch.save_file({"targets": torch.zeros(3)}, tmp_path / "a.safetensors")
    said = (
        "holds no `inputs`, only `targets`; save the inputs beside them as `inputs`, or under the names of the model's"
    )
    with pytest.raises(Refusal, match=said) as refused:
        read(tmp_path / "a.safetensors")
    assert refused.value.code == "empty_data"
