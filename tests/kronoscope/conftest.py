"""The command as a process, in a folder with a small model and data of the caller's own."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

KRONOSCOPE = (sys.executable, "-P", "-c", "from kronoscope.cli import main; main()")

FACTORIES = """
import os
import time

import torch

told = []


def model(poison=False):
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    if poison:
        with torch.no_grad():
            made[2].weight[1, 1] = float("nan")
    return made


def data(examples=40, width=6, top=3):
    generator = torch.Generator().manual_seed(1)
    if examples:
        yield torch.randn(examples, width, generator=generator), torch.arange(examples) % top


def anew(examples=40):
    # as augmentation that nobody has seeded
    told.append(examples)
    for inputs, targets in data(examples):
        yield inputs + len(told), targets


def endless(path):
    # a named pipe that the test reads once; the second pass would wait for a reader for ever
    if not told:
        told.append(path)
        with open(path, "w") as file:
            file.write(f"{os.getpid()}\\n")
    while True:
        time.sleep(0.01)
        yield torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)


def empty():
    return model().to("meta")


def explodes():
    raise ValueError("no such file of mine")
"""
JOB = """\
kind: [factors, capacity]
model: {source: factory, factory: "mine_for_kronoscope:model"}
data: {source: factory, factory: "mine_for_kronoscope:data"}
task: {type: classification}
collection: {batch_size: 16, dtype: float64}
stabilisation: {damping: 1e-4}
"""


def environment(**more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KRONOSCOPE_")}
    given = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    # a service without Redis finds a job by its poll alone, and most tests wait for several jobs
    service = {"KRONOSCOPE_THREADS": "1", "KRONOSCOPE_POLL_SECONDS": "0.2"}
    return ours | given | service | more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine_for_kronoscope.py").write_text(FACTORIES)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture
def kronoscope(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in the folder to its end."""

    def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*KRONOSCOPE, *arguments],
            cwd=folder,
            env=environment(XDG_CACHE_HOME=str(folder / "cache"), **more),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def settings(values: Sequence[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]
