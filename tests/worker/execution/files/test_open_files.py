"""Links out of an allowed folder, and what is no file: nothing of it is read, for any input that a job names."""

import gc
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from catalog import open_beneath
from catalog.requests.data_sources import DataFile
from catalog.requests.inputs import DirectoryModel, HuggingFaceData, Task
from worker.execution.data import file, huggingface
from worker.execution.data.stream import DataRequest
from worker.execution.failures import failure_of
from worker.execution.files import open_files
from worker.execution.files.artifact_files import find_factors
from worker.execution.files.open_files import OpenFile, OpenFolder, open_allowed
from worker.execution.loaded_model import LoadedModel, Vocabulary
from worker.execution.loader_context import LoaderContext
from worker.execution.models.checkpoint import load
from worker.execution.refusal import Refusal

SECRET = "password-of-the-database"
BYTES = LoadedModel(model=torch.nn.Linear(3, 2), vocabulary=Vocabulary(size=256, max_length=16, tokenizer=None))
NO_SUCH_CALL = 9_999
WAYS = ["one call of the kernel", "component by component"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to open; the kernel really answers ENOSYS to the second."""
    if request.param == WAYS[1]:
        monkeypatch.setattr(open_beneath, "_OPENAT2", NO_SUCH_CALL)
    return str(request.param)


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    folder = tmp_path / "allowed"
    folder.mkdir()
    return folder


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret" / "environ"
    path.parent.mkdir()
    path.write_text(json.dumps({"text": SECRET}))
    return path


@pytest.fixture
def confined(allowed: Path, store: Path) -> LoaderContext:
    return LoaderContext(store=store, directories=(str(allowed),))


def read(context: LoaderContext, path: Path) -> bytes:
    found = context.open_path(str(path), "/data/path")
    assert isinstance(found, OpenFile)
    return found.read_bytes()


def test_links_that_stay_inside_work(way: str, allowed: Path, confined: LoaderContext) -> None:
    (allowed / "blobs").mkdir()
    (allowed / "blobs" / "abc").write_bytes(b"1")
    (allowed / "snapshots" / "commit").mkdir(parents=True)
    (allowed / "snapshots" / "commit" / "relative").symlink_to("../../blobs/abc")
    (allowed / "snapshots" / "commit" / "absolute").symlink_to(allowed / "blobs" / "abc")
    (allowed / "folder").symlink_to("snapshots/commit")
    for name in ("blobs/abc", "snapshots/commit/relative", "snapshots/commit/absolute", "folder/relative"):
        assert read(confined, allowed / name) == b"1"
    found = confined.open_path(str(allowed / "folder"), "/model/path")
    assert isinstance(found, OpenFolder)
    assert (inside := found.file("relative")) is not None
    assert inside.read_bytes() == b"1"
    assert found.names() == found.walk() == ["absolute", "relative"]
    assert found.file("nothing") is None


def test_a_link_out_of_the_folder_lists_nothing(allowed: Path, secret: Path, confined: LoaderContext) -> None:
    (allowed / "extra").symlink_to(secret.parent)
    (allowed / "own").mkdir()
    (allowed / "own" / "notes").touch()
    (allowed / "again").symlink_to(allowed / "own")
    found = confined.open_path(str(allowed), "/data/path")
    assert isinstance(found, OpenFolder)
    assert found.names() == ["again", "extra", "own"]
    assert [found.folder(name).names() for name in ("extra", "own", "again", "none")] == [[], ["notes"], ["notes"], []]


@pytest.mark.parametrize("where", ["/proc/self/environ", "/etc/passwd", "/dev/zero", "../secret/environ", ".."])
def test_links_out_of_the_folder_are_refused(
    way: str, allowed: Path, secret: Path, confined: LoaderContext, where: str
) -> None:
    (allowed / "link").symlink_to(where)
    folder = confined.open_path(str(allowed), "/data/path")
    assert isinstance(folder, OpenFolder)
    for opened in (lambda: confined.open_path(str(allowed / "link"), "/data/path"), lambda: folder.file("link")):
        with pytest.raises(Refusal, match="lies outside the folders") as refused:
            opened()
        assert (refused.value.code, refused.value.pointer) == ("not_allowed", "/data/path")


def test_a_link_put_in_between_check_and_use_is_not_followed(
    way: str, allowed: Path, secret: Path, confined: LoaderContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    (allowed / "data.txt").write_text("harmless")
    (allowed / "sub").mkdir()
    (allowed / "sub" / "environ").write_text("harmless")
    resolve = open_files.real_path

    def resolve_then_swap(path: Path) -> Path | None:
        found = resolve(path)
        (allowed / "data.txt").unlink(missing_ok=True)
        (allowed / "data.txt").symlink_to(secret)
        if not (allowed / "sub").is_symlink():
            (allowed / "sub").rename(allowed / "was")
            (allowed / "sub").symlink_to(secret.parent)
        return found

    monkeypatch.setattr(open_files, "real_path", resolve_then_swap)
    for name in ("data.txt", "sub/environ"):
        with pytest.raises(Refusal, match="lies outside the folders"):
            open_allowed(allowed / name, allowed, name, "/data/path")
        (allowed / "data.txt").unlink()
        (allowed / "data.txt").write_text("harmless")


def test_a_file_that_is_open_stays_the_one_that_was_checked(allowed: Path, confined: LoaderContext) -> None:
    (allowed / "data.txt").write_bytes(b"first")
    found = confined.open_path(str(allowed / "data.txt"), "/data/path")
    assert isinstance(found, OpenFile)
    (allowed / "other").write_bytes(b"second")
    (allowed / "other").replace(allowed / "data.txt")
    assert found.read_bytes() == Path(os.fspath(found)).read_bytes() == b"first"
    descriptor = int(os.fspath(found).rpartition("/")[2])
    del found
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.fixture
def listening(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # a socket's path is short
    monkeypatch.chdir(allowed)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        yield


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("directories", [None, ("*",)])
def test_what_is_neither_a_file_nor_a_folder_is_refused_at_once(
    way: str, allowed: Path, store: Path, directories: tuple[str, ...] | None
) -> None:
    os.mkfifo(allowed / "pipe")
    context = LoaderContext(store=store, directories=directories or (str(allowed),))
    for name in ("pipe", "socket"):
        with pytest.raises(Refusal, match=rf"{name} (is neither a file nor a folder|cannot be opened).*; name"):
            context.open_path(str(allowed / name), "/data/path")
    # two links that lead to each other lie in the folder all the same
    for name, other in (("one", "two"), ("two", "one")):
        (allowed / name).symlink_to(other)
    with pytest.raises(Refusal, match=r"one is a link that leads back to itself; name") as refused:
        context.open_path(str(allowed / "one"), "/data/path")
    assert refused.value.code == "not_found"


@pytest.mark.parametrize("path", ["/proc/self/environ", "/proc/self/fd", "/sys/kernel", "/dev/null"])
def test_nothing_of_the_system_is_read_even_where_every_folder_is_allowed(context: LoaderContext, path: str) -> None:
    with pytest.raises(Refusal, match=r"of the system|neither a file nor a folder"):
        context.open_path(path, "/data/path")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5_000, "nothing/" * 500, "nothing"])
def test_a_name_that_no_file_can_have_is_not_there(allowed: Path, confined: LoaderContext, name: str) -> None:
    with pytest.raises(Refusal, match=r"does not exist|lies outside"):
        confined.open_path(f"{allowed}/{name}", "/data/path")


def spoiled(folder: Path, name: str, target: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)


def require_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(Refusal) as refused:
        call()
    failed = failure_of(refused.value)
    assert failed.category == "usage"
    assert "lies outside the folders" in failed.message
    assert SECRET not in failed.message + (failed.detail or "")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_no_file_of_a_model_leads_out(
    saved: Callable[..., Path], allowed: Path, secret: Path, confined: LoaderContext, name: str
) -> None:
    config = transformers.BertConfig(
        num_hidden_layers=1, num_attention_heads=1, hidden_size=8, intermediate_size=8, vocab_size=20
    )
    folder = saved("AutoModel", config).rename(allowed / "model")
    source, task = DirectoryModel(source="directory", path=str(folder)), Task(type="sentence_embedding")
    load(source, task, confined)
    spoiled(folder, name, secret)
    require_refused(lambda: load(source, task, confined))


def test_no_shard_of_a_model_leads_out(
    saved: Callable[..., Path], allowed: Path, secret: Path, confined: LoaderContext
) -> None:
    config = transformers.BertConfig(
        num_hidden_layers=1, num_attention_heads=1, hidden_size=8, intermediate_size=8, vocab_size=20
    )
    folder = saved("AutoModel", config).rename(allowed / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    spoiled(folder, "one.safetensors", secret)
    source = DirectoryModel(source="directory", path=str(folder))
    require_refused(lambda: load(source, Task(type="sentence_embedding"), confined))


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "safetensors", "csv", "parquet", "json"])
def test_no_data_lead_out(allowed: Path, secret: Path, confined: LoaderContext, suffix: str) -> None:
    (allowed / "data").mkdir()
    request = DataRequest(task=Task(type="causal_lm"), loaded=BYTES, batch_size=4, seed=0, context=confined)
    spoiled(allowed / "data", f"train.{suffix}", secret)
    path = str(allowed / "data" / f"train.{suffix}")
    if suffix in ("jsonl", "txt", "safetensors"):
        require_refused(lambda: file.load(DataFile(source="file", path=path), request))
    if suffix not in ("txt", "safetensors"):
        for named in (path, str(allowed / "data")):
            source = HuggingFaceData(source="huggingface", id=named)
            require_refused(lambda source=source: huggingface.load(source, request))


@pytest.mark.parametrize("name", ["factors.index.json", "0.safetensors"])
def test_no_factors_lead_out(allowed: Path, secret: Path, confined: LoaderContext, name: str) -> None:
    folder = allowed / "factors"
    folder.mkdir()
    (folder / "factors.index.json").write_text("{}")
    safetensors.torch.save_file({"a": torch.zeros(1)}, folder / "0.safetensors")
    spoiled(folder, name, secret)

    def opened() -> None:
        place = confined.open_path(str(allowed), "/factors/path")
        assert isinstance(place, OpenFolder)
        find_factors(place, "/factors/path").load_tensors("factors/0.safetensors")

    require_refused(opened)
