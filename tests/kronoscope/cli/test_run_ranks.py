"""`kronoscope run` with `world_size: 2`: the factors of one process, equal bits at each run, errors with their rank."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

Run = Callable[..., subprocess.CompletedProcess[str]]


def files(folder: Path) -> dict[str, bytes]:
    """All artifacts but the curve of measured bytes."""
    root = folder / "artifacts"
    found = {each.relative_to(root).as_posix(): each.read_bytes() for each in root.rglob("*") if each.is_file()}
    del found["memory_curve.json"]
    return found


def test_two_ranks_give_the_factors_of_one_process_and_the_same_bits_sharded(folder: Path, kronoscope: Run) -> None:
    """Twice the bits of two ranks: once each has the whole model, once they share it."""
    for output, ranks, sharding in (("alone", 1, "off"), ("two", 2, "off"), ("again", 2, "on")):
        changes = ("--set", f"world_size={ranks}", "--set", f"memory.model_sharding={sharding}")
        done = kronoscope("run", "job.yaml", "--output", output, *changes)
        assert done.returncode == 0, done.stderr
        assert "factors: 2 layers" in done.stdout
    assert files(folder / "two") == files(folder / "again")
    jobs = [json.loads((folder / name / "job.json").read_text()) for name in ("alone", "two")]
    for name in ("model_sha256", "data_sha256", "examples"):
        assert jobs[0][name] == jobs[1][name] is not None
    records = [json.loads(line) for line in (folder / "two" / "log.jsonl").read_text().splitlines()]
    assert {each["world_size"] for each in records} == {2}
    assert sum(each["positions_local"] < each["positions"] for each in records) == len(records)
    for each in (folder / "alone" / "artifacts" / "factors").glob("*.safetensors"):
        one, two = load_file(each), load_file(folder / "two" / "artifacts" / "factors" / each.name)
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            if tensor.is_floating_point():
                apart = torch.linalg.vector_norm((two[key] - tensor).double()) / torch.linalg.vector_norm(
                    tensor.double()
                )
                assert float(apart) <= 1e-6, key
    assert not (folder / "two" / ".waiting").exists()


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("world_size=65", "/world_size is 65; take 1 to 64"),
        # found by both ranks in the same words, so no rank is named
        ("model.factory=mine_for_kronoscope:missing", "missing"),
    ],
)
def test_what_is_wrong_with_the_document_is_told_as_of_one_process(
    folder: Path, kronoscope: Run, option: str, said: str
) -> None:
    arguments = ("run", "job.yaml", "--output", "out", "--set", option)
    done = kronoscope(*arguments, *(() if "world" in option else ("--set", "world_size=2")))
    assert done.returncode == 2
    assert said in done.stderr
    assert "rank" not in done.stderr.replace("ranks", "")
