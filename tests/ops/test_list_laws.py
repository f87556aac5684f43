"""The list of laws: what a landing has of each, and what it says of one that a landing has nothing of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine.laws import Law, find_gaps

ROOT = Path(__file__).parents[2]
RUN = Law("tests/a.py::test_grid", 3, 12)
LEFT_OUT = Law("tests/a.py::test_long", 0, 1)
CASES = ["tests/a.py::test_grid[0]", "tests/a.py::test_grid[1]", "tests/a.py::test_grid[7]"]


def covered_by(*tests: str) -> Law:
    return Law(LEFT_OUT.name, 0, 1, tests)


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (
            LEFT_OUT,
            ["tests/a.py::test_long has no case in a landing, and names no test that holds the same (covered_by)"],
        ),
        (covered_by(RUN.name), []),
        (covered_by(CASES[1], CASES[2]), []),
        (
            covered_by(CASES[0], "tests/a.py::test_grid[2]"),
            ["tests/a.py::test_long names tests/a.py::test_grid[2] as its cover, which a landing does not run"],
        ),
        (
            covered_by(LEFT_OUT.name),
            ["tests/a.py::test_long names tests/a.py::test_long as its cover, which a landing does not run"],
        ),
    ],
)
def test_a_law_that_a_landing_leaves_out_names_one_that_it_runs(law: Law, expected: list[str]) -> None:
    assert find_gaps([RUN, law], CASES, {}) == expected


def test_a_fault_kind_is_brought_about_in_each_landing() -> None:
    kinds = {"kill": [RUN.name], "pause": [], "flood": [LEFT_OUT.name]}
    assert find_gaps([RUN, covered_by(RUN.name)], CASES, kinds) == [
        "fault kind `pause` is brought about by no test of a landing",
        "fault kind `flood` names tests/a.py::test_long, which a landing does not run",
    ]


def test_the_command_counts_cases_by_room_and_by_law(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ops.list_laws", "--all", "--json", str(tmp_path / "laws.json")]
    done = subprocess.run(
        [*command, "tests/ops/test_list_laws.py"],
        cwd=ROOT,
        env=os.environ | {"PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rooms = [line.split() for line in done.stdout.splitlines() if line.endswith("tests/ops")]
    assert rooms == [["3", "3", "0", "7", "7", "tests/ops"]]
    laws = {each["name"]: each for each in json.loads((tmp_path / "laws.json").read_text())["laws"]}
    law = laws["tests/ops/test_list_laws.py::test_a_law_that_a_landing_leaves_out_names_one_that_it_runs"]
    assert (law["landing"], law["nightly"]) == (5, 5)
