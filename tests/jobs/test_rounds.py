"""Rounds: each at its own interval, whatever the others do, and one more call at the end."""

import threading
from collections import Counter
from collections.abc import Callable

import pytest
import structlog
import structlog.testing

from jobs.errors import LedgerUnavailable
from jobs.rounds import Rounds
from tests.machine.stopwatch import until

LOG = structlog.get_logger("kronoscope.test")
NEVER = 3600.0


class Calls(Counter[str]):
    """Functions that count their calls."""

    def of(self, name: str, error: Exception | None = None) -> Callable[[], int]:
        def call() -> int:
            self[name] += 1
            if error is not None:
                raise error
            return 0

        return call


@pytest.mark.parametrize("error", [LedgerUnavailable("away"), ConnectionError("no broker"), KeyError("a bug")])
def test_a_round_that_fails_stops_no_other_and_is_tried_again(error: Exception) -> None:
    calls = Calls()
    rounds = Rounds("t", [("bad", 0.01, calls.of("bad", error)), ("good", 0.01, calls.of("good"))], LOG)
    rounds.start()
    until(lambda: min(calls["bad"], calls["good"]) > 3, 240, "the rounds were made")
    rounds.stop(240)
    assert rounds.failing == {"bad": type(error)}


def test_a_failure_is_logged_once_and_so_is_its_end() -> None:
    errors = [LedgerUnavailable("away"), LedgerUnavailable("away still"), KeyError("a bug")]
    calls = Calls()

    def failing() -> int:
        calls["failing"] += 1
        if errors:
            raise errors.pop(0)
        return 7 if calls["failing"] == 4 else 0

    rounds = Rounds("t", [("swept", 0.01, failing)], LOG)
    with structlog.testing.capture_logs() as lines:
        rounds.start()
        until(lambda: calls["failing"] > 5, 240, "the rounds were made")
        rounds.stop(240)
    said = [(line["event"], line.get("why"), line.get("exc_info"), line.get("number")) for line in lines]
    assert said == [
        ("a round fails; it is tried again", "away", False, None),
        ("a round fails; it is tried again", "'a bug'", True, None),
        ("a round works again", None, None, None),
        ("swept", None, None, 7),
    ]
    assert not rounds.failing


def test_each_has_an_interval_of_its_own_and_may_be_called_at_once_or_later() -> None:
    calls = Calls()
    table = [
        ("often", 0.01, calls.of("often")),
        ("seldom", NEVER, calls.of("seldom")),
        ("late", 0.01, calls.of("late")),
    ]
    rounds = Rounds("t", table, LOG)
    rounds.postpone("late", NEVER)
    rounds.start()
    until(lambda: calls["often"] > 5, 240, "the rounds were made")
    assert (calls["seldom"], calls["late"]) == (1, 0)
    rounds.postpone("seldom", 0)
    until(lambda: calls["seldom"] == 2, 240, "the rounds were made")
    rounds.stop(240)
    assert calls["late"] == 0


def test_one_that_is_asked_for_during_its_call_is_called_again() -> None:
    under_way, go, calls = threading.Event(), threading.Event(), Calls()

    def call() -> None:
        calls["again"] += 1
        under_way.set()
        go.wait(240)

    rounds = Rounds("t", [("again", NEVER, call)], LOG)
    rounds.start()
    under_way.wait(240)
    rounds.postpone("again", 0)
    go.set()
    until(lambda: calls["again"] == 2, 240, "the rounds were made")
    rounds.stop(240)


def test_it_stops_after_the_call_under_way_and_with_the_last() -> None:
    under_way, go, calls = threading.Event(), threading.Event(), Calls()
    table = [("slow", 0.01, lambda: under_way.set() or go.wait(240)), ("next", 0.01, calls.of("next"))]  # type: ignore[func-returns-value]
    rounds = Rounds("t", table, LOG, last=calls.of("last"))
    rounds.start()
    under_way.wait(240)
    rounds.stop(0)  # it does not wait for the store that is silent
    assert calls == {}
    go.set()
    rounds.stop(240)
    assert calls == {"last": 1}
