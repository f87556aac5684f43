"""Remaining seconds of jobs whose stages take known times."""

from typing import Any

import pytest

from catalog.responses.remaining_time import RemainingTime, written_remaining

PLAN: dict[str, Any] = {
    "pace": "measured",
    "stages": {
        "collection": {"seconds": 100.0},
        "decomposition": {"seconds": 30.0},
        "capacity": {"seconds": 10.0},
        "reconstruction": {"seconds": 20.0},
        "cross_check": {"seconds": 40.0},
    },
}


def planned(*kinds: str, **changed: object) -> RemainingTime:
    remaining = RemainingTime(kinds)
    remaining.take_plan({**PLAN, **changed})
    return remaining


def test_before_anything_is_done_the_plan_says_all() -> None:
    assert planned("capacity", "reconstruction").take("collection", 0, 50, 7.0) == 100 + 40 + 40 + 20


def test_the_stages_and_the_clock_agree() -> None:
    seconds = planned("capacity", "reconstruction").seconds()
    assert seconds == {"collection": 100, "correction": 0, "cross_check": 40, "capacity": 40, "reconstruction": 20}
    for stage, later in (("collection", 100), ("cross_check", 60), ("capacity", 20), ("reconstruction", 0)):
        left = planned("capacity", "reconstruction").take(stage, 2, 8, 7.0)
        assert left == pytest.approx(seconds[stage] * 6 / 8 + later)
    assert planned("capacity", stages={}).seconds() is None
    assert planned("capacity", stages={"collection": {"seconds": None}}).seconds() is None
    # the layers of a second analysis, whose seconds are those of the products after them
    spectrum = planned("capacity", "spectrum", stages={**PLAN["stages"], "spectrum": {"seconds": 3600.0}}).seconds()
    assert spectrum is not None
    assert (spectrum["spectrum"], spectrum["products"], sum(spectrum.values())) == (0, 3600, 3780)


def test_the_pass_that_corrects_eigenvalues_has_its_own_seconds() -> None:
    remaining = planned("factors", stages={"collection": {"seconds": 100.0}, "correction": {"seconds": 50.0}})
    assert remaining.take("collection", 0, 10, 0.0) == 150
    assert remaining.take("collection", 5, 10, 50.0) == pytest.approx(50 + 50)
    assert remaining.take("correction", 0, 10, 100.0) == pytest.approx(50)
    assert remaining.take("correction", 5, 10, 125.0) == pytest.approx(25)


@pytest.mark.parametrize("pace", [0.5, 1.0, 2.0])
def test_the_pace_so_far_holds_for_what_is_left(pace: float) -> None:
    remaining = planned("capacity")
    remaining.take("collection", 0, 50, 0.0)
    assert remaining.take("collection", 20, 50, 40 * pace) == pytest.approx(pace * (60 + 40 + 40))
    assert remaining.take("capacity", 0, 8, 500.0) == pytest.approx(pace * 40)
    assert remaining.take("capacity", 2, 8, 506.0) == pytest.approx(18.0)  # of its own pace from here on
    assert remaining.take("capacity", 8, 8, 524.0) == 0


def test_a_slow_start_is_forgotten() -> None:
    remaining = planned("capacity", stages={"collection": {"seconds": 1.0}})
    remaining.take("collection", 0, 1000, 0.0)
    said = [remaining.take("collection", done, 1000, 30 + done) for done in range(1, 400)]  # 30 s before the first
    assert said[0] == pytest.approx(31 * 999)
    assert said[-1] == pytest.approx(601)


def test_reports_by_the_hundred_thousand_are_not_all_kept() -> None:
    remaining = planned("capacity")
    for done in range(100_000):
        remaining.take("collection", done, 200_000, done / 1000)
    assert remaining._stage is not None
    assert len(remaining._stage._reports) < 300


def test_a_plan_is_not_off_by_more_than_it_says() -> None:
    remaining = planned("capacity")
    remaining.take("collection", 0, 50, 0.0)
    assert remaining.take("collection", 25, 50, 5000.0) == pytest.approx(5000 + 2 * 80)


def test_what_an_earlier_attempt_has_done_says_nothing_about_this_ones_pace() -> None:
    remaining = planned("capacity")
    remaining.take("collection", 40, 50, 1000.0)
    assert remaining.take("collection", 45, 50, 1010.0) == pytest.approx(10 + 80)


def test_the_cross_check_comes_before_its_analysis() -> None:
    remaining = planned("reconstruction", "capacity")
    assert remaining.take("cross_check", 0, 4, 0.0) == 40 + 10
    assert remaining.take("reconstruction", 0, 4, 1.0) == 20 + 30 + 40 + 10


def test_products_with_an_exact_curvature_come_after_the_layers_of_their_analysis() -> None:
    stages = {**PLAN["stages"], "spectrum": {"seconds": 200.0}}
    remaining = planned("spectrum", "capacity", stages=stages)
    # of a spectrum's layers the decomposition is what takes time
    assert remaining.take("spectrum", 0, 4, 0.0) == 30 + 200 + 40 + 10
    assert remaining.take("products", 0, 50, 1.0) == 200 + 40 + 10
    assert planned("spectrum", stages=stages).take("collection", 0, 5, 0.0) == 100 + 30 + 200


def test_stages_that_are_not_planned_take_nothing() -> None:
    remaining = RemainingTime(("factors",))
    remaining.take_plan({"pace": "usual", "stages": {"collection": {"seconds": 10.0}}})
    assert remaining.take("collection", 0, 5, 0.0) == 10


@pytest.mark.parametrize(
    ("changed", "stage", "total"),
    [
        ({}, "model", 3),
        ({}, "collection", None),
        ({}, "collection", 0),
        ({"stages": {"collection": {"seconds": None}}}, "collection", 50),
        ({"stages": {"collection": {"seconds": 3.0}, "capacity": {"seconds": None}}}, "collection", 50),
        ({"stages": {}}, "collection", 50),
    ],
)
def test_what_is_not_known_is_not_said(changed: dict[str, object], stage: str, total: int | None) -> None:
    assert planned("capacity", **changed).take(stage, 0, total, 0.0) is None


def test_without_a_plan_nothing_is_said() -> None:
    assert RemainingTime(("capacity",)).take("collection", 3, 10, 1.0) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "1 s"), (12.4, "12 s"), (59.4, "59 s"), (60, "1 min"), (240, "4 min"), (3570, "1 h"), (3599, "1 h"),
        (7800, "2 h 10 min"), (86_400, "1 d"), (3 * 86_400 + 4 * 3600, "3 d 4 h"),
    ],
)  # fmt: skip
def test_remaining_time_is_written_as_people_say_it(seconds: float, text: str) -> None:
    assert written_remaining(seconds) == text
