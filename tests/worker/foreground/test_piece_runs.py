"""A divided job in the foreground: its pieces one after another, each once, whatever is killed meanwhile."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from catalog.frames import Failed, Finished, Frame, LogLine, Stopped, decode
from tests.machine.template.program import FOREGROUND

CHILD = Path(__file__).parent / "dividing_child.py"
DOCUMENT = {"kind": "factors", "shards": 3}


class Runs:
    """Foreground runs into one folder, and what their children were told."""

    def __init__(self, folder: Path, started: contextlib.ExitStack) -> None:
        self._started = started
        self.output = folder / "out"
        self.log, self.here, self.go = folder / "log", folder / "here", folder / "go"

    def start(self, document: Any = DOCUMENT, **script: Any) -> subprocess.Popen[bytes]:
        script = {"count": 3, "log": str(self.log), "here": str(self.here), "go": str(self.go), **script}
        command = [sys.executable, "-S", "-P", str(CHILD), json.dumps(script)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", FOREGROUND, json.dumps(command), "--output", str(self.output),
             "--frames-to-stdout"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._started.callback(_close, process)
        assert process.stdin is not None
        process.stdin.write(json.dumps({"document": document}).encode() + b"\n")
        process.stdin.flush()
        return process

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    @property
    def order(self) -> list[int | None]:
        return [None if each["piece"] is None else each["piece"]["index"] for each in self.told]

    @property
    def job(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / "job.json").read_text())
        return found


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with contextlib.ExitStack() as started:
        yield Runs(tmp_path, started)


def _close(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def ending(process: subprocess.Popen[bytes]) -> list[Frame]:
    """The frames of a run, once it has ended."""
    assert process.stdout is not None
    frames = [decode(line) for line in process.stdout]
    process.wait(240)
    return frames


@pytest.mark.part(of=2, law="a divided run goes on")
def test_pieces_run_in_order_and_leave_an_ordinary_folder(runs: Runs) -> None:
    frames = ending(runs.start())
    assert isinstance(frames[-1], Finished)
    assert runs.order == [None, 0, 1, 2, None]
    first, *pieces, last = runs.told
    assert (first["plan"], first["pieces"]) == (None, [])
    assert [each["plan"] for each in (*pieces, last)] == [{"micro_batch": 7}] * 4
    assert [each["pieces"] for each in pieces] == [[]] * 3
    assert [(each["examples"], each["data_sha256"]) for each in last["pieces"]] == [(10, "d0"), (10, "d1"), (10, "d2")]
    assert last["divided"] == str(runs.output / "artifacts")
    said = [frame.message for frame in frames if isinstance(frame, LogLine)]
    assert "piece 2 of 3: at work" in said
    assert runs.job["state"] == "succeeded"
    assert [(each["begin"], each["end"]) for each in runs.job["pieces"]] == [(0, 10), (10, 20), (20, 30)]
    assert [each["name"] for each in runs.job["artifacts"]] == ["spectra/0.json"]
    assert sorted(path.name for path in runs.output.iterdir()) == ["artifacts", "job.json", "log.jsonl", "results.json"]


@pytest.mark.part(of=2, law="a divided run goes on")
def test_a_damaged_piece_is_no_fault_of_factors_that_the_document_does_not_name(runs: Runs) -> None:
    last = ending(runs.start(damaged=True))[-1]
    assert isinstance(last, Failed)
    assert last.pointer is None
    assert last.message == (
        "what a piece of the job has stored is damaged: layer `a`: `gradient_covariance` is not what is recorded; "
        "run the document again, with --force where rows are left: all pieces are computed anew"
    )
    assert not (runs.output / ".pieces").exists()
    assert isinstance(ending(runs.start())[-1], Finished)


@pytest.mark.real_programs
@pytest.mark.parametrize("end", ["killed", "stopped", "stopped over a run without rows"])
@pytest.mark.part(of=2, law="a divided run goes on")
def test_a_run_that_did_not_end_goes_on_with_the_piece_under_way(runs: Runs, eventually: Any, end: str) -> None:
    if end == "stopped over a run without rows":
        assert isinstance(ending(runs.start({**DOCUMENT, "shards": 2}, count=2, fail=0))[-1], Failed)
        runs.log.unlink()
    process = runs.start(wait=1)
    eventually(runs.here.exists)
    if end == "killed":
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    else:
        process.send_signal(signal.SIGTERM)
        assert isinstance(ending(process)[-1], Stopped)
        assert process.returncode == 5
    # a run that is stopped begins no other piece
    assert runs.order == [None, 0, 1]
    assert runs.job["state"] == ("running" if end == "killed" else "cancelled")
    runs.go.touch()
    frames = ending(runs.start(wait=1))
    assert isinstance(frames[-1], Finished)
    assert any(isinstance(frame, LogLine) and "did not end, which goes on" in frame.message for frame in frames)
    # neither divided nor computed twice
    assert runs.order == [None, 0, 1, 1, 2, None]
    assert [each["plan"] for each in runs.told[1:]] == [{"micro_batch": 7}] * 5
    assert runs.job["state"] == "succeeded"
    assert not (runs.output / ".pieces").exists()


@pytest.mark.real_programs
@pytest.mark.part(of=2, law="a divided run goes on")
def test_another_document_is_divided_anew(runs: Runs, eventually: Any) -> None:
    process = runs.start(wait=1)
    eventually(runs.here.exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    runs.go.touch()
    assert isinstance(ending(runs.start({**DOCUMENT, "shards": 2}, count=2))[-1], Finished)
    assert runs.order == [None, 0, 1, None, 0, 1, None]
    assert len(runs.job["pieces"]) == 2


@pytest.mark.part(of=2, law="a divided run goes on")
def test_a_piece_that_fails_is_named(runs: Runs) -> None:
    process = runs.start(fail=1)
    last = ending(process)[-1]
    assert isinstance(last, Failed)
    assert last.message == "piece 2 of 3 of round `collect`: it is bad"
    assert (last.pointer, process.returncode) == ("/data", 2)
    assert runs.order == [None, 0, 1]
    assert runs.job["state"] == "failed"
