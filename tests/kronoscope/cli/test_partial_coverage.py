"""A job that did a part of what was asked says so on the terminal, and ends with a code of its own."""

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
SATURATED = """

def saturated():
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    with torch.no_grad():
        made[2].weight.zero_()
        made[2].bias.copy_(torch.tensor([2e3, 0.0, 0.0]))
    return made


def numbers():
    generator = torch.Generator().manual_seed(1)
    yield torch.randn(16, 6, generator=generator), torch.arange(16) % 3
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


@pytest.mark.part(of=2, law="a part does not look like the whole")
def test_a_part_of_a_model_does_not_look_like_a_success(partial: Path, kronoscope: Run) -> None:
    done = kronoscope("run", "partial.yaml", "--output", "out")
    assert done.returncode == 6, done.stderr
    assert "capacity: 2 layers, 37.3% of the model" in done.stdout
    assert "; of the 37.3% that was measured: effective dimension " in done.stdout
    assert (
        "warning: 37.3% of the 976 trainable parameters were measured; not measured: 600 embedding_renormalised"
        in done.stdout
    )
    assert "61.5% embedding_renormalised: renormalise the table once" in done.stdout
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


@pytest.mark.part(of=2, law="a part does not look like the whole")
def test_a_refused_analysis_does_not_look_like_a_success(partial: Path, kronoscope: Run) -> None:
    (partial / "partial_model.py").write_text(PARTIAL + SATURATED)
    document = (
        JOB.replace(":model", ":saturated").replace(":data", ":numbers").replace("[capacity", "[natural_gradient")
    )
    (partial / "refused.yaml").write_text(document)
    done = kronoscope("run", "refused.yaml", "--output", "out")
    assert done.returncode == 6, done.stderr
    assert "factors: 2 layers" in done.stdout
    said = "warning: `natural_gradient` was refused, and the other analyses are done (/natural_gradient): layer `2` has"
    assert said in done.stdout
    job = json.loads((partial / "out" / "job.json").read_text())
    assert (job["state"], job["failure"]) == ("succeeded", None)
    assert [each["kind"] for each in job["refused"]] == ["natural_gradient"]
    assert (partial / "out" / "artifacts" / "factors" / "factors.index.json").is_file()

    told = kronoscope("run", "refused.yaml", "--output", "told", "--json")
    assert told.returncode == 6
    assert json.loads(told.stdout)["refused"] == job["refused"]

    alone = kronoscope("run", "refused.yaml", "--output", "alone", "--set", "kind=natural_gradient")
    assert alone.returncode == 2
    assert "/natural_gradient layer `2` has no curvature" in alone.stderr
