"""Small files that declare, or become, any number of bytes: refused by their sizes, before memory or disk is taken."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from catalog.requests.assignment import read_assignment
from catalog.requests.data_sources import DataFile
from catalog.requests.inputs import DirectoryModel, HuggingFaceData, SyntheticData, Task
from engine.errors import BrokenFactors, StopRequested
from engine.factors.factor_index import FORMAT, INDEX, read_index
from engine.memory.budget import resident_bytes
from worker.execution.__main__ import execute
from worker.execution.attempt import StopFlag
from worker.execution.data import file, huggingface, synthetic
from worker.execution.data.stream import DataRequest
from worker.execution.files.artifact_files import find_factors
from worker.execution.files.matrix_file import MatrixFile
from worker.execution.files.open_files import OpenFolder
from worker.execution.frame_pipe import FramePipe
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.loader_context import LoaderContext
from worker.execution.models.checkpoint import load
from worker.execution.refusal import Refusal

MB = 10**6
BYTES = LoadedModel(model=torch.nn.Linear(3, 2), vocabulary=Vocabulary(size=256, max_length=16, tokenizer=None))
PLAIN = LoadedModel(model=torch.nn.Linear(3, 2))
LARGE = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 60,
    "num_attention_heads": 64, "vocab_size": 128_256, "max_position_embeddings": 4096,
}  # fmt: skip
NUMBERS = 60 * (4 * 8192**2 + 3 * 8192 * 28_672) + 2 * 128_256 * 8192


def sparse(path: Path, **shapes: list[int]) -> Path:
    """A safetensors file of zeros that takes a page of the disk."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + offset)
    assert path.stat().st_blocks * 512 < 64 * 1024
    return path


@contextlib.contextmanager
def refused(said: str) -> Iterator[pytest.ExceptionInfo[Refusal]]:
    """Require a refusal that comes soon, and with little memory."""
    before, began = resident_bytes(), time.monotonic()
    with pytest.raises(Refusal, match=said) as found:
        yield found
    assert found.value.category == "usage"
    assert found.value.code == "budget_exceeded"
    assert resident_bytes() - before < 150 * MB
    assert time.monotonic() - began < 10


def model_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(LARGE))
    sparse(folder / "model.safetensors", w=[NUMBERS])
    return folder


def test_a_model_is_refused_by_its_config_before_it_is_built(tmp_path: Path) -> None:
    source = DirectoryModel(source="directory", path=str(model_folder(tmp_path)))
    context = LoaderContext(store=tmp_path, most_bytes=8 * 2**30)
    with refused(r"config\.json describes a model of"):
        load(source, Task(type="causal_lm"), context)


def test_a_head_that_no_closed_form_counts_is_counted(tmp_path: Path) -> None:
    small = {"hidden_size": 65_536, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
             "vocab_size": 8, "max_position_embeddings": 8, "head_dim": 1, "num_labels": 100_000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(LARGE | small))
    sparse(tmp_path / "model.safetensors", w=[10**8])
    source = DirectoryModel(source="directory", path=str(tmp_path))
    with refused(r"config\.json describes a model of 2[45]"):
        load(source, Task(type="sequence_classification"), LoaderContext(store=tmp_path, most_bytes=8 * 2**30))


def test_many_stages_of_many_layers_are_too_many(tmp_path: Path) -> None:
    config = {"model_type": "resnet", "hidden_sizes": [8] * 64, "depths": [1024] * 64, "layer_type": "basic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = DirectoryModel(source="directory", path=str(tmp_path))
    with pytest.raises(Refusal, match="`depths` are 65,536 layers together"):
        load(source, Task(type="classification"), LoaderContext(store=tmp_path))


def test_a_job_that_names_no_budget_has_that_of_the_machine(tmp_path: Path) -> None:
    document = {
        "kind": "capacity",
        "model": {"source": "directory", "path": str(model_folder(tmp_path))},
        "data": {"source": "builtin", "name": "english"},
        "task": {"type": "causal_lm"},
    }
    given = {
        "document": document, "artifacts": str(tmp_path / "artifacts"), "store": str(tmp_path / "store"),
        "scratch": str(tmp_path / "scratch"), "allowed": {"directories": ["*"]}, "threads": 1,
    }  # fmt: skip
    with (tmp_path / "frames").open("wb") as frames, refused(r"describes a model of"):
        execute(read_assignment(json.dumps(given).encode()), FramePipe(os.dup(frames.fileno())), StopFlag())


def request(folder: Path, loaded: LoadedModel = BYTES, most_bytes: int = 20 * MB) -> DataRequest:
    context = LoaderContext(store=folder / "store", most_bytes=most_bytes)
    return DataRequest(task=Task(type="causal_lm"), loaded=loaded, batch_size=4, seed=0, context=context)


def repeated(path: Path, compression: str) -> None:
    """A column of 106 texts of 2 MB each in some kB."""
    text = pa.array(["x" * 2 * MB] * 106)
    pyarrow.parquet.write_table(pa.table({"text": text}), path, compression=compression)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("compression", ["snappy", "zstd"])
def test_a_table_that_unpacks_to_212_mb_is_counted_and_leaves_nothing(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "train.parquet"
    repeated(path, compression)
    assert path.stat().st_size < 200_000
    source = HuggingFaceData(source="huggingface", id=str(path))
    with refused(r"take more than the|needs more than 128 MiB"):
        huggingface.load(source, request(tmp_path))
    assert not (tmp_path / "store").exists()


def test_a_list_of_lists_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text('[{"text": [' + "[]," * 10**6 + "[]]}]")
    with refused("take more than the"):
        huggingface.load(HuggingFaceData(source="huggingface", id=str(path)), request(tmp_path))


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_texts_are_counted_while_they_are_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data.{suffix}"
    line = "x" * 500_000 if suffix == "txt" else json.dumps({"text": "x" * 500_000})
    path.write_text(f"{line}\n" * 50)
    with refused(r"take more than the 19\.1 MiB"):
        file.load(DataFile(source="file", path=str(path)), request(tmp_path))
    assert file.load(DataFile(source="file", path=str(path), limit=30), request(tmp_path)).examples == 30


def test_a_job_can_be_stopped_while_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("x\n" * 5_000)
    asked = request(tmp_path)

    def stop() -> None:
        raise StopRequested

    object.__setattr__(asked.context, "checkpoint", stop)
    with pytest.raises(StopRequested):
        file.load(DataFile(source="file", path=str(path)), asked)


def test_a_single_row_of_gigabytes_is_refused_by_the_header(tmp_path: Path) -> None:
    path = sparse(tmp_path / "data.safetensors", inputs=[1, 10**9])
    with refused("take more than the"):
        file.load(DataFile(source="file", path=str(path)), request(tmp_path, PLAIN))


def test_a_matrix_of_gigabytes_is_refused_by_the_header(tmp_path: Path) -> None:
    path = sparse(tmp_path / "m.safetensors", m=[40_000, 40_000])
    with refused(r"has a triangle of 2\.98 GiB"):
        MatrixFile(path, None, lambda *_: None, most_bytes=10**9)


def test_factors_of_gigabytes_are_refused_by_their_size(tmp_path: Path) -> None:
    (tmp_path / "factors.index.json").write_text("{}")
    sparse(tmp_path / "0.safetensors", activation_covariance=[10**9])
    stored = find_factors(OpenFolder.by_itself(tmp_path, "/factors"), "/factors", 10**9)
    with refused(r"0\.safetensors has 3\.73 GiB"):
        stored.load_tensors("factors/0.safetensors")


@pytest.mark.parametrize("shapes_only", [False, True])
def test_synthetic_data_are_held_against_the_jobs_memory_before_a_number_is_drawn(
    tmp_path: Path, *, shapes_only: bool
) -> None:
    source = SyntheticData(source="synthetic", shape=(2**28,), examples=8)
    context = LoaderContext(store=tmp_path, most_bytes=8 * 2**30, shapes_only=shapes_only)
    asked = DataRequest(task=Task(type="regression"), loaded=PLAIN, batch_size=4, seed=0, context=context)
    with refused(r"a batch takes 16 GiB \(1 GiB for each example\)"):
        synthetic.load(source, asked)


@pytest.mark.parametrize("table", ["layers", "declared", "parameters"])
def test_a_name_of_megabytes_in_an_index_is_refused_by_its_length(tmp_path: Path, table: str) -> None:
    index = {"format": FORMAT, "layers": [], table: [{"name": "x" * 13 * MB}]}
    (tmp_path / "factors.index.json").write_text(json.dumps(index))
    stored = find_factors(OpenFolder.by_itself(tmp_path, "/factors"), "/factors", 10**9)
    with pytest.raises(BrokenFactors, match=rf"`{table}/0/name` has 13,000,000 characters; at most 4,096") as found:
        read_index(stored.load_json(INDEX))
    assert len(str(found.value)) < 500
