"""Files that take long come first, and those that wait go to other processes than those that compute."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.machine import file_order

SECONDS = {
    "tests/long.py": {"wall": 90.0, "cpu": 80.0, "children": 5.0},
    "tests/child.py": {"wall": 60.0, "cpu": 1.0, "children": 50.0},
    "tests/waits.py": {"wall": 70.0, "cpu": 1.0, "children": 4.0},
    "tests/short.py": {"wall": 2.0, "cpu": 2.0, "children": 0.0},
}


@pytest.fixture(autouse=True)
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "suite.json"
    path.write_text(json.dumps({"files": SECONDS}))
    monkeypatch.setattr(file_order, "RECORD", path)
    file_order.recorded.cache_clear()
    yield path
    file_order.recorded.cache_clear()


def test_long_files_come_first_and_their_tests_stay_in_order() -> None:
    names = ["short.py::b", "waits.py::1", "new.py::x", "short.py::a", "long.py::2", "waits.py::0"]
    items: list[Any] = [SimpleNamespace(nodeid=f"tests/{name}") for name in names]
    file_order.sort_by_seconds(items)
    order = ["long.py::2", "waits.py::1", "waits.py::0", "new.py::x", "short.py::b", "short.py::a"]
    assert [item.nodeid for item in items] == [f"tests/{name}" for name in order]


def test_what_has_the_processor_half_of_the_time_or_more_computes() -> None:
    assert {name: file_order.waits(name) for name in (*SECONDS, "tests/new.py")} == {
        **dict.fromkeys(SECONDS, False),
        "tests/waits.py": True,
        "tests/new.py": False,
    }


def test_without_a_record_files_stay_as_they_are_collected(record: Path) -> None:
    record.unlink()
    items: list[Any] = [SimpleNamespace(nodeid=f"tests/{name}.py::test") for name in "cab"]
    file_order.sort_by_seconds(items)
    assert [item.nodeid for item in items] == [f"tests/{name}.py::test" for name in "cab"]


def test_processes_take_files_of_their_kind_and_then_the_others(tmp_path: Path, record: Path) -> None:
    kinds = {f"waits_{number}": 1.0 for number in range(4)} | {f"computes_{number}": 10.0 for number in range(4)}
    files = {f"test_{name}.py": {"wall": 10.0, "cpu": cpu, "children": 0.0} for name, cpu in kinds.items()}
    record.write_text(json.dumps({"files": files}))
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\n"
        "from tests.machine import file_order\n"
        "from tests.machine.file_order import pytest_xdist_make_scheduler\n"
        f"file_order.RECORD = Path({str(record)!r})\n"
    )
    for name in files:
        (tmp_path / name).write_text(
            "import os, time\n\n\ndef test_it():\n    time.sleep(0.3)\n"
            f"    open({str(tmp_path / 'who')!r}, 'a').write(os.environ['PYTEST_XDIST_WORKER'] + ' {name}\\n')\n"
        )
    # a run with processes closes pytest's own folder of temporary files, where other tests have users of their own
    options = [f"--basetemp={tmp_path / 'its'}", "--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"]
    options += ["-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), *options, str(tmp_path)]
    done = subprocess.run(command, cwd=Path.cwd(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    took = [line.split() for line in (tmp_path / "who").read_text().splitlines()]
    own = [("waits" in name) is (who == "gw1") for who, name in took]
    assert len(own) == 8
    assert sum(own) >= 6, took
