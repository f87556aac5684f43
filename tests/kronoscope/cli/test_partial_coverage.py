"""A job that measured a part of a model says so on the terminal, and ends with a code of its own."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

PARTIAL = """
import torch


class Renormed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(60, 10, max_norm=1.0)
        self.hidden = torch.nn.Linear(10, 24)
        self.last = torch.nn.Linear(24, 4)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.hidden(self.words(x).mean(1))))


def model():
    return Renormed()


def data():
    generator = torch.Generator().manual_seed(1)
    yield torch.randint(0, 60, (16, 5), generator=generator), torch.randint(0, 4, (16,), generator=generator)
"""
JOB = """\
kind: [capacity, factors]
model: {source: factory, factory: "partial_model:model"}
data: {source: factory, factory: "partial_model:data"}
task: {type: classification}
"""


@pytest.fixture
def partial(folder: Path) -> Path:
    (folder / "partial_model.py").write_text(PARTIAL)
    (folder / "partial.yaml").write_text(JOB)
    return folder


def test_a_part_of_a_model_does_not_look_like_a_success(partial: Path, kronoscope: Run) -> None:
    done = kronoscope("run", "partial.yaml", "--output", "out")
    assert done.returncode == 6, done.stderr
    assert "capacity: 2 layers, 37.2% of the model" in done.stdout
    assert "; of the 37.2% that was measured: effective dimension " in done.stdout
    assert (
        "warning: 37.2% of the 976 trainable parameters were measured; not measured: 600 embedding_renormalised"
        in done.stdout
    )
    assert "61.4% embedding_renormalised: renormalise the table once" in done.stdout
    assert "or accept the part: collection.min_coverage: 0.372" in done.stdout
    assert json.loads((partial / "out" / "job.json").read_text())["state"] == "succeeded"

    accepted = kronoscope(
        "run", "partial.yaml", "--output", "again", "--json", "--set", "collection.min_coverage=0.372"
    )
    assert accepted.returncode == 0, accepted.stderr
    coverage = json.loads(accepted.stdout)["coverage"]
    assert (coverage["status"], coverage["not_measured"][0]["parameters"]) == ("accepted", 600)

    asked = kronoscope("run", "partial.yaml", "--output", "never", "--set", "collection.min_coverage=0.9")
    assert asked.returncode == 2
    assert "`min_coverage` asks for 90.00%" in asked.stderr
