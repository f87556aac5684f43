"""The failure of a caller's own code in the foreground: where it raised, and on request the whole traceback."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.errors import ModelRefused
from kronoscope.local import measure

Run = Callable[..., subprocess.CompletedProcess[str]]

CODE = """\
import torch
from helpers_of_mine import narrow


class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x):
        return narrow(self.last(x))


def unfinished(path="weights/mine.pt"):
    return torch.nn.Linear(4, 2).load_state_dict(read(path))


def read(path):
    raise FileNotFoundError(path)
"""
HELPERS = """\
def narrow(x):
    return x.reshape(7, 7)
"""
JOB = """\
kind: capacity
model: {source: factory, factory: "my_code:NAME"}
data: {source: synthetic, shape: [4], examples: 8, classes: 2}
task: {type: classification}
"""


@pytest.mark.parametrize(
    ("name", "calls", "source"),
    [
        ("unfinished", ["my_code:15 in unfinished", "my_code:19 in read"], "raise FileNotFoundError(path)"),
        ("Mine", ["my_code:11 in Mine.forward", "helpers_of_mine:2 in narrow"], "return x.reshape(7, 7)"),
    ],
)
def test_a_run_says_where_the_callers_code_raised(
    folder: Path, kronoscope: Run, name: str, calls: list[str], source: str
) -> None:
    (folder / "my_code.py").write_text(CODE)
    (folder / "helpers_of_mine.py").write_text(HELPERS)
    (folder / "mine.yaml").write_text(JOB.replace("NAME", name))
    done = kronoscope("run", "mine.yaml", "--output", "out", "--json")
    assert done.returncode == 2, done.stderr
    said = done.stderr.splitlines()
    assert [
        line.removeprefix("error:").strip() for line in said if " in " in line and line.startswith("error:   ")
    ] == calls
    assert source not in done.stderr
    trace = json.loads(done.stdout)["failure"]["trace"]
    assert [f"{call['module']}:{call['line']} in {call['function']}" for call in trace] == calls

    whole = kronoscope("run", "mine.yaml", "--output", "out", "--verbose")
    assert whole.returncode == 2
    assert "Traceback (most recent call last)" in whole.stderr
    assert source in whole.stderr
    assert f'File "{folder / "my_code.py"}"' in whole.stderr


def test_a_measurement_raises_with_the_models_own_error_as_its_cause() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x).reshape(7, 7)

    with pytest.raises(ModelRefused) as raised:
        measure(Narrow(), [(torch.ones(3, 4), torch.arange(3) % 2)], task="classification")
    cause = raised.value.__cause__
    assert isinstance(cause, RuntimeError)
    assert cause.__traceback__ is not None
