"""Device versions are asked of the libraries that are loaded, and unknown where they cannot be asked."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.model import determinism
from engine.model.determinism import UNKNOWN, Numerics

VERSION, DRIVER = (13, 1, 2), b"580.159.04"


def library(name: str, version: tuple[int, ...] = VERSION, status: int = 0) -> Any:
    """A library whose functions are called as C's are, by pointers to them."""

    def told(which: int, into: Any) -> int:
        into[0] = version[which]
        return status

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    return SimpleNamespace(**{f"{name}GetProperty": kind(told)})


def nvml(status: int) -> Any:
    def told(into: Any, size: int) -> int:
        for place, each in enumerate(DRIVER + b"\0"):
            into[place] = each
        return int(size <= len(DRIVER))

    nothing = ctypes.CFUNCTYPE(ctypes.c_int)
    return SimpleNamespace(
        nvmlInit_v2=nothing(lambda: status),
        nvmlShutdown=nothing(lambda: 0),
        nvmlSystemGetDriverVersion=ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_char), ctypes.c_uint)(told),
    )


def opening(known: dict[str, Any]) -> Callable[[str], Any]:
    """What ``ctypes.CDLL`` is to be: libraries by the names of their files."""

    def opened(path: str) -> Any:
        if Path(path).name not in known:
            raise OSError(f"{path}: cannot open shared object file")
        return known[Path(path).name]

    return opened


def asked(monkeypatch: pytest.MonkeyPatch, folder: Path, loaded: Path, known: dict[str, Any]) -> list[str]:
    """The versions of cuBLAS and cuSOLVER, where one library is loaded and others lie beside it."""
    (folder / "maps").write_text(f"7f00-7f01 r-xp 00000000 08:01 42 {loaded}\n")
    monkeypatch.setattr(determinism, "_MAPPED", folder / "maps")
    monkeypatch.setattr(determinism.ctypes, "CDLL", opening(known))
    return [determinism._library_version.__wrapped__(name) for name in ("cublas", "cusolver")]


def placed(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize("folders", [("lib", "lib"), ("cublas/lib", "cusolver/lib")])
def test_libraries_say_their_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folders: tuple[str, str]
) -> None:
    """CuSOLVER's too before it is loaded, as its wheels put it beside cuBLAS."""
    loaded = placed(tmp_path / folders[0] / "libcublas.so.13")
    placed(tmp_path / folders[1] / "libcusolver.so.12")
    known = {"libcublas.so.13": library("cublas"), "libcusolver.so.12": library("cusolver", (12, 0, 4))}
    assert asked(monkeypatch, tmp_path, loaded, known) == ["13.1.2", "12.0.4"]


def test_nothing_fails_where_a_library_does_not_say_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = placed(tmp_path / "libcublas.so.13")
    placed(tmp_path / "libcusolver.so.12")
    refusing = {"libcublas.so.13": library("cublas", status=1)}
    assert asked(monkeypatch, tmp_path, loaded, refusing) == [UNKNOWN, UNKNOWN]
    assert asked(monkeypatch, tmp_path, loaded, {"libcublas.so.13": library("other")}) == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize(
    ("known", "version"),
    [({"libnvidia-ml.so.1": nvml(0)}, "580.159.04"), ({"libnvidia-ml.so.1": nvml(9)}, UNKNOWN), ({}, UNKNOWN)],
    ids=["there", "does-not-begin", "absent"],
)
def test_the_driver_says_its_version(monkeypatch: pytest.MonkeyPatch, known: dict[str, Any], version: str) -> None:
    monkeypatch.setattr(determinism.ctypes, "CDLL", opening(known))
    assert determinism._driver.__wrapped__() == version


def test_maps_that_cannot_be_read_leave_versions_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(determinism, "_MAPPED", tmp_path / "absent")
    assert determinism._library_version.__wrapped__("cublas") == UNKNOWN


def test_a_device_that_is_not_here_is_unknown_and_a_cpu_has_none_of_it() -> None:
    here, there = (Numerics.here(torch.device(name)).recorded() for name in ("cpu", "cuda"))
    # keys of caches and conditions of checkpoints that CPUs have written
    assert set(here) == {"device", "instructions", "threads", "version", "attention", "precision", "deterministic"}
    fields = {"device_name", "multiprocessors", "driver", "cuda", "cublas", "cudnn", "cusolver"}
    assert set(there) - set(here) == fields
    if not torch.cuda.is_available():
        assert {there[name] for name in fields - {"cuda"}} == {UNKNOWN}
