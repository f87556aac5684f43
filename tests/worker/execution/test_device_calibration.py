"""The machine's pace: measured once, kept whole, and never taken from another machine or a broken file."""

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.memory.device_speed import DeviceSpeed, typical_speed
from worker.execution import device_calibration as kept
from worker.execution.device_calibration import Calibration

CPU = torch.device("cpu")


def at(store: Path, log: Any = None) -> Calibration:
    return Calibration(store=store, device=CPU, scratch=store / "waiting", log=log or (lambda *_: None))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> DeviceSpeed:
    pace = replace(typical_speed(CPU), operations_per_second=123.5)
    monkeypatch.setattr(kept, "measure_speed", lambda *_: pace)
    return pace


def test_what_was_measured_is_read_by_the_next(tmp_path: Path, measured: DeviceSpeed) -> None:
    assert at(tmp_path).read() is None
    assert at(tmp_path).measure() == measured
    assert at(tmp_path).read() == measured
    assert [path.suffix for path in (tmp_path / "pace").iterdir()] == [".json"]


def test_another_number_of_threads_is_another_machine(tmp_path: Path, measured: DeviceSpeed) -> None:
    at(tmp_path).measure()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert at(tmp_path).read() is None
    finally:
        torch.set_num_threads(threads)
    assert at(tmp_path).read() == measured


@pytest.mark.parametrize(
    "broken",
    [
        b"", b"{", b"[]", b"null", b'{"pace": 1}', b"\xff\xfe",
        {"format": "kronoscope-pace/0"}, {"machine": {"device": "another"}},
        {"pace": {"operations_per_second": 1.0}}, {"pace": "fast"},
        *({"pace": asdict(typical_speed(CPU)) | {"disk_bytes_per_second": value}}
          for value in (0, -1.0, float("nan"), float("inf"), True, "1", None)),
    ],
)  # fmt: skip
def test_what_is_garbled_or_foreign_is_measured_again(tmp_path: Path, measured: DeviceSpeed, broken: Any) -> None:
    calibration = at(tmp_path)
    calibration.measure()
    whole = json.loads(calibration.path.read_bytes())
    calibration.path.write_bytes(broken if isinstance(broken, bytes) else json.dumps(whole | broken).encode())
    assert calibration.read() is None
    calibration.measure()
    assert calibration.read() == measured


def test_a_store_that_cannot_be_written_costs_the_file_alone(tmp_path: Path, measured: DeviceSpeed) -> None:
    (tmp_path / "pace").write_text("in the way")
    said: list[tuple[str, str]] = []
    calibration = at(tmp_path, lambda level, text: said.append((level, text)))
    assert calibration.measure() == measured
    assert calibration.read() is None
    assert any("cannot be kept" in text for _, text in said)


def test_a_disk_that_is_full_costs_no_more_than_the_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []
    calibration = at(tmp_path, lambda level, text: said.append((level, text)))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        assert calibration.measure() is None
    assert ("warning", "the usual pace is taken, as the disk cannot be measured: No space left on device") in said
    # not kept as if it were this machine's
    assert calibration.read() is None


def test_measuring_is_bounded_and_leaves_nothing(tmp_path: Path) -> None:
    pace = at(tmp_path).measure()
    assert pace is not None
    assert all(value > 0 for value in asdict(pace).values())
    assert {path.name for path in tmp_path.iterdir()} == {"pace"}
