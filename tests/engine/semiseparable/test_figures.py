"""The table of circulating figures is the one that is counted, and the examples say what they promise."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.page_table import read_table
from benchmarks.semiseparable import NAME, PAGE, table

ROOT = Path(__file__).resolve().parents[3]


def example(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", *command], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_the_table_that_is_counted() -> None:
    lines = list(table())
    assert read_table(PAGE, NAME) == "\n".join(lines)
    assert any("| reproduced at" in line for line in lines)
    assert any("| not reproduced" in line for line in lines)


def test_the_resolvent_by_two_routes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["resolvent.py", "--points", "2048"])
    runpy.run_path(str(ROOT / "examples/resolvent.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("orders of K(z): 1 above the diagonal, 1 below") == 2
    assert "N = 2,048" in said


@pytest.mark.nightly(
    covered_by="tests/engine/semiseparable/test_layer.py::test_training_reaches_a_matrix_of_the_structure"
)
def test_a_structured_layer_learns_digits() -> None:
    lines = example("examples/structured_training.py", "--epochs", "5").splitlines()[1:]
    counts = [int(line.split()[-3].replace(",", "")) for line in lines]
    accuracies = [float(line.split()[-1].rstrip("%")) for line in lines]
    assert counts[0] == 256 * 257
    assert max(counts[1:]) < counts[0] / 4
    assert min(accuracies) > 85


_KERNEL = """
import resource, sys, torch
torch.set_num_threads(1)
from engine.semiseparable.construct_sss import construct_sss
size, beyond = int(sys.argv[1]), int(sys.argv[2])
i = torch.arange(size, dtype=torch.float64)
rows = lambda start, stop: torch.exp(-(i[start:stop, None] - i).abs() / 4)
construct_sss(lambda start, stop: rows(start, stop)[:, :64], 64, block=32, order=2)
data = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (data + beyond, data + beyond))
try:
    construct_sss(rows(0, size), block=32, order=2)
except RuntimeError as error:
    print("dense:", str(error).splitlines()[0])
matrix = construct_sss(rows, size, block=32, order=2)
x = torch.zeros(size, dtype=torch.float64)
x[5] = 1
assert float((matrix.matvec(x)[:200] - torch.exp(-(i[:200] - 5).abs() / 4)).abs().max()) < 1e-12
print("built", max(matrix.orders[0]))
"""


@pytest.mark.parametrize(("size", "beyond"), [(4096, 2**26), pytest.param(32_768, 2**30, marks=pytest.mark.nightly)])
def test_a_kernel_is_built_in_a_fraction_of_its_bytes(size: int, beyond: int) -> None:
    """Under a kernel limit beyond the process's own data; the dense way ends at it."""
    dense, built = example("-c", _KERNEL, str(size), str(beyond)).splitlines()
    assert dense.startswith("dense:")
    assert "can't allocate memory" in dense
    assert built == "built 1"
