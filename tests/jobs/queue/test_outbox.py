"""A wake-up is sent for every queued job until it is claimed, whatever the broker loses."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from catalog.requests.job import JobDocument
from jobs.queue.attempt_endings import hand_back
from jobs.queue.outbox import MAX_OUTSTANDING, relay
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, reading, writing
from jobs.schema.tables import outbox


class Broker:
    """Records what is sent; a test double of the world outside, which may also be down."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.sent: list[str] = []
        self.fails_after = fails_after

    def __call__(self, job_id: str) -> None:
        if self.fails_after is not None and len(self.sent) >= self.fails_after:
            raise ConnectionError("the broker is down")
        self.sent.append(job_id)


def test_a_wakeup_is_sent_once_and_again_when_nobody_claims(ledger: Engine, queued: Callable[..., str]) -> None:
    job_id = queued()
    broker = Broker()
    assert relay(ledger, broker, 15) == 1
    assert relay(ledger, broker, 15) == 0
    with writing(ledger) as connection:
        connection.execute(update(outbox).values(sent_at=ledger_now(-16)))
    assert relay(ledger, broker, 15) == 1
    assert broker.sent == [job_id, job_id]


def test_a_claimed_job_gets_no_more_wakeups_a_returned_one_does(ledger: Engine, held: Callable[..., Claim]) -> None:
    mine = held()
    broker = Broker()
    assert relay(ledger, broker, 0.001) == 0
    hand_back(ledger, mine)
    assert relay(ledger, broker, 15) == 1


def test_a_broker_that_is_down_loses_nothing(ledger: Engine, queued: Callable[..., str]) -> None:
    ids = {queued() for _ in range(5)}
    broker = Broker(fails_after=2)
    with pytest.raises(ConnectionError):
        relay(ledger, broker, 15)
    assert len(broker.sent) == 2
    broker.fails_after = None
    assert relay(ledger, broker, 15) == 3
    assert set(broker.sent) == ids


def test_a_relay_that_dies_between_mark_and_wakeup_only_delays(ledger: Engine, queued: Callable[..., str]) -> None:
    job_id = queued()

    def die(_: str) -> None:
        raise SystemExit  # no Exception: what a killed process leaves behind

    with pytest.raises(SystemExit):
        relay(ledger, die, 15)
    with reading(ledger) as connection:
        assert connection.execute(select(outbox.c.sent_at)).scalar_one() is not None
        connection.rollback()
    with writing(ledger) as connection:
        connection.execute(update(outbox).values(sent_at=ledger_now(-16)))
    broker = Broker()
    assert relay(ledger, broker, 15) == 1
    assert broker.sent == [job_id]


def test_a_backlog_never_fills_the_broker(
    ledger: Engine, document: Callable[..., JobDocument], queued: Callable[..., str]
) -> None:
    made = document()
    ids = {submit(ledger, LOCAL_TENANT, made).job.id for _ in range(MAX_OUTSTANDING + 6)}
    broker = Broker()
    assert [relay(ledger, broker, 15) for _ in range(2)] == [MAX_OUTSTANDING, 0]
    with writing(ledger) as connection:
        connection.execute(update(outbox).where(outbox.c.sent_at.is_not(None)).values(sent_at=ledger_now(-16)))
    relay(ledger, broker, 15)
    assert set(broker.sent) == ids  # those never sent came before the unanswered


def test_many_relays_send_each_wakeup_once(ledger: Engine, queued: Callable[..., str], at_once: Any) -> None:
    ids = [queued() for _ in range(10)]
    broker = Broker()
    assert sum(at_once(8, lambda _: relay(ledger, broker, 60))) == 10
    assert sorted(broker.sent) == sorted(ids)


def test_postgresql_skips_rows_that_another_relay_holds(databases: Any, document: Callable[..., JobDocument]) -> None:
    engine = open_database(databases.migrated("postgresql"))
    first, second = (submit(engine, LOCAL_TENANT, document()).job.id for _ in range(2))
    broker, done = Broker(), threading.Event()
    with engine.begin() as other:
        other.execute(select(outbox).where(outbox.c.job_id == first).with_for_update())

        def send_wakeup() -> None:
            relay(engine, broker, 15)
            done.set()

        thread = threading.Thread(target=send_wakeup)
        thread.start()
        assert done.wait(60), "the relay waited for a row that another one holds"
        thread.join()
    assert broker.sent == [second]
    engine.dispose()
