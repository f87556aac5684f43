"""Bounds of other tests stand on the stopwatch: it must go on while the machine is there, and only then."""

import time
from itertools import chain, repeat

import pytest

from tests.machine.stopwatch import Stopwatch, stolen_seconds, until


def test_it_counts_what_the_wall_counts_less_what_was_taken_from_one_processor() -> None:
    taken = chain([[10.0, 20.0]], repeat([10.0, 20.2]))
    watch, began = Stopwatch(lambda: next(taken)), time.monotonic()
    time.sleep(0.5)
    seconds, wall = watch.seconds(), time.monotonic() - began
    assert 0.3 <= seconds <= wall - 0.2 + 0.01
    assert Stopwatch(list).seconds() < 60  # a kernel that tells nothing is no reason to fail


def test_it_tells_which_share_was_taken() -> None:
    taken = iter([[10.0, 20.0], [10.1, 20.3]])
    watch, began = Stopwatch(lambda: next(taken)), time.monotonic()
    time.sleep(0.5)
    share = watch.share_taken()
    assert 0.3 / (time.monotonic() - began) <= share <= 0.3 / 0.5
    assert Stopwatch(list).share_taken() == 0


def test_the_kernel_counts_by_processor() -> None:
    before = stolen_seconds()
    after = stolen_seconds()
    assert len(before) == len(after)
    assert all(0 <= first <= second for first, second in zip(before, after, strict=True))


def test_who_stood_still_asks_once_more() -> None:
    """Between an answer and the look at the clock, that is; what was asked before is no answer any more."""
    began = time.monotonic()

    def in_a_moment() -> bool:
        if time.monotonic() - began > 0.3:
            return True
        time.sleep(0.4)
        return False

    assert until(in_a_moment, 0.1)


def test_a_wait_has_an_end() -> None:
    answers = iter([0, "", "yes"])
    assert until(lambda: next(answers), 60) == "yes"
    with pytest.raises(AssertionError, match=r"not within 0\.1 s: the moon is full"):
        until(lambda: None, 0.1, lambda: "the moon is full")
