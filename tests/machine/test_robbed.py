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


@pytest.mark.parametrize(
    ("room", "stolen", "passed", "failed", "told"),
    [("api", 0.0, 0, 2, 0), ("api", 1e6, 1, 1, 2), ("chaos", 1e6, 0, 2, 0)],
)
def test_it_is_told_and_given_once(
    tmp_path: Path, room: str, stolen: float, passed: int, failed: int, told: int
) -> None:
    place = tmp_path / "rooms" / room
    place.mkdir(parents=True)
    (place / "conftest.py").write_text(PLUGIN.format(stolen=stolen))
    (place / "test_it.py").write_text(FAILS_ONCE)
    options = ["-q", "--rerun-show-tracebacks", "-p", "pytest_rerunfailures", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, str(place)]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=alone)
    assert f"{failed} failed" in run.stdout, run.stdout
    assert (f"{passed} passed" in run.stdout) == (passed > 0)
    assert (f"{told} rerun" in run.stdout) == (told > 0)
    assert ("assert len(tried) == 2" in run.stdout) or not passed


def test_this_one_may_be_tried_again(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("flaky")
    assert marker.kwargs["reruns"] == 1
    assert marker.kwargs["condition"] == ATTEMPT.robbed
    assert isinstance(ATTEMPT.watch, Stopwatch)
