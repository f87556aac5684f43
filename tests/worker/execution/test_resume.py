"""Killed for real in the middle, and gone on with: the digests are those of a job that nobody disturbed.

What is killed is a real program, and what goes on with it in the first test; elsewhere that one is forked.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from catalog.frames import Failed, Finished, Frame, LayerDone, LogLine, Progress, Summarised
from engine.collection.checkpoints import MANIFEST
from tests.machine.stopwatch import Stopwatch
from tests.machine.template.client import forked
from worker.process.child_process import EXECUTION, Child

pytestmark = pytest.mark.real_programs

MODEL = """
import time
from itertools import count
from pathlib import Path
from torch import nn, relu

class Gated(nn.Module):
    # slow enough for checkpoints in between; at one batch it waits for as long as the gate stands
    def __init__(self, gate, at):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 40), nn.Linear(40, 30), nn.Linear(30, 3)
        self.gate, self.at, self.calls = Path(gate), at, count(1)

    def forward(self, x):
        number = next(self.calls)
        time.sleep(0.02)
        while number == self.at and self.gate.exists():
            self.gate.with_name("waits").touch()
            time.sleep(0.01)
        return self.head(relu(self.second(relu(self.first(x)))))

def make(gate, at, saturated=False):
    model = Gated(gate, at)
    if saturated:
        # the probabilities are 0 and 1 exactly, so that the head has no curvature
        nn.init.zeros_(model.head.weight)
        nn.init.constant_(model.head.bias, 0)
        model.head.bias.data[0] = 2e3
    return model
"""
BATCHES = 30
PARTS = [["first"], ["second"], ["head"]]
DIE_WRITING = """
import os, signal, sys
real, seen, last = os.fsync, 0, int(sys.argv.pop(1))

def fsync(descriptor):
    global seen
    if "/checkpoint/.part-" in os.readlink(f"/proc/self/fd/{descriptor}"):
        seen += 1
        if seen == last:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
    real(descriptor)

os.fsync = fsync
from engine.collection import checkpoints
checkpoints._SHARE = 0
from worker.execution.__main__ import main
sys.exit(main(sys.argv[1:]))
"""

AT_EVERY_BATCH = """
import sys
from engine.collection import checkpoints
checkpoints._SHARE = 0
from worker.execution.__main__ import main
sys.exit(main(sys.argv[1:]))
"""

DIE_BETWEEN = """
import os, signal, sys
from worker.execution import frame_pipe
real = frame_pipe.FramePipe.send

def send(pipe, frame):
    real(pipe, frame)
    if frame.frame == "layer" and frame.kind == "capacity":
        os.kill(os.getpid(), signal.SIGKILL)

frame_pipe.FramePipe.send = send
from worker.execution.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


class Place:
    """One job's folders, a gate and the numbers of its attempts."""

    def __init__(self, root: Path, parts: Any = None, at: int = 24) -> None:
        root.mkdir(exist_ok=True)
        (root / "kronoscope_test_gated.py").write_text(MODEL)
        self.root, self.parts, self.attempts = root, parts, 0
        self.completed: list[tuple[str, int]] = []
        self.gate = root / "gate"
        self.document = {
            "kind": "factors",
            "model": {
                "source": "factory",
                "factory": "kronoscope_test_gated:make",
                "kwargs": {"gate": str(self.gate), "at": at},
            },
            "data": {"source": "synthetic", "shape": [12], "examples": 4 * BATCHES, "classes": 3},
            "task": {"type": "classification"},
            # a gate counts forward passes
            "collection": {"batch_size": 4, "self_check": "off"},
            "keep": [],
        }

    def start(self, *command: str) -> Child:
        self.attempts += 1
        given = {
            "document": self.document,
            "artifacts": str(self.root / str(self.attempts)),
            "completed": self.completed,
            "threads": 1,
            "paths": [str(self.root)],
            "allowed": {"factories": ["*"], "directories": ["*"]},
            "store": str(self.root / "store"),
            "offline": True,
            "plan": {"parts": self.parts} if self.parts else None,
            "scratch": str(self.scratch(self.attempts)),
            "earlier": [str(self.scratch(each)) for each in range(self.attempts - 1, 0, -1)],
            "checkpoint_seconds": 0.001,
        }
        return Child.start(given, subprocess.DEVNULL, {**os.environ, "OMP_NUM_THREADS": "1"}, command or EXECUTION)

    def scratch(self, attempt: int) -> Path:
        return self.root / "waiting" / str(attempt)

    def run(self, *command: str) -> list[Frame]:
        child = self.start(*command)
        try:
            return list(child.frames())
        finally:
            child.close()

    def run_forked(self) -> list[Frame]:
        """Run in a process that need not be started for it, since nothing is done to it."""
        with forked():
            return self.run()

    def killed_at_the_gate(self, *command: str) -> list[Frame]:
        """Run until the model waits and a checkpoint stands, and kill the whole group."""
        self.gate.touch()
        child = self.start(*command)
        try:
            self._kill_when_it_waits(child)
            return list(child.frames())
        finally:
            child.close()
            self.gate.unlink()

    def _kill_when_it_waits(self, child: Child) -> None:
        waits = self.gate.with_name("waits")
        watch = Stopwatch()
        while not waits.exists():
            assert watch.seconds() < 120, "the model never came to its gate"
            time.sleep(0.01)
        assert (self.scratch(self.attempts) / MANIFEST).is_file()
        child.kill()
        waits.unlink()


def dying(folder: Path, sync: int) -> list[str]:
    """A child that is killed at its ``sync``-th file of a checkpoint, half of it written."""
    program = folder / "dies.py"
    program.write_text(DIE_WRITING)
    return [sys.executable, "-P", str(program), str(sync)]


def outcomes(frames: list[Frame]) -> list[Any]:
    """All that the ledger's digests cover."""
    failed = [frame for frame in frames if isinstance(frame, Failed)]
    assert not failed
    assert isinstance(frames[-1], Finished)
    return [frame.outcome for frame in frames if isinstance(frame, LayerDone)]


def resumed_at(frames: list[Frame]) -> tuple[int, int]:
    """Batch and batches that the log names."""
    lines = [frame.message for frame in frames if isinstance(frame, LogLine)]
    (found,) = filter(None, (re.search(r"resumed at batch (\d+) of (\d+)", line) for line in lines))
    return int(found[1]), int(found[2])


@pytest.fixture(scope="module")
def undisturbed_frames(tmp_path_factory: pytest.TempPathFactory) -> list[Frame]:
    place = Place(tmp_path_factory.mktemp("undisturbed"))
    found = place.run_forked()
    assert not place.scratch(1).exists()
    return found


@pytest.fixture
def undisturbed(undisturbed_frames: list[Frame]) -> list[Any]:
    found = outcomes(undisturbed_frames)
    assert len(found) == 3
    return found


@pytest.mark.part(of=3, law="a job that was stopped goes on")
def test_killed_in_the_middle(undisturbed: list[Any], undisturbed_frames: list[Frame], tmp_path: Path) -> None:
    place = Place(tmp_path)
    kept = [frame for frame in place.killed_at_the_gate() if isinstance(frame, Progress) and frame.kept]
    left = {path.name for path in place.scratch(1).rglob("*.safetensors")}
    assert left
    frames = place.run()
    assert outcomes(frames) == undisturbed
    assert inputs_of(frames) == inputs_of(undisturbed_frames)
    assert all(inputs_of(frames))
    batch, batches = resumed_at(frames)
    # two dry runs come before: the gate stood at batch 22
    repeated = 21 - batch
    assert batches == BATCHES
    assert 0 <= repeated < 21
    done = [frame.done for frame in frames if isinstance(frame, Progress) and frame.stage == "collection"]
    assert (done[0], done[-1]) == (batch, BATCHES)
    # a checkpoint is said to be kept once it stands: the last one may have been killed before it could be
    assert 0 < kept[-1].done <= batch
    assert (kept[-1].stage, kept[-1].total) == ("collection", BATCHES)
    assert not place.scratch(1).exists()
    assert not place.scratch(2).exists()


@pytest.mark.part(of=3, law="a job that was stopped goes on")
def test_gradient_rows_survive_a_kill(tmp_path: Path) -> None:
    """More of them than outputs, so that triangles, too, are brought back to the same bits."""
    plain, place = Place(tmp_path / "plain"), Place(tmp_path / "killed")
    for each in (plain, place):
        each.document |= {"woodbury": {"policy": "all", "dtype": "fp16"}}
    truth = plain.run_forked()
    place.killed_at_the_gate()
    frames = place.run_forked()
    assert outcomes(frames) == outcomes(truth)
    assert resumed_at(frames)[0] > 0
    records = [frame.outcome["record"] for frame in frames if isinstance(frame, LayerDone)]
    assert [each["gradient_rows"] for each in records if each["branch"] == "woodbury"] != []


@pytest.mark.nightly(
    covered_by=(
        "tests/worker/execution/test_resume.py::test_killed_in_the_middle",
        # with the checks of every job
        "tests/engine/collection/test_killed_attempts.py::test_one_rank_is_killed_anywhere",
        "tests/engine/collection/test_killed_attempts.py::test_what_is_compared_is_not_nothing",
    )
)
def test_killed_with_the_checks_of_every_job(tmp_path: Path) -> None:
    plain, place = Place(tmp_path / "plain"), Place(tmp_path / "killed")
    for each in (plain, place):
        del each.document["collection"]["self_check"]
    truth = outcomes(plain.run_forked())
    # some of the forward passes are those of checks
    assert all(row["record"]["examples_checked"] > 4 for row in truth)
    place.killed_at_the_gate()
    frames = place.run_forked()
    assert outcomes(frames) == truth
    assert resumed_at(frames)[0] > 0


@pytest.mark.nightly(
    covered_by=(
        "tests/worker/execution/test_resume.py::test_killed_in_the_middle",
        # of three passes
        "tests/engine/collection/test_killed_attempts.py::test_one_rank_is_killed_anywhere",
        "tests/engine/collection/test_checkpoints.py::test_finished_passes_are_not_made_again",
    )
)
def test_killed_in_the_second_pass(tmp_path: Path) -> None:
    undisturbed = outcomes(Place(tmp_path / "plain", PARTS).run_forked())
    place = Place(tmp_path / "killed", PARTS, at=2 + BATCHES + 20)
    # else a disk that takes its time for one of the first pass leaves none for the second
    program = tmp_path / "saves.py"
    program.write_text(AT_EVERY_BATCH)
    place.killed_at_the_gate(sys.executable, "-P", str(program))
    frames = place.run_forked()
    assert outcomes(frames) == undisturbed
    batch, batches = resumed_at(frames)
    assert batches == 3 * BATCHES
    assert BATCHES <= batch < 2 * BATCHES


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("sync", [4, 5], ids=["the manifest", "the sums"])
def test_killed_while_a_checkpoint_is_written(undisturbed: list[Any], tmp_path: Path, sync: int) -> None:
    place = Place(tmp_path)
    frames = place.run(*dying(tmp_path, sync))
    assert not isinstance(frames[-1], Finished)
    assert list(place.scratch(1).rglob(".part-*"))
    again = place.run_forked()
    assert outcomes(again) == undisturbed
    assert resumed_at(again)[0] > 0


@pytest.mark.nightly(
    covered_by=(
        "tests/worker/execution/test_resume.py::test_killed_while_a_checkpoint_is_written",
        "tests/engine/collection/test_killed_attempts.py::test_one_rank_is_killed_anywhere",
        "tests/engine/collection/test_checkpoints.py::test_a_damaged_checkpoint_is_discarded",
    )
)
def test_a_torn_checkpoint_is_said_to_be(undisturbed: list[Any], tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.killed_at_the_gate()
    (sums,) = place.scratch(1).rglob("*.safetensors")
    os.truncate(sums, sums.stat().st_size // 2)
    frames = place.run_forked()
    assert outcomes(frames) == undisturbed
    lines = [frame.message for frame in frames if isinstance(frame, LogLine) and frame.level == "warning"]
    assert any("discarded" in line and "safetensors" in line for line in lines)


@pytest.mark.part(of=3, law="a job that was stopped goes on")
def test_a_zombie_reaches_nothing_of_a_later_attempt(undisturbed: list[Any], tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.killed_at_the_gate()
    # the later attempt dies, too, while the earlier one writes again as if it had never been killed
    kept = tmp_path / "kept"
    shutil.copytree(place.scratch(1), kept)
    place.run(*dying(tmp_path, 1))
    shutil.copytree(kept, place.scratch(1))
    for file in place.scratch(1).rglob("*.safetensors"):
        file.write_bytes(b"\0" * file.stat().st_size)
    frames = place.run_forked()
    assert outcomes(frames) == undisturbed
    assert resumed_at(frames)[0] > 0


@pytest.mark.part(of=3, law="a job that was stopped goes on")
def test_killed_between_two_analyses(tmp_path: Path) -> None:
    kinds = ["factors", "capacity", "reconstruction"]
    document = {"kind": kinds, "keep": []}
    plain, place = Place(tmp_path / "plain"), Place(tmp_path / "killed")
    for each in (plain, place):
        each.document |= document
    undisturbed = rows_of(plain.run_forked())
    program = tmp_path / "dies.py"
    program.write_text(DIE_BETWEEN)
    before = place.run(sys.executable, "-P", str(program))
    done = rows_of(before)
    assert [kind for kind, _ in done] == ["factors", "factors", "factors", "capacity"]
    place.completed = sorted(done)
    after = place.run_forked()
    assert isinstance(after[-1], Finished)
    assert not done.keys() & rows_of(after).keys()
    assert {**done, **rows_of(after)} == undisturbed
    assert [frame.kind for frame in after if isinstance(frame, Summarised)] == kinds


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["told", "killed"])
def test_an_analysis_that_is_refused_is_refused_again_by_a_resumed_job(tmp_path: Path, killed: bool) -> None:
    """A landing tells the attempt what an earlier one has done; the test above has that killed."""
    plain, place = Place(tmp_path / "plain"), Place(tmp_path / "killed")
    for each in (plain, place):
        each.document |= {"kind": ["factors", "natural_gradient", "capacity"], "keep": []}
        each.document["model"]["kwargs"]["saturated"] = True  # type: ignore[index] # a mapping
    frames = plain.run_forked()
    undisturbed, last = rows_of(frames), frames[-1]
    assert isinstance(last, Finished)
    [refused] = last.refused
    assert (refused.kind, refused.layer, refused.pointer) == ("natural_gradient", "head", "/natural_gradient")
    said = "`natural_gradient` was refused, and the other analyses are done: layer `head` has no curvature"
    assert any(said in frame.message for frame in frames if isinstance(frame, LogLine) and frame.level == "warning")
    if killed:
        program = tmp_path / "dies.py"
        program.write_text(DIE_BETWEEN)
        done = rows_of(place.run(sys.executable, "-P", str(program)))
    else:
        done = dict(list(undisturbed.items())[: 1 + [kind for kind, _ in undisturbed].index("capacity")])
    place.completed = sorted(done)
    after = place.run_forked()
    assert isinstance(after[-1], Finished)
    assert after[-1].refused == last.refused
    assert {**done, **rows_of(after)} == undisturbed
    assert [frame.kind for frame in after if isinstance(frame, Summarised)] == ["factors", "capacity"]


def rows_of(frames: list[Frame]) -> dict[tuple[str, int], Any]:
    """What the ledger's digests cover, by row."""
    return {(frame.kind, frame.ordinal): frame.outcome for frame in frames if isinstance(frame, LayerDone)}


def inputs_of(frames: list[Frame]) -> tuple[str | None, str | None]:
    assert isinstance(frames[-1], Finished)
    return frames[-1].model_sha256, frames[-1].data_sha256


@pytest.mark.nightly(covered_by="tests/worker/execution/test_resume.py::test_killed_in_the_middle")
def test_a_resumed_job_ends_with_the_digests_of_model_and_data(tmp_path: Path) -> None:
    plain, place = Place(tmp_path / "plain"), Place(tmp_path / "killed")
    undisturbed = inputs_of(plain.run_forked())
    assert all(undisturbed)
    place.killed_at_the_gate()
    frames = place.run_forked()
    assert resumed_at(frames)[0] > 0
    assert inputs_of(frames) == undisturbed
