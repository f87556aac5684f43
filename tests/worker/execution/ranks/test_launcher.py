"""The launcher: one writer, the rank that failed named within seconds, and nothing left of it however it ends."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from catalog.frames import Failed, Finished, Frame, LogLine, Stopped
from tests.machine.stopwatch import Stopwatch
from worker.process.child_process import Child

LAUNCHER = (sys.executable, "-P", str(Path(__file__).parent / "scripted_rank.py"))
Script = list[list[tuple[str, Any]]]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Any]:
    """``launched([steps of rank 0], [steps of rank 1])``: a guarded launcher of that many ranks."""
    with contextlib.ExitStack() as children:

        def run(*script: list[tuple[str, Any]]) -> Child:
            assignment = {"document": {"world_size": len(script)}, "script": script, "scratch": str(tmp_path / "s")}
            child = Child.start(assignment, subprocess.DEVNULL, os.environ, LAUNCHER)
            return children.enter_context(contextlib.closing(child))

        yield run


def heard(child: Child) -> tuple[list[str], Frame]:
    """The messages in order, and the last frame, of which there is one."""
    *before, last = child.frames()
    assert all(isinstance(each, LogLine) for each in before)
    return [each.message for each in before if isinstance(each, LogLine)], last


def test_rank_0_alone_is_heard_and_all_must_finish(launched: Any, tmp_path: Path) -> None:
    long = "x" * 300_000  # more than a pipe or a socket holds at once
    child = launched(
        [("log", "one"), ("log", long), ("finish", "of 0")],
        [("log", "unheard"), ("sleep", 0.5), ("finish", "of 1")],
    )
    assert heard(child) == (["one", long], Finished(model_sha256="of 0"))
    assert child.wait(240) == 0
    assert not (tmp_path / "s").exists()


def test_a_killed_rank_is_named_within_seconds_though_the_other_listens_to_nobody(launched: Any) -> None:
    """As one does that waits on the device for the other; and what it was about to say is cut off, not passed on."""
    child = launched(
        [("deaf", None), ("log", "begun"), ("torn", None), ("sleep", 600)],
        [("sleep", 1), ("kill_self", None)],
    )
    frames = child.frames()
    assert next(frames) == LogLine(level="info", message="begun")
    since = Stopwatch()
    last = list(frames)
    assert child.wait(240) == 3
    assert since.seconds() < 10
    *said, failed = last
    assert isinstance(failed, Failed)
    assert (failed.category, failed.code) == ("transient", "rank_lost")
    assert failed.message.startswith("rank 1 of 2 ended without a word (SIGKILL)")
    assert said == [LogLine(level="warning", message=failed.message)]


def test_the_first_error_is_the_one_that_is_told_with_its_rank(launched: Any) -> None:
    """The others see it as the loss of a rank, some of them sooner than it is told."""
    own = {"category": "fatal", "code": "not_converged", "message": "every solver failed", "layer": "h.0"}
    lost = {"category": "transient", "code": "rank_failed", "message": "rank 2 of 3 failed"}
    child = launched([("fail", lost)], [("sleep", 600)], [("sleep", 0.3), ("fail", own)])
    _, last = heard(child)
    assert isinstance(last, Failed)
    assert (last.category, last.code, last.layer) == ("fatal", "not_converged", "h.0")
    assert last.message == "rank 2 of 3: every solver failed"
    assert child.wait(240) == 4


def test_a_stop_reaches_every_rank(launched: Any) -> None:
    child = launched([("stoppable", None)], [("stoppable", None)])
    frames = child.frames()
    next(frames)
    child.terminate()
    assert list(frames) == [Stopped()]
    assert child.wait(240) == 5


@pytest.mark.parametrize("killed", ["guardian", "launcher"])
def test_no_rank_outlives_its_guardian_or_its_launcher(launched: Any, ended: Any, killed: str) -> None:
    child = launched([("stoppable", None)], [("stoppable", None)])
    message = next(child.frames()).message
    below = {each.pid: each for each in psutil.Process(child.pid).children(recursive=True)}
    assert int(re.findall(r"\d+", message)[0]) in below
    assert len(below) >= 3  # the launcher, and two ranks with sessions of their own
    (launcher,) = psutil.Process(child.pid).children()
    os.kill(child.pid if killed == "guardian" else launcher.pid, signal.SIGKILL)
    assert ended(list(below))
    assert child.wait(240) == 128 + signal.SIGKILL
