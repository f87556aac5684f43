"""Files that take long come first, and what is listed is there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.machine.file_order import SECONDS, sort_by_seconds

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_that_is_listed_is_there() -> None:
    assert [name for name in SECONDS if not (ROOT / name).is_file()] == []


def test_long_files_come_first_and_their_tests_stay_in_order() -> None:
    longest, second = sorted(SECONDS, key=SECONDS.__getitem__, reverse=True)[:2]
    names = ["tests/a.py::test_b", f"{second}::test_1", "tests/a.py::test_a", f"{longest}::test_2", f"{second}::test_0"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    sort_by_seconds(items)
    assert [item.nodeid for item in items] == [names[3], names[1], names[4], names[0], names[2]]
