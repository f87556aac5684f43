"""Finite numbers: nothing that JSON cannot hold leaves an analysis, and nothing is nulled without being named."""

import math
from dataclasses import dataclass

from engine.analyses.layer_analysis import finite_summary, nullify, reason


@dataclass(frozen=True)
class Inner:
    """A part of a record."""

    error: float | None
    curve: tuple[float, ...] | None


@dataclass(frozen=True)
class Outer:
    """A record as analyses return them."""

    trace: float | None
    sides: tuple[Inner, ...]
    by_name: dict[str, Inner]
    shares: dict[str, float] | None


def record(bad: float) -> Outer:
    inner = Inner(error=bad, curve=(1.0, bad))
    return Outer(trace=1.0, sides=(Inner(0.5, (1.0,)), inner), by_name={"head": inner}, shares={"head": bad})


def test_what_is_not_finite_is_null_and_named() -> None:
    null = Inner(error=None, curve=None)
    for bad in (math.nan, math.inf, -math.inf):
        finite, names = nullify(record(bad))
        assert finite == Outer(1.0, (Inner(0.5, (1.0,)), null), {"head": null}, None)
        assert names == ("sides[1].error", "sides[1].curve", "by_name.head.error", "by_name.head.curve", "shares")
        assert reason(names[:2]) == "null, since float64 does not hold it: `sides[1].error`, `sides[1].curve`"


def test_a_finite_record_is_left_as_it_is() -> None:
    whole = record(2.0)
    assert nullify(whole) == (whole, ())
    assert nullify(None) == (None, ())
    assert reason(()) == ""


def test_a_summary_says_in_the_log_what_it_lost() -> None:
    said: list[tuple[str, str]] = []
    assert finite_summary(Inner(math.inf, None), lambda level, text: said.append((level, text))).error is None
    assert said == [("warning", "summary: null, since float64 does not hold it: `error`")]
