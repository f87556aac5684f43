"""A search for eigenvalues that is killed for real goes on where it was, and ends as one that nobody disturbed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from catalog.frames import Failed, Finished, Frame, LayerDone, LogLine, Progress, Summarised
from engine.analyses.spectra.search_checkpoints import MANIFEST
from tests.machine.stopwatch import Stopwatch
from tests.machine.template.client import forked
from worker.process.child_process import EXECUTION, Child

pytestmark = pytest.mark.real_programs

MODEL = """
import time
from pathlib import Path
from torch import nn

class Slow(nn.Tanh):
    # while the file stands, a search takes long enough to be killed in, and the last one waits for that
    def forward(self, x):
        slow, watched = (Path(__file__).with_name(name) for name in ("slow", "watched"))
        if slow.exists():
            time.sleep(0.02)
        while slow.exists() and '"of":"hessian"' in read(Path(watched.read_text())):
            time.sleep(0.02)
        return super().forward(x)

def read(manifest):
    return manifest.read_text() if manifest.exists() else ""

def make():
    return nn.Sequential(nn.Linear(12, 20), Slow(), nn.Linear(20, 3))
"""
DOCUMENT: dict[str, Any] = {
    "kind": "spectrum",
    "model": {"source": "factory", "factory": "kronoscope_test_searched:make"},
    "data": {"source": "synthetic", "shape": [12], "examples": 60, "classes": 3},
    "task": {"type": "classification"},
    "collection": {"batch_size": 60, "fisher": "type2", "self_check": "off"},
    "spectrum": {"of": ["kfac", "ggn", "hessian"], "k": 3, "steps": 12, "probes": 2, "tolerance": 1e-4},
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    (tmp_path / "kronoscope_test_searched.py").write_text(MODEL)
    return tmp_path


def slow_down(modules: Path, scratch: Path) -> None:
    """Have the next job's search wait to be killed, once the files of an attempt in ``scratch`` have the last one."""
    (modules / "watched").write_text(str(scratch / MANIFEST))
    (modules / "slow").touch()


def under_way(scratch: Path, ended: Any) -> None:
    """Wait until the Hessian's search, the last one, has a checkpoint of its own."""
    watch = Stopwatch()
    while True:
        assert ended() is None, "the job ended before its search had a checkpoint"
        assert watch.seconds() < 240, "the search never had a checkpoint"
        try:
            body = json.loads((scratch / MANIFEST).read_bytes())["body"]
        except (OSError, ValueError):
            body = {}
        if body.get("of") == "hessian":
            return
        time.sleep(0.05)


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Foreground:
    """Runs of one document into one folder."""

    def __init__(self, modules: Path, output: Path) -> None:
        self.modules, self.output = modules, output

    def start(self) -> subprocess.Popen[bytes]:
        request = {
            "document": DOCUMENT, "paths": [str(self.modules)], "allowed": {"factories": ["*"], "directories": []},
            "threads": 1, "store": str(self.modules / "store"), "offline": True, "checkpoint_seconds": 0.001,
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker.foreground", "--output", str(self.output)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | ENVIRONMENT,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        return process

    def done(self) -> str:
        """Run to the end; what it said."""
        process = self.start()
        assert process.stderr is not None
        # its standard input stays open: the end of that would stop it
        said = process.stderr.read().decode()
        assert process.wait(60) == 0, said
        _close(process)
        return said

    @property
    def results(self) -> Any:
        found = json.loads((self.output / "results.json").read_bytes())
        for row in found["layers"]:
            del row["observed"]
        return found


@pytest.mark.nightly(
    covered_by=(
        "tests/worker/execution/test_search_resume.py::test_another_attempt_takes_over_what_a_killed_one_has_searched",
        "tests/worker/foreground/test_foreground.py::test_a_run_that_ended_by_no_fault_of_its_document_is_gone_on_with",
    )
)
def test_a_foreground_run_that_was_killed_goes_on_in_its_folder(modules: Path, tmp_path: Path) -> None:
    undisturbed, killed = Foreground(modules, tmp_path / "undisturbed"), Foreground(modules, tmp_path / "killed")
    with forked():
        undisturbed.done()
    slow_down(modules, killed.output / ".waiting")
    process = killed.start()
    under_way(killed.output / ".waiting", process.poll)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    _close(process)
    (modules / "slow").unlink()
    # the guardian ends what the run has left; until then its child may write another checkpoint, whole as each is
    said = killed.done()
    assert "the search of hessian resumed after" in said
    assert killed.results == undisturbed.results
    assert not (killed.output / ".waiting").exists()


def attempt(modules: Path, root: Path, number: int) -> Child:
    given = {
        "document": DOCUMENT, "artifacts": str(root / str(number)), "completed": [], "threads": 1,
        "paths": [str(modules)], "allowed": {"factories": ["*"], "directories": []},
        "store": str(modules / "store"), "offline": True, "scratch": str(root / "waiting" / str(number)),
        "earlier": [str(root / "waiting" / str(each)) for each in range(number - 1, 0, -1)],
        "checkpoint_seconds": 0.001,
    }  # fmt: skip
    return Child.start(given, subprocess.DEVNULL, {**os.environ, **ENVIRONMENT}, EXECUTION)


def to_its_end(modules: Path, root: Path, number: int) -> list[Frame]:
    """Run an attempt that nothing is done to."""
    with forked():
        child = attempt(modules, root, number)
        try:
            return list(child.frames())
        finally:
            child.close()


def outcomes(frames: list[Frame]) -> dict[str, Any]:
    assert isinstance(frames[-1], Finished), [each for each in frames if isinstance(each, Failed)]
    rows = {each.layer: each.outcome for each in frames if isinstance(each, LayerDone)}
    (summary,) = [each.summary for each in frames if isinstance(each, Summarised)]
    return {"rows": rows, "summary": summary}


def products(frames: list[Frame]) -> list[int]:
    return [frame.done for frame in frames if isinstance(frame, Progress) and frame.stage == "products"]


def test_another_attempt_takes_over_what_a_killed_one_has_searched(modules: Path, tmp_path: Path) -> None:
    expected = outcomes(to_its_end(modules, tmp_path / "undisturbed", 1))
    slow_down(modules, tmp_path / "killed" / "waiting" / "1")
    first = attempt(modules, tmp_path / "killed", 1)
    try:
        under_way(tmp_path / "killed" / "waiting" / "1", lambda: None)
        first.kill()
        kept = products([frame for frame in first.frames() if getattr(frame, "kept", False)])
    finally:
        first.close()
        (modules / "slow").unlink()
    # of the collection, which is short, nothing may be left: the search alone is worth going on with
    (tmp_path / "killed" / "waiting" / "1" / "checkpoint" / "checkpoint.json").unlink(missing_ok=True)
    frames = to_its_end(modules, tmp_path / "killed", 2)
    assert outcomes(frames) == expected
    # its batches are counted from where it goes on
    assert 0 < kept[-1] < products(frames)[0]
    said = [each.message for each in frames if isinstance(each, LogLine)]
    assert any("the search of hessian resumed after" in line for line in said)
    assert not (tmp_path / "killed" / "waiting" / "1").exists()
