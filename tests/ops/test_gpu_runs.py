"""GPU runs walk from a copy of the tree and a folder of wheels, on a machine that lacks what they hold.

Without a GPU the tests are skipped one by one, and the benchmark measures small sizes on the CPU.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ops.gpu import LACKING, OF_PROCESSES, RESULTS, SECTIONS, TESTS

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "benchmarks",
    "catalog",
    "engine",
    "jobs",
    "kronoscope",
    "ops",
    "tests/gpu",
    "tests/engine/operators",
    "worker",
)
FILES = ("pyproject.toml", "constraints.txt", "tests/__init__.py", "tests/oracles.py", "tests/known_spectra.py")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of the distributions that such a machine lacks, packed again from their installation."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in LACKING:
        found = importlib.metadata.distribution(name)
        with zipfile.ZipFile(folder / f"{name}.whl", "w") as archive:
            for file in found.files or ():
                if not str(file).startswith("..") and "__pycache__" not in str(file):
                    archive.write(str(found.locate_file(file)), str(file))
    return folder


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine's packages without what is lacking."""
    # named as on any machine: the code of what is installed is not looked into
    folder, installed = tmp_path_factory.mktemp("machine") / "site-packages", Path(sysconfig.get_path("purelib"))
    folder.mkdir()
    lacking = {
        file.parts[0]
        for name in LACKING
        for file in importlib.metadata.distribution(name).files or ()
        if file.parts[0] not in ("..", "__pycache__")
    }
    for each in installed.iterdir():
        if each.name not in lacking and "kronoscope" not in each.name:
            (folder / each.name).symlink_to(each)
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree, without its history; what is compiled is not compiled anew."""
    folder = tmp_path_factory.mktemp("copy") / "tree"
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("results", "*.pyc.*"))
    for name in FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(tree: Path, packages: Path, *words: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("KRONOSCOPE_", "PYTEST_"))}
    variables = {**given, "PYTHONPATH": str(packages), "KRONOSCOPE_COMMIT": "a copy", "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).resolve()), "ops/gpu.py", *words]
    return subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, check=False, timeout=600)


def test_every_file_of_tests_has_its_place() -> None:
    listed = {f"test_{name}_on_cuda.py" for name in TESTS} | set(OF_PROCESSES)
    assert listed == {each.name for each in (ROOT / "tests" / "gpu").glob("test_*.py")}


def test_tests_leave_a_line_each(tree: Path, packages: Path, wheels: Path) -> None:
    done = run(tree, packages, "test", "--wheels", str(wheels), "tests/gpu/test_collection_on_cuda.py")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tree / RESULTS.name).read_text().splitlines()]
    assert len(lines) > 10
    assert {each["outcome"] for each in lines} <= {"passed", "skipped"}


@pytest.mark.nightly(covered_by="tests/ops/test_gpu_runs.py::test_tests_leave_a_line_each")
def test_no_test_begins_once_time_is_out(tree: Path, packages: Path, wheels: Path) -> None:
    words = ("--wheels", str(wheels), "--seconds", "-1", "tests/gpu/test_collection_on_cuda.py")
    done = run(tree, packages, "test", *words)
    assert done.returncode != 0
    assert "the time of this run is out" in done.stdout


def stored_after(tree: Path, packages: Path, wheels: Path, *sections: str) -> Any:
    """Run sections of the benchmark; return what they have stored."""
    # the seconds of a section are those of a GPU: a busy processor may take many times as long
    done = run(tree, packages, "bench", "--wheels", str(wheels), "--patience", "8", "--sections", *sections)
    assert done.returncode == 0, done.stdout + done.stderr
    stored = json.loads((tree / "benchmarks" / "results" / "device.json").read_text())
    assert stored["commit"] == "a copy"
    assert {"machine", *sections} <= stored["figures"].keys()
    return stored


def failures(figures: Any) -> dict[str, str]:
    """Return the sentence of each row that was not measured."""
    return {
        f"{section}, {name}": row["not_measured"]
        for section, rows in figures.items()
        for name, row in rows.items()
        if isinstance(row, dict) and "not_measured" in row
    }


def test_a_section_is_stored_beside_the_machine(tree: Path, packages: Path, wheels: Path) -> None:
    stored = stored_after(tree, packages, wheels, "eigh")
    assert stored["figures"]["eigh"]
    assert failures(stored["figures"]) == {}


@pytest.mark.nightly(covered_by="tests/ops/test_gpu_runs.py::test_a_section_is_stored_beside_the_machine")
def test_each_section_adds_to_what_is_stored(tree: Path, packages: Path, wheels: Path) -> None:
    stored = stored_after(tree, packages, wheels, "mlp", "eigh")
    assert len(stored["claims"]) >= 8
    assert {"cold", "checked", "unchecked", "gradient", "curvlinops"} <= stored["figures"]["mlp"].keys()
    absent = failures(stored["figures"])
    assert set(absent) <= {"mlp, curvlinops"}
    assert all("could not be imported" in sentence for sentence in absent.values())


@pytest.mark.nightly(covered_by="tests/ops/test_gpu_runs.py::test_a_section_is_stored_beside_the_machine")
def test_every_section_measures_all_but_absent_peers(tree: Path, packages: Path, wheels: Path) -> None:
    stored = stored_after(tree, packages, wheels, *SECTIONS)
    rows = {"curvlinops", "profile_of_operations", "tf32", "errors_against_float64"}
    assert rows <= stored["figures"]["gpt2_without_head"].keys()
    absent = failures(stored["figures"])
    assert {name.partition(", ")[2].rpartition(": ")[2] for name in absent} <= {
        "curvlinops",
        "dattri_llm",
        "kronfluence",
    }
    assert all("could not be imported" in sentence for sentence in absent.values())


def test_sections_take_six_minutes_together() -> None:
    assert sum(SECTIONS.values()) <= 360
