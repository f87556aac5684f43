"""The number of pieces that `shards: auto` takes."""

from typing import Any

import pytest

from worker.execution.pieces.division import choose_count, most_pieces


def plan(seconds: float | None) -> dict[str, Any]:
    return {"stages": {"collection": {"seconds": seconds}}}


@pytest.mark.parametrize(
    ("devices", "cuts", "most"), [(1, 100, 1), (2, 100, 4), (8, 100, 16), (8, 5, 5), (8, 1, 1), (0, 3, 1)]
)
def test_there_are_two_pieces_for_each_of_several_devices(devices: int, cuts: int, most: int) -> None:
    assert most_pieces(devices, cuts) == most


@pytest.mark.parametrize(
    ("seconds", "count", "why"),
    [
        (1000.0, 8, "the collection takes about 8000 s of one device; 2 pieces for each of 4 devices"),
        (60.0, 8, "2 pieces for each of 4 devices"),
        (30.0, 4, "about 240 s of one device; a piece of less than 60 s is not worth its start"),
        (1.0, 1, "is not worth its start"),
        (None, 8, "nobody foresees how long"),
    ],
)
def test_a_piece_takes_a_minute_or_more(seconds: float | None, count: int, why: str) -> None:
    # the plan is that of an eighth of the data
    found, said = choose_count(plan(seconds), 8, devices=4, cuts=100)
    assert found == count
    assert why in said


def test_one_device_takes_one_piece() -> None:
    found, said = choose_count(plan(1e6), 1, devices=1, cuts=29)
    assert found == 1
    assert "1 device is at hand" in said
