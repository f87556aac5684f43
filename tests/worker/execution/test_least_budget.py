"""A whole job under budgets: refused before any work with the smallest that would do, which a lower rung then keeps."""

import contextlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from catalog.frames import ArtifactWritten, Failed, Finished, Frame, LayerDone, Planned
from tests.machine.template.client import forked
from worker.process.child_process import Child

pytestmark = pytest.mark.real_programs

WIDTH = 1500
FACTORY = """
import torch
from torch import nn

def make(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 6))

def data(width):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, width, generator=generator), torch.randint(0, 6, (16,), generator=generator))]
"""


def run_wide(folder: Path, width: int, host: str, **bounds: int) -> tuple[list[Frame], int]:
    """The frames and exit code of a capacity job over a layer of so many inputs."""
    folder.mkdir()
    (folder / "wide_layer.py").write_text(FACTORY)
    document: dict[str, Any] = {
        "kind": "capacity",
        "model": {"source": "factory", "factory": "wide_layer:make", "kwargs": {"width": width}},
        "data": {"source": "factory", "factory": "wide_layer:data", "kwargs": {"width": width}},
        "task": {"type": "classification"},
        "collection": {"fisher": "mc", "batch_size": 16},
        "memory": {"host": host},
    }
    given = {
        "document": document,
        "artifacts": str(folder / "artifacts"),
        "completed": [],
        "threads": 1,
        "paths": [str(folder)],
        "allowed": {"factories": ["*"], "directories": ["*"]},
        "store": str(folder / "store"),
        "offline": True,
        "factors_path": None,
        "bounds": bounds,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with contextlib.closing(Child.start(given, subprocess.DEVNULL, environment)) as child:
        frames = list(child.frames())
        return frames, child.wait(300)


def the(kind: type[Frame], frames: list[Frame]) -> Any:
    (found,) = (frame for frame in frames if isinstance(frame, kind))
    return found


def test_an_impossible_budget_names_the_smallest_and_that_one_does(tmp_path: Path) -> None:
    refused, code = run_wide(tmp_path / "refused", WIDTH, "1MiB")
    failed = the(Failed, refused)
    assert (code, failed.code, failed.pointer) == (2, "budget_exceeded", "/memory/host")
    assert not [frame for frame in refused if isinstance(frame, (LayerDone, ArtifactWritten))]
    named = re.search(r"raise `memory\.host` to (\d+)MiB, the smallest that would do", failed.message)
    assert named is not None, failed.message
    assert "host_syevr" in failed.message

    done, code = run_wide(tmp_path / "done", WIDTH, f"{named[1]}MiB")
    assert code == 0, done[-1]
    assert the(Finished, done)
    assert the(LayerDone, done).outcome["record"]["rungs_A"] == ["host_syevr"]
    plan = next(frame.plan for frame in done if isinstance(frame, Planned))
    assert plan["rungs"]["0"][0] == "host_syevr"
    assert "planning_errors" not in plan

    with forked():  # which takes no budget to its bound
        roomy, _ = run_wide(tmp_path / "roomy", WIDTH, "4GiB")
    assert the(LayerDone, roomy).outcome["record"]["rungs_A"] == ["host_float64"]
    here, there = (the(LayerDone, frames).outcome["metrics"] for frames in (done, roomy))
    assert abs(here["trace"] - there["trace"]) <= 1e-12 * there["trace"]


def test_a_part_of_the_hosts_memory_that_is_too_small_is_for_the_operator_to_raise(tmp_path: Path) -> None:
    with forked():  # which holds more than its part already
        refused, code = run_wide(tmp_path / "part", WIDTH, "auto", host_bytes=64 * 2**20, host_shared_by=8)
    failed = the(Failed, refused)
    assert (code, failed.code, failed.pointer) == (2, "budget_exceeded", "/memory/host")
    assert "the budget is 57.6 MiB" in failed.message
    assert re.search(r"the worker's 8 slots: .* \(KRONOSCOPE_SLOTS\) or more memory to .* to \d+MiB", failed.message)
    assert "raise `memory.host`" not in failed.message
    plan = next(frame.plan for frame in refused if isinstance(frame, Planned))
    assert "the budget is 57.6 MiB of host memory, as 8 jobs at a time share it" in plan["why"]
