"""Parts of grids: the same for the same commit, all together everything."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.machine.template.pasted import PYTEST

PLUGIN = """
import pytest
from tests.machine.parts import add_options as pytest_addoption, deselect, report_header as pytest_report_header

def pytest_collection_modifyitems(config, items):
    deselect(config, items)

def pytest_configure(config):
    config.addinivalue_line("markers", "part: a part of its cases")
    config.addinivalue_line("markers", "nightly: not for a landing")
"""
TESTS = """
import pytest

@pytest.mark.part(of=4, by=())
@pytest.mark.parametrize("number", range(100))
def test_grid(number):
    pass

@pytest.mark.part(of=10**9)
@pytest.mark.parametrize("form", ["square", "round"])
@pytest.mark.parametrize("size", range(4))
def test_forms(form, size):
    pass

@pytest.mark.part(of=10**9, by=("form.real",))
@pytest.mark.parametrize("size", [0, pytest.param(1, marks=pytest.mark.part(of=10**9, by=()))])
@pytest.mark.parametrize("form", [1.0, 2.0, 1 + 1j])
def test_marks_of_a_test_and_of_a_value(form, size):
    pass

@pytest.mark.parametrize("dialect", ["first", pytest.param("second", marks=pytest.mark.part(of=2, by=(), per="file"))])
@pytest.mark.parametrize("number", range(8))
def test_files(number, dialect):
    pass

@pytest.mark.part(of=10**9, law="ends well")
def test_one_way():
    pass

@pytest.mark.part(of=10**9, law="ends well")
@pytest.mark.parametrize("number", range(8))
def test_other_ways(number):
    pass

@pytest.mark.nightly
def test_long():
    pass

def test_short():
    pass
"""


def collected(folder: Path, *options: str, within: str = ".") -> tuple[set[str], str]:
    (folder / within).mkdir(exist_ok=True)
    (folder / within / "conftest.py").write_text(PLUGIN)
    (folder / within / "test_it.py").write_text(TESTS)
    command = [
        *PYTEST,
        "--collect-only",
        "-q",
        "--rootdir",
        str(folder),
        *options,
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    return set(re.findall(r"test_it.py::(\S+)", done.stdout)), done.stdout + done.stderr


def test_a_commit_has_its_part_and_all_of_them_are_everything(tmp_path: Path) -> None:
    assert "part: a (again: --part a;" in collected(tmp_path, "-v", "--part", "a")[1]
    first, _ = collected(tmp_path, "--part", "a")
    assert {"test_short", "test_grid[0]", "test_one_way"} <= first
    assert not {each for each in first if "test_long" in each or "test_other_ways" in each}
    assert 28 <= len(first) <= 72
    assert collected(tmp_path, "--part", "a")[0] == first
    second, _ = collected(tmp_path, "--part", "b")
    assert second != first
    everything, _ = collected(tmp_path, "--part", "all")
    assert len(everything) == 141
    assert "test_long" in everything


def test_each_value_of_a_parameter_is_in_each_part(tmp_path: Path) -> None:
    found, _ = collected(tmp_path, "--part", "a")
    forms = {"test_forms[0-square]", "test_forms[0-round]", *(f"test_forms[{size}-square]" for size in (1, 2, 3))}
    assert {each for each in found if "forms" in each} == forms
    marked = {each for each in found if "marks" in each}
    assert marked == {f"test_marks_of_a_test_and_of_a_value[{form}-0]" for form in (1.0, 2.0)}


def test_a_file_is_chosen_whole(tmp_path: Path) -> None:
    parts = [collected(tmp_path, "--part", part)[0] for part in "abcde"]
    seconds = [{each for each in found if each.endswith("-second]")} for found in parts]
    assert {len(each) for each in seconds} == {0, 8}


@pytest.mark.parametrize("test", ["test_long", "test_grid[57]"])
def test_whoever_names_a_test_gets_it(tmp_path: Path, test: str) -> None:
    found, _ = collected(tmp_path, f"test_it.py::{test}", "--part", "a")
    assert found == {test}


def test_a_run_of_all_tests_fails_where_a_law_has_no_case(tmp_path: Path) -> None:
    _, output = collected(tmp_path, "tests", "--part", "a", within="tests")
    assert "tests/test_it.py::test_long has no case in a landing" in output
    assert "1 error" in output
    everything, output = collected(tmp_path, "tests", "--part", "all", within="tests")
    assert len(everything) == 141
    assert "error" not in output
