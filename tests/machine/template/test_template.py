"""Programs that are forked from the template do what they do when they are started."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from catalog.frames import Finished, Frame, LayerDone, Started
from tests.machine.template.client import TEMPLATE, Template, is_usable
from tests.machine.template.imports import read_at_import
from tests.machine.template.spawning import install
from worker.process.child_process import EXECUTION, RANKS, Child

pytestmark = [
    pytest.mark.real_programs,
    pytest.mark.skipif(not is_usable(), reason="OMP_NUM_THREADS is not 1, so imports start threads"),
]

DOCUMENT = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits", "limit": 200},
    "task": {"type": "classification"},
}
KRONOSCOPE = (sys.executable, "-P", "-c", "from kronoscope.cli import main; main()")
LOOKS = """
import json, os, resource, signal, sys, threading
from pathlib import Path

import torch


def look(file):
    umask = os.umask(0)
    os.umask(umask)
    pid = os.getpid()
    seen = {
        "argv": [*sys.argv[:2], *sys.argv[3:4]],
        "command": Path(f"/proc/{pid}/cmdline").read_text().rstrip(chr(0)).split(chr(0))[:5],
        "descriptors": [os.readlink(f"/proc/{pid}/fd/{each}") for each in (1, 2)],
        "environment": dict(os.environ),
        "flags": str(sys.flags),
        "folder": os.getcwd(),
        "leads": os.getsid(0) == os.getppid() == os.getpgrp(),
        "limits": [resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "main": threading.current_thread() is threading.main_thread(),
        "open": len(os.listdir("/proc/self/fd")),
        "path": sys.path,
        "privileges": [line for line in Path("/proc/self/status").read_text().splitlines() if "NoNewPrivs" in line],
        "seed": torch.initial_seed(),
        "signals": [str(signal.getsignal(each)) for each in (2, 10, 13, 17, 25)],
        "threads": torch.get_num_threads(),
        "umask": umask,
    }
    Path(file).write_text(json.dumps(seen))
    raise ValueError("it has looked")
"""


@pytest.fixture
def either_way() -> Iterator[Callable[[Callable[[str], Any]], tuple[Any, Any]]]:
    """``either_way(action)``: what it returns where programs are forked, and where they are started."""

    def act(action: Callable[[str], Any]) -> tuple[Any, Any]:
        install(TEMPLATE)
        forked = action("forked")
        install(None)
        return forked, action("started")

    yield act
    install(None)


def run(folder: Path, command: Any = EXECUTION, **document: Any) -> tuple[list[Frame], int]:
    (folder / "artifacts").mkdir(parents=True)
    assignment = {
        "document": DOCUMENT | document,
        "artifacts": str(folder / "artifacts"),
        "scratch": str(folder / "scratch"),
        "store": str(folder.parent / "store"),
        "completed": [],
        "threads": 1,
        "paths": [str(folder.parent)],
        "allowed": {"factories": ["*"], "directories": ["*"]},
        "offline": True,
        "factors_path": None,
    }
    child = Child.start(assignment, subprocess.DEVNULL, {**os.environ, "PYTHONPATH": str(folder.parent)}, command)
    try:
        frames = list(child.frames())
        return frames, child.wait(300)
    finally:
        child.close()


@pytest.mark.part(of=6, by=())
@pytest.mark.parametrize(("command", "ranks"), [(EXECUTION, 1), (RANKS, 2)])
def test_a_job_gives_the_same_rows_and_digests(either_way: Any, tmp_path: Path, command: Any, ranks: int) -> None:
    (forked, code), (started, started_code) = either_way(lambda way: run(tmp_path / way, command, world_size=ranks))
    assert code == started_code == 0
    assert any(isinstance(frame, LayerDone) for frame in forked)
    for kind in (Started, LayerDone, Finished):
        frames = [[frame for frame in each if isinstance(frame, kind)] for each in (forked, started)]
        if kind is LayerDone:
            frames = [[(row.kind, row.ordinal, row.outcome) for row in each] for each in frames]
        assert frames[0] == frames[1]


def test_a_child_begins_with_the_same_state(either_way: Any, tmp_path: Path) -> None:
    (tmp_path / "kronoscope_test_looks.py").write_text(LOOKS)

    def look(way: str) -> Any:
        file = tmp_path / f"{way}.json"
        model = {"source": "factory", "factory": "kronoscope_test_looks:look", "kwargs": {"file": str(file)}}
        frames, code = run(tmp_path / way, model=model)
        assert (code, frames[-1].code) == (2, "factory_failed")
        return json.loads(file.read_text())

    forked, started = either_way(look)
    assert {name: (forked[name], started[name]) for name in started if forked[name] != started[name]} == {}


def test_a_command_says_the_same(either_way: Any, tmp_path: Path) -> None:
    def say(way: str) -> list[Any]:
        commands = (["--help"], ["plan", "no_such.yaml"], ["menu"])
        done = [
            subprocess.run([*KRONOSCOPE, *each], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
            for each in commands
        ]
        return [(each.returncode, each.stdout, each.stderr) for each in done]

    forked, started = either_way(say)
    assert forked == started
    assert forked[1][0] == 2


def test_no_module_of_the_run_keeps_programs_from_being_forked() -> None:
    """A variable that a test's import sets would: every program of the run would be started anew, and nobody told."""
    importlib.import_module("sklearn.datasets")  # as a test does that loads digits in this process
    assert read_at_import(os.environ) == read_at_import(TEMPLATE.environment)


def test_of_several_threads_that_ask_first_all_ask_one_template(monkeypatch: pytest.MonkeyPatch) -> None:
    template, started = Template(), list[float]()

    def start() -> None:
        started.append(time.monotonic())
        time.sleep(0.05)
        monkeypatch.setattr(template, "_process", object())

    monkeypatch.setattr(template, "_start", start)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: template.spawn((), None), range(4)))
    assert len(started) == 1
