"""The child seen from its parent."""

import contextlib
import errno
import gc
import itertools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from catalog.frames import MAX_FRAME_BYTES, Finished, LogLine, Stopped
from worker.process import child_process as child_module
from worker.process import process_group
from worker.process.child_process import Child, MalformedFrame, child_environment

pytestmark = pytest.mark.real_programs


@pytest.fixture
def start(scripted: Any) -> Iterator[Any]:
    """Start a scripted child, and end it after the test."""
    with contextlib.ExitStack() as children:

        def run(*steps: Any, assignment: Any = None, environment: Any = None, output: Any = subprocess.DEVNULL) -> Any:
            child = Child.start(assignment or {}, output, environment or os.environ, scripted(*steps))
            return children.enter_context(contextlib.closing(child))

        yield run


def test_frames_come_in_order_and_the_code_after_them(start: Any) -> None:
    child = start(["log", "one"], ["log", "two"], ["finish"])
    assert list(child.frames()) == [
        LogLine(level="info", message="one"),
        LogLine(level="info", message="two"),
        Finished(),
    ]
    assert child.wait(240) == 0


def test_the_assignment_arrives_whole(start: Any) -> None:
    assignment = {"document": {"kind": "factors", "labels": {"a": "ü" * 100_000}}, "completed": [["factors", 0]]}
    child = start(["echo_assignment"], ["finish"], assignment=assignment)
    assert json.loads(next(child.frames()).message) == assignment


def test_a_child_that_never_reads_does_not_block_its_parent(start: Any) -> None:
    child = start(["never_read"], ["log", "here"], ["sleep", 600], assignment={"document": "x" * 2**20})
    assert next(child.frames()).message == "here"


def test_a_child_that_dies_leaves_its_signal(start: Any) -> None:
    child = start(["log", "one"], ["kill_self"])
    assert len(list(child.frames())) == 1
    assert child.wait(240) == 128 + signal.SIGKILL


def test_sigterm_stops_it_at_its_checkpoint(start: Any) -> None:
    child = start(["log", "ready"], ["wait_for_sigterm"])
    frames = child.frames()
    next(frames)
    child.terminate()
    assert list(frames) == [Stopped()]
    assert child.wait(240) == 5


def test_a_stop_before_it_has_begun_ends_it(start: Any) -> None:
    child = start(["sleep", 600])
    child.terminate()
    assert list(child.frames()) == []
    assert child.wait(240) == 128 + signal.SIGTERM


def test_kill_ends_a_child_that_ignores_sigterm_and_its_own_children(start: Any, ended: Any) -> None:
    child = start(["ignore_sigterm"], ["pids"], ["sleep", 600])
    pids = json.loads(next(child.frames()).message)
    child.terminate()
    with pytest.raises(TimeoutError):
        child.wait(0.2)
    child.kill()
    child.wait(240)
    assert ended([child.pid, *pids], 0)


def test_what_a_finished_child_left_running_is_gone_when_wait_returns(start: Any, ended: Any) -> None:
    child = start(["pids"], ["finish"])
    frames = child.frames()
    own, sleeper = json.loads(next(frames).message)
    assert list(frames) == [Finished()]  # the sleeper holds the frame pipe open until it is killed
    child.wait(240)
    assert ended([own, sleeper], 0)


def test_what_left_its_group_is_gone_when_wait_returns(start: Any, ended: Any) -> None:
    child = start(["detached"], ["finish"], output=subprocess.PIPE)
    frames = child.frames()
    daemon = int(next(frames).message)
    assert list(frames) == [Finished()]
    assert list(child.output(1_000)) == []
    child.wait(240)
    assert ended([daemon], 0)


def test_kill_ends_what_left_its_group(start: Any, ended: Any) -> None:
    child = start(["detached"], ["sleep", 600])
    daemon = int(next(child.frames()).message)
    child.kill()
    child.wait(240)
    assert ended([daemon])  # its new parent reaps it when it likes


def test_nobody_else_with_the_pipe_can_make_its_reader_wait(start: Any) -> None:
    child = start(["detached"], ["log", "last words"], ["sleep", 600], output=subprocess.PIPE)
    frames = child.frames()
    daemon = int(next(frames).message)
    assert next(frames).message == "last words"
    os.kill(child.pid, signal.SIGKILL)  # without its guardian nobody finds what left the group
    try:
        assert list(frames) == []
        assert list(child.output(1_000)) == []
        assert child.wait(240) == 128 + signal.SIGKILL
    finally:
        os.kill(daemon, signal.SIGKILL)


def test_a_killed_guardian_takes_the_group_with_it(start: Any, ended: Any) -> None:
    child = start(["pids"], ["sleep", 600])
    frames = child.frames()
    pids = json.loads(next(frames).message)
    os.kill(child.pid, signal.SIGKILL)
    assert list(frames) == []
    assert child.wait(240) == 128 + signal.SIGKILL
    assert ended(pids, 0)


@pytest.mark.parametrize(
    "text",
    ["garbage\n", "null\n", "[]\n", '{"frame": "unknown"}\n', '{"frame": ["log"]}\n', '{"frame": "log"}\n',
     '{"frame": "summary", "kind": "capacity", "summary": {"x": NaN}}\n', "[" * 100_000 + "\n", "\n"],
)  # fmt: skip
def test_a_line_that_is_no_frame_is_told_apart(start: Any, text: Any) -> None:
    child = start(["log", "one"], ["raw", text], ["sleep", 600])
    frames = child.frames()
    next(frames)
    with pytest.raises(MalformedFrame):
        next(frames)


def test_a_line_without_end_is_bounded(start: Any) -> None:
    child = start(["flood", MAX_FRAME_BYTES + 131_072], ["sleep", 600])
    with pytest.raises(MalformedFrame, match="8,388,608"):
        next(child.frames())


def test_a_line_cut_short_by_death_is_only_a_death(start: Any) -> None:
    child = start(["raw", '{"frame": "fini'], ["kill_self"])
    assert list(child.frames()) == []
    assert child.wait(240) == 137


def test_a_service_hands_no_secret_down(start: Any) -> None:
    secrets = {
        "KRONOSCOPE_DATABASE_URL": "postgresql://u:canary@h/d",
        "DATABASE_URL": "canary",
        "KRONOSCOPE_REDIS_URL": "canary",
        "REDIS_URL": "canary",
        "PGPASSWORD": "canary",
        "KRONOSCOPE_KEY_SECRET": "canary",
        "HF_TOKEN": "canary",
        "AWS_SECRET_ACCESS_KEY": "canary",
    }
    environment = child_environment({**os.environ, **secrets, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    child = start(["echo_environment"], ["finish"], environment=environment)
    seen = json.loads(next(child.frames()).message)
    assert "canary" not in json.dumps(seen)
    assert seen["OMP_NUM_THREADS"] == "1"
    assert seen["PATH"] == os.environ["PATH"]


def test_one_that_nobody_can_look_after_is_ended_and_leaves_no_pipe(
    scripted: Any, ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made: list[int] = []
    monkeypatch.setattr(child_module, "began", made.append)
    gc.collect()  # what earlier tests left open is not closed meanwhile
    before = set(Path("/proc/self/fd").iterdir())
    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refused)
        with pytest.raises(OSError, match="nobody can look after it") as raised:
            Child.start({}, subprocess.PIPE, os.environ, scripted(["sleep", 600]))
    assert raised.value.errno == errno.EAGAIN
    del raised
    assert ended(made)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_its_own_words_can_be_read(start: Any) -> None:
    child = start(["say", "a line for humans"], ["finish"], output=subprocess.PIPE)
    assert list(child.output(1_000)) == [b"a line for humans\n"]
    assert child.wait(240) == 0


def test_a_machine_that_stood_still_gave_nobody_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds it 100 s later."""
    clock = SimpleNamespace(monotonic=itertools.count(step=100).__next__, sleep=lambda _: None)
    monkeypatch.setattr(process_group, "time", clock)
    runs = iter([True, True, False])
    monkeypatch.setattr(process_group, "_runs", lambda _: next(runs))
    assert process_group.wait_until_gone(1, 5)
    monkeypatch.setattr(process_group, "_runs", lambda _: True)
    assert not process_group.wait_until_gone(1, 5)
