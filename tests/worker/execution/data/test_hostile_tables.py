"""Hostile tables: small files that would take gigabytes or minutes, each refused with a figure, in little of both.

Memory is that of real processes: the high-water mark of this one, and of the processes that read for it.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from catalog.requests.data_sources import DataFile
from catalog.requests.inputs import HuggingFaceData, Task
from engine.memory.budget import status_bytes
from worker.execution.data import byte_count, file, huggingface
from worker.execution.data.byte_count import ByteCount
from worker.execution.data.labels import Labels
from worker.execution.data.stream import DataRequest
from worker.execution.data.table_files import read_columns
from worker.execution.files.open_files import OpenFile, OpenFolder
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.loader_context import LoaderContext
from worker.execution.refusal import Refusal

pytestmark = pytest.mark.real_programs

MIB = 2**20
GIB = 2**30
BYTES = LoadedModel(model=torch.nn.Linear(3, 2), vocabulary=Vocabulary(size=256, max_length=16, tokenizer=None))


def one_value(path: Path, size: int, rows: int) -> None:
    """A dictionary of one text."""
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, dtype="int32")), pa.array(["x" * size]))
    pyarrow.parquet.write_table(
        pa.table({"text": column}), path, compression="zstd", dictionary_pagesize_limit=GIB, write_statistics=False
    )


def one_page(codec: str) -> Callable[[Path], None]:
    """A page that unpacks to 160 MB."""

    def write(path: Path) -> None:
        table = pa.table({"text": ["x" * 160 * 10**6]})
        pyarrow.parquet.write_table(table, path, compression=codec, use_dictionary=False, write_statistics=False)

    return write


def one_list(path: Path) -> None:
    """A row of twenty million entries that are null."""
    count = 20 * 10**6
    column = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.nulls(count, pa.string()))
    pyarrow.parquet.write_table(pa.table({"text": column}), path, compression="zstd")


def prefixes(path: Path) -> None:
    """Texts that are each the one before, and a letter."""
    texts = [f"{'x' * 2 * 10**6}{number}" for number in range(100)]
    pyarrow.parquet.write_table(
        pa.table({"text": texts}),
        path,
        use_dictionary=False,
        column_encoding="DELTA_BYTE_ARRAY",
        write_statistics=False,
    )


def declared_page(path: Path) -> None:
    """A page that says that it unpacks to two GiB."""
    pyarrow.parquet.write_table(pa.table({"text": ["abc", "def"] * 50}), path, compression="snappy")
    content = path.read_bytes()
    # thrift: field 1 is the kind of page, field 2 the size, a varint; the file's first page is behind its magic
    assert content[4:7] == b"\x15\x04\x15"
    size = content[7:9] if content[7] & 128 else content[7:8]
    declared = b"\xfe\xff\xff\xff\x0f"
    path.write_bytes(content[:7] + declared + content[7 + len(size) :])


PARQUET: dict[str, Callable[[Path], None]] = {
    "a dictionary of 100 MB": lambda path: one_value(path, 100 * 10**6, 100),
    "a value of 1 MB in a thousand rows": lambda path: one_value(path, 10**6, 1_000),
    **{f"a page in {codec}": one_page(codec) for codec in ("snappy", "zstd", "gzip", "lz4", "brotli")},
    "a list of nulls": one_list,
    "prefixes": prefixes,
}


def request(folder: Path, most_bytes: int = 8 * GIB) -> DataRequest:
    context = LoaderContext(store=folder / "store", most_bytes=most_bytes)
    return DataRequest(task=Task(type="causal_lm"), loaded=BYTES, batch_size=4, seed=0, context=context)


@contextlib.contextmanager
def watched() -> Iterator[list[int]]:
    """The high-water marks of this process beyond what it holds, and of a process that reads for it."""
    before, apart, ended = psutil.Process().memory_info().rss, [0], threading.Event()
    # 5: the mark begins anew at what is held
    Path("/proc/self/clear_refs").write_text("5")

    def watch() -> None:
        while not ended.wait(0.002):
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error, OSError, ValueError, KeyError):
                    if "worker.execution.data.apart.table_program" in child.cmdline():
                        fields = dict(
                            line.split(":", 1) for line in Path(f"/proc/{child.pid}/status").read_text().splitlines()
                        )
                        apart.append(1024 * int(fields["VmHWM"].split()[0]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    found = list[int]()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
    found += [status_bytes("VmHWM") - before, max(apart)]


def load(path: Path) -> None:
    """Read a file as a job of 8 GiB does."""
    if path.suffix == ".txt":
        file.load(DataFile(source="file", path=str(path)), request(path.parent))
    else:
        huggingface.load(HuggingFaceData(source="huggingface", id=str(path)), request(path.parent))


def refused(path: Path, said: str) -> Refusal:
    """Require a refusal within the bounds."""
    began = processor_seconds()
    with watched() as marks, pytest.raises(Refusal, match=said) as found:
        load(path)
    assert processor_seconds() - began < 10
    assert sum(marks) < 512 * MIB
    assert found.value.category == "usage"
    return found.value


def processor_seconds() -> float:
    """Seconds of this process and of those that have ended."""
    return sum(os.times()[:4])


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("name", PARQUET)
def test_a_parquet_file_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "train.parquet"
    PARQUET[name](path)
    assert path.stat().st_size < 8 * MIB
    assert refused(path, r"needs more than 128 MiB|more than the 128 MiB").code == "budget_exceeded"


def test_a_page_that_declares_two_gib_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    declared_page(path)
    refused(path, r"cannot be read as parquet")


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("header.csv", b"a," * 100_000 + b"text\n", r"100,001 columns; at most 20,000"),
        ("field.csv", b"text\n" + b"x" * 16 * MIB, "cannot be read as csv"),
        ("quoted.csv", b'text\n"' + b"x\n" * 8 * MIB, "cannot be read as csv"),
        ("nested.json", b'[{"text": [' + b"[]," * 3 * MIB + b"[]]}]", "more than the 128 MiB"),
        ("line.jsonl", b'{"text": "a", "more": [' + b"[]," * 3 * MIB + b"[]]}", "more than the 128 MiB"),
        ("long.jsonl", b'{"text": "' + b"x" * 17 * MIB + b'"}', "longer than 16,777,216 bytes"),
    ],
)  # fmt: skip
def test_a_text_file_that_becomes_much_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    refused(path, said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a\n" * (MIB // 4), r"more than the 8 MiB"),
        (("\U0001f600" + "x" * 10**6 + "\n").encode() * 10, r"more than the 38\.1 MiB that 9\.54 MiB"),
    ],
    ids=["short lines", "letters of four bytes"],
)
def test_lines_are_counted_as_they_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, said: str
) -> None:
    monkeypatch.setattr(byte_count, "_FILE_BYTES", 8 * MIB)
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    refused(path, said)


def columns(path: Path, names: list[str]) -> list[list[object]]:
    opened = OpenFolder.by_itself(path.parent, "/data/id").file(path.name)
    assert isinstance(opened, OpenFile)
    fields = dict(zip(("input_column", "target_column", "pair_column"), names, strict=False))
    labels = Labels(column=names[-1], request=request(path.parent), pointer="/data/id")
    return read_columns(opened, "train", fields, None, labels, "/data/id").columns


def test_values_are_those_of_the_library(tmp_path: Path) -> None:
    texts = ["a", "ü\n\0", "\U0001f600", "x" * 5 * MIB, ""] * 3 + [None]
    labels = [0, -(2**63), 2**63 - 1, 7] * 4
    tags = [["a", "b"], [], None, ["c"]] * 4
    path = tmp_path / "train.parquet"
    table = pa.table({"text": texts, "label": labels, "tags": tags})
    pyarrow.parquet.write_table(table, path, row_group_size=5)
    assert columns(path, ["text", "label", "tags"]) == [texts, labels, tags]


def test_a_list_is_read_row_by_row_wherever_its_parts_are_cut(tmp_path: Path) -> None:
    rows = [{"text": "x" * (number * 7_919 % 5_000), "label": number} for number in range(400)]
    path = tmp_path / "train.json"
    path.write_text(json.dumps(rows, indent=1))
    assert columns(path, ["text", "label"]) == [[row["text"] for row in rows], [row["label"] for row in rows]]
    for broken in ("[{} {}]", "[{},]", "[{}] x", "[{}", "[,{}]", '[{"text": "a", "text": "b"}]'):
        path.write_text(broken.replace("{}", '{"text": "a"}'))
        with pytest.raises(Refusal, match="cannot be read as json"):
            columns(path, ["text"])
    path.write_text("[ ]")
    assert columns(path, ["text"]) == [[]]


def test_values_of_a_larger_file_may_take_more(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    with path.open("wb") as stream:
        stream.truncate(100 * MIB)
    count = ByteCount(most_bytes=GIB)
    count.allow_file(path)
    count.add(400 * MIB)
    with pytest.raises(Refusal, match=r"400\.? ?0? ?MiB that 100\.? ?0? ?MiB of files"):
        count.add(1)
