import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from worker.execution.files.artifact_files import ArtifactFiles, find_factors
from worker.execution.files.open_files import OpenFolder
from worker.execution.refusal import Refusal


@pytest.fixture
def written() -> Any:
    return []


@pytest.fixture
def files(tmp_path: Path, written: list[Any]) -> Any:
    return ArtifactFiles(tmp_path, lambda *frame: written.append(frame))


def test_the_library_reads_what_is_written(tmp_path: Path, files: ArtifactFiles, written: list[Any]) -> None:
    tensors = {
        "f32": torch.randn(3, 4),
        "f64": torch.randn(5, dtype=torch.float64),
        "half": torch.randn(7).to(torch.bfloat16),
        "ints": torch.arange(4),
        "transposed": torch.randn(3, 4).T,
        "nothing": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }
    files.save_tensors("factors/0.safetensors", tensors, {"layer": "fc"})
    path = tmp_path / "factors" / "0.safetensors"
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"layer": "fc"}
    ((name, digest, size, media_type),) = written
    assert (name, media_type) == ("factors/0.safetensors", "application/vnd.safetensors")
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert size == path.stat().st_size
    assert all(torch.equal(files.load_tensors(name)[key], tensors[key]) for key in tensors)


def test_the_same_tensors_give_the_same_bytes_in_any_order(
    tmp_path: Path, files: ArtifactFiles, written: list[Any]
) -> None:
    one, two = torch.randn(3), torch.randn(2, 2)
    files.save_tensors("a.safetensors", {"one": one, "two": two}, {"x": "1", "y": "2"})
    files.save_tensors("b.safetensors", {"two": two, "one": one}, {"y": "2", "x": "1"})
    assert written[0][1] == written[1][1]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, files: ArtifactFiles, written: list[Any]) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        files.save_json("a.json", {"x": float("nan")})

    class Exploding(dict):
        def items(self) -> Any:
            yield "a", torch.zeros(3)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        files.save_tensors("a.safetensors", Exploding(), {})
    assert written == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["../a", "/a", "a/../b", ".hidden", "a//b", "a\nb", ""])
def test_names_stay_below_the_folder(files: ArtifactFiles, name: str) -> None:
    with pytest.raises(ValueError, match="not a name for an artifact"):
        files.save_json(name, {})


def test_what_is_not_there_is_said_so(files: ArtifactFiles) -> None:
    for read in (files.load_json, files.load_tensors):
        with pytest.raises(FileNotFoundError):
            read("factors/factors.index.json")


@pytest.mark.parametrize("below", ["", "factors", "artifacts/factors"])
def test_stored_factors_are_found_in_a_run_or_below_it(tmp_path: Path, below: str) -> None:
    folder = tmp_path / below
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "factors.index.json").write_text(json.dumps({"format": "x"}))
    stored = find_factors(OpenFolder.by_itself(tmp_path, "/factors/path"), "/factors/path")
    assert stored.load_json("factors/factors.index.json") == {"format": "x"}
    with pytest.raises(PermissionError):
        stored.save_json("factors/a.json", {})


def test_a_folder_without_factors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"no factors\.index\.json") as refused:
        find_factors(OpenFolder.by_itself(tmp_path, "/factors/path"), "/factors/path")
    assert refused.value.pointer == "/factors/path"
