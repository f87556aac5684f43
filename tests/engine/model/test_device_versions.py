"""Device versions are asked of the libraries that are loaded, and unknown where they cannot be asked."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.model import device_versions
from engine.model.determinism import Numerics
from engine.model.device_versions import UNKNOWN

ROOT = Path(__file__).resolve().parents[3]
SAYS = "int {name}GetProperty(int which, int *value) {{ *value = {version}[which]; return {status}; }}"
ASK = (
    "import ctypes, sys\n"
    "from engine.model import device_versions\n"
    "ctypes.CDLL(sys.argv[1])\n"
    "print(device_versions._library_version('cublas'), device_versions._library_version('cusolver'))\n"
)


NVML = (
    "int nvmlInit_v2(void) {{ return {status}; }}\n"
    "int nvmlShutdown(void) {{ return 0; }}\n"
    "int nvmlSystemGetDriverVersion(char *into, unsigned size) {{\n"
    '    const char *says = "580.159.04";\n'
    "    for (unsigned i = 0; i < size && i < 11; i++) into[i] = says[i];\n"
    "    return size < 11;\n"
    "}}\n"
)


def library(path: Path, name: str, version: str, status: int = 0) -> Path:
    """Compile a library that says its version as CUDA's do."""
    return compiled(path, SAYS.format(name=name, version=f"((int[]){{{version}}})", status=status))


def compiled(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=text, text=True, check=True)
    return path


def asked(loaded: Path) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", ASK, str(loaded)], capture_output=True, text=True, check=True, cwd=ROOT
    )  # fmt: skip
    return ran.stdout.split()


@pytest.mark.parametrize("folders", [("lib", "lib"), ("cublas/lib", "cusolver/lib")])
def test_libraries_say_their_versions(tmp_path: Path, folders: tuple[str, str]) -> None:
    """CuSOLVER's too before it is loaded, as its wheels put it beside cuBLAS."""
    loaded = library(tmp_path / folders[0] / "libcublas.so.13", "cublas", "13, 1, 2")
    library(tmp_path / folders[1] / "libcusolver.so.12", "cusolver", "12, 0, 4")
    assert asked(loaded) == ["13.1.2", "12.0.4"]


def test_nothing_fails_where_a_library_does_not_say_it(tmp_path: Path) -> None:
    loaded = library(tmp_path / "libcublas.so.13", "cublas", "13, 1, 2", status=1)
    (tmp_path / "libcusolver.so.12").write_bytes(b"no library")
    assert asked(loaded) == [UNKNOWN, UNKNOWN]
    assert asked(library(tmp_path / "libcublas.so.14", "other", "1, 0, 0")) == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize(("status", "version"), [(0, "580.159.04"), (9, UNKNOWN), (None, UNKNOWN)])
def test_the_driver_says_its_version(tmp_path: Path, status: int | None, version: str) -> None:
    """Where NVML does not begin, or is not there, it is unknown."""
    text = "int none;" if status is None else NVML.format(status=status)
    compiled(tmp_path / "libnvidia-ml.so.1", text)
    ran = subprocess.run(
        [sys.executable, "-c", "from engine.model import device_versions; print(device_versions._driver())"],
        capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )  # fmt: skip
    assert ran.stdout.strip() == version


def test_maps_that_cannot_be_read_leave_versions_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_versions, "_MAPPED", tmp_path / "absent")
    assert device_versions._library_version.__wrapped__("cublas") == UNKNOWN


def test_a_device_that_is_not_here_is_unknown_and_a_cpu_has_none_of_it() -> None:
    here, there = (Numerics.here(torch.device(name)).recorded() for name in ("cpu", "cuda"))
    # keys of caches and conditions of checkpoints that CPUs have written
    assert set(here) == {"device", "instructions", "threads", "version", "attention", "precision", "deterministic"}
    fields = {"device_name", "multiprocessors", "driver", "cuda", "cublas", "cudnn", "cusolver"}
    assert set(there) - set(here) == fields
    if not torch.cuda.is_available():
        assert {there[name] for name in fields - {"cuda"}} == {UNKNOWN}
