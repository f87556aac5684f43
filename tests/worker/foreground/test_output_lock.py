"""One run at a time writes into an output folder; a second one is refused, and the lock ends with its run."""

import errno
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from catalog.frames import Finished, decode
from tests.worker.foreground.test_foreground import DOCUMENT, frames_of, json_file
from tests.worker.foreground.test_foreground import foreground as foreground  # noqa: PLC0414 - a fixture
from worker.foreground.output_lock import OutputInUse, OutputLock

OTHER = json.dumps({"document": {**DOCUMENT, "labels": {"a": "b"}}, "threads": 1, "replace": True}).encode()


def test_a_second_run_in_the_folder_is_refused_and_the_first_keeps_its_results(foreground: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = foreground(["layer", 0], ["pids"], ["wait_for", str(tmp_path / "go")], ["layer", 1], ["finish"])
    while b'"frame":"layer"' not in (line := first.stdout.readline()) and line:
        pass
    second = foreground(["layer", 5], ["finish"], request=OTHER)
    (refused,) = frames_of(second)
    assert (second.wait(240), refused.category, refused.code) == (2, "usage", "output_in_use")
    assert str(out) in refused.message
    assert "give another --output" in refused.message
    (tmp_path / "go").touch()
    assert frames_of(first)[-1] == Finished()
    assert first.wait(240) == 0
    assert [row["ordinal"] for row in json_file(out / "results.json")["layers"]] == [0, 1]
    assert sorted(path.name for path in out.iterdir()) == ["artifacts", "job.json", "log.jsonl", "results.json"]


@pytest.mark.real_programs
def test_a_killed_run_leaves_no_lock(foreground: Any, tmp_path: Path) -> None:
    process = foreground(["plan", {"parts": [["a"]]}], ["pids"], ["sleep", 600])
    decode(process.stdout.readline())
    with pytest.raises(OutputInUse):
        OutputLock(tmp_path / "out")
    process.kill()
    process.wait()
    assert foreground(["finish"]).wait(240) == 0
    assert not list((tmp_path / "out").glob(".*"))


def test_a_folder_that_is_refused_is_left_as_it_was(foreground: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.json").write_text("mine")
    assert foreground(["finish"]).wait(240) == 2
    assert [path.name for path in out.iterdir()] == ["results.json"]


def test_the_lock_is_taken_again_once_it_is_released(tmp_path: Path) -> None:
    lock = OutputLock(tmp_path)
    with pytest.raises(OutputInUse):
        OutputLock(tmp_path)
    lock.release()
    lock.release()
    assert not list(tmp_path.iterdir())
    OutputLock(tmp_path).release()


def test_a_folder_without_locks_is_used_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    locks = [OutputLock(tmp_path), OutputLock(tmp_path)]
    assert not list(tmp_path.iterdir())
    for lock in locks:
        lock.release()
    OutputLock(tmp_path / "read-only or absent").release()
