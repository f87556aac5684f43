"""The times of a run, and the judgement of it, in runs of their own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.machine.template.pasted import PYTEST

TESTS = """
import subprocess, sys, time

def test_that_waits():
    time.sleep(1.2)

def test_that_computes_in_a_child():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"], check=True)
"""
RETRIED = """
import pytest

@pytest.mark.flaky(reruns=1)
@pytest.mark.parametrize("number", range(3))
def test_it(number, tried=[]):
    tried.append(number)
    assert tried.count(number) == 2
"""
PLUGIN = "from tests.machine.suite_times import add_options as pytest_addoption, register as pytest_configure\n"


def run(folder: Path, tests: str, *options: str) -> tuple[int, dict[str, Any], str]:
    (folder / "conftest.py").write_text(PLUGIN)
    (folder / "test_it.py").write_text(tests)
    plugins = ["-p", "xdist", "-p", "pytest_rerunfailures"]
    # a run with processes closes pytest's own folder of temporary files, where other tests have users of their own
    plugins += [f"--basetemp={folder / 'its'}"]
    command = [
        *PYTEST,
        "-q",
        *plugins,
        "--rootdir",
        str(folder),
        "--times",
        "times.json",
    ]
    done = subprocess.run(
        [*command, *options, "test_it.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path.cwd())},
    )
    return done.returncode, json.loads((folder / "times.json").read_text()), done.stdout


@pytest.mark.part(of=4, by=())
@pytest.mark.parametrize("options", [(), ("--numprocesses=1",)])
def test_each_file_and_long_test_has_its_seconds(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, times, told = run(tmp_path, TESTS, "--bound-minutes=10", *options)
    assert code == 0, told
    (file,) = times["files"].values()
    assert file["tests"] == times["total"]["tests"] == 2
    assert file["wall"] > 1.7
    assert file["children"] >= 0.5 > file["cpu"]
    assert times["total"]["children"] >= 0.5
    assert "test_it.py::test_that_waits" in times["tests"]
    assert (times["retries"], times["faults"]) == ([], [])
    assert "2 tests in 0." in told


def test_a_run_beyond_its_bound_fails(tmp_path: Path) -> None:
    code, times, told = run(tmp_path, TESTS, "--bound-minutes=0.01")
    assert code == 1
    (fault,) = times["faults"]
    assert "where 0.01 are the bound" in fault
    assert f"FAULT: {fault}" in told


def test_more_than_two_second_attempts_fail_the_run_and_are_told(tmp_path: Path) -> None:
    code, times, told = run(tmp_path, RETRIED)
    assert code == 1
    assert [each["test"] for each in times["retries"]] == [f"test_it.py::test_it[{number}]" for number in range(3)]
    assert all("assert" in each["why"] or "Error" in each["why"] for each in times["retries"])
    assert "tried again: test_it.py::test_it[0]" in told
    assert times["faults"] == ["3 second attempts, where 2 may be"]


def test_two_second_attempts_pass(tmp_path: Path) -> None:
    code, times, _ = run(tmp_path, RETRIED.replace("range(3)", "range(2)"))
    assert (code, len(times["retries"]), times["faults"]) == (0, 2, [])
