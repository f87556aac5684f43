"""The clock beside a child: what a heartbeat that is refused counts for."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from sqlalchemy import Engine, event

from jobs.metrics.counters import read_counters
from jobs.queue import attempt_endings, claims
from jobs.records import Claim
from jobs.schema.database import reading
from tests.machine.stopwatch import until
from worker.settings import WorkerSettings
from worker.supervision.lease_monitor import LeaseWatch


@pytest.fixture
def held(ledger: Engine, submitted: Callable[..., str]) -> Claim:
    claim = claims.claim(ledger, submitted(), "here:1", "token", 600)
    assert claim is not None
    return claim


@pytest.fixture
def watch(ledger: Engine, held: Claim, settings: Callable[..., WorkerSettings]) -> Iterator[LeaseWatch]:
    made = LeaseWatch(ledger, held, settings(cancel_seconds=3600), structlog.get_logger())
    made.start()
    yield made
    made.end()


@pytest.fixture
def beats(ledger: Engine) -> list[str]:
    """Statements that draw as a holder, as they are sent."""
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE jobs SET event_seq"):
            found.append(statement)

    event.listen(ledger, "before_cursor_execute", note)
    return found


def refused(engine: Engine) -> int:
    with reading(engine) as connection:
        return read_counters(connection).get("refused_writes", {}).get("", 0)


def test_one_that_comes_while_the_job_leaves_is_no_loss(
    ledger: Engine, held: Claim, watch: LeaseWatch, beats: list[str]
) -> None:
    watch.settle()
    assert attempt_endings.finish(ledger, held) == "succeeded"
    ended = len(beats)
    until(lambda: len(beats) > ended, 60, "a heartbeat comes after the end")
    watch.end()
    assert not watch.lost.is_set()
    assert refused(ledger) == 0


def test_one_of_an_attempt_that_goes_on_is_a_loss_and_counted(ledger: Engine, held: Claim, watch: LeaseWatch) -> None:
    assert attempt_endings.finish(ledger, held) == "succeeded"
    assert watch.lost.wait(60)
    assert refused(ledger) == 1
