"""A second attempt is for a machine that was taken away, and for nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine.robbed import ATTEMPT
from tests.machine.stopwatch import Stopwatch

PLUGIN = """
from itertools import count
from tests.machine.robbed import ATTEMPT, pytest_collection_modifyitems
from tests.machine.stopwatch import Stopwatch

def pytest_runtest_logstart():
    seconds = count()
    ATTEMPT.watch = Stopwatch(lambda: [{stolen} * next(seconds)])
"""
FAILS_ONCE = """
tried = []

def test_it():
    tried.append(1)
    assert len(tried) == 2

def test_that_fails_always():
    assert False
"""


def attempt(place: Path, *more: str) -> subprocess.CompletedProcess[str]:
    options = ["-q", "--rerun-show-tracebacks", "-p", "pytest_rerunfailures", "--rootdir", str(place)]
    command = [sys.executable, "-m", "pytest", *options, *more, str(place)]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=alone)


@pytest.mark.parametrize(
    ("room", "stolen", "passed", "failed", "told"),
    [
        *[("api", 0.0, 0, 2, 0), ("api", 1e6, 1, 1, 2)],
        *[(room, 1e6, 0, 2, 0) for room in ("chaos", "engine", "catalog")],
    ],
)
def test_it_is_told_and_given_once(
    tmp_path: Path, room: str, stolen: float, passed: int, failed: int, told: int
) -> None:
    place = tmp_path / "rooms" / room
    place.mkdir(parents=True)
    (place / "conftest.py").write_text(PLUGIN.format(stolen=stolen))
    (place / "test_it.py").write_text(FAILS_ONCE)
    run = attempt(place)
    assert f"{failed} failed" in run.stdout, run.stdout
    assert (f"{passed} passed" in run.stdout) == (passed > 0)
    assert (f"{told} rerun" in run.stdout) == (told > 0)
    assert ("assert len(tried) == 2" in run.stdout) or not passed


@pytest.mark.parametrize("room", ["engine", "catalog"])
def test_neither_a_mark_nor_an_option_gives_numbers_a_second_attempt(tmp_path: Path, room: str) -> None:
    place = tmp_path / "rooms" / room
    place.mkdir(parents=True)
    (place / "conftest.py").write_text(PLUGIN.format(stolen=1e6))
    marked = "@pytest.mark.flaky(reruns=3)\ndef test_it"
    (place / "test_it.py").write_text("import pytest\n" + FAILS_ONCE.replace("def test_it", marked, 1))
    run = attempt(place, "--reruns=3")
    assert "2 failed" in run.stdout, run.stdout
    assert "rerun" not in run.stdout.splitlines()[-1]


def test_this_one_may_be_tried_again(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("flaky")
    assert marker.kwargs["reruns"] == 1
    assert marker.kwargs["condition"] == ATTEMPT.robbed
    assert isinstance(ATTEMPT.watch, Stopwatch)
