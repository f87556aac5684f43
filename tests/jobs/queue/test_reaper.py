"""Silent holders lose their jobs; the others keep them."""

import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, ExceptionContext, event, select, text, update

from jobs.queue.claims import claim, heartbeat
from jobs.queue.reaper import end_overdue, reap_expired
from jobs.records import LOCAL_TENANT, Claim, Job
from jobs.repository.results import events_after
from jobs.repository.store import read_job, request_cancel
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, reading, writing
from jobs.schema.tables import jobs
from jobs.settings import LedgerSettings
from tests.conftest import Dialect
from tests.jobs.conftest import ON_BOTH, POSTGRESQL_OFTEN
from tests.machine.stopwatch import until
from tests.queue_order import next_claimable

Held = Callable[..., Claim]


@pytest.fixture(params=POSTGRESQL_OFTEN)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """SQLite by the commit, but for the tests that between them run each statement of this file."""
    chosen: Dialect = request.param
    return chosen


def job_of(engine: Engine, held: Claim) -> Job:
    job = read_job(engine, LOCAL_TENANT, held.job_id)
    assert job is not None
    return job


def test_the_reaper_takes_what_fell_silent_and_nothing_else(
    ledger: Engine, held: Held, expire: Any, woken: Callable[[], int]
) -> None:
    silent, alive = held(), held()
    expire(silent.job_id)
    assert woken() == 2
    assert reap_expired(ledger) == 1
    assert woken() == 1
    assert reap_expired(ledger) == 0
    assert woken() == 0
    job = job_of(ledger, silent)
    assert (job.state, job.failures, job.attempt, job.fence) == ("queued", 1, 1, 1)
    assert job_of(ledger, alive).state == "running"


@pytest.mark.parametrize("dialect", ["postgresql"])  # SQLite has one lock, and one machine: all of it freezes
def test_a_holder_frozen_in_a_write_holds_up_no_other_job(
    dialect: str, ledger: Engine, ledger_url: str, held: Held, expire: Any
) -> None:
    """Its row stays locked for as long as its session lives, which is shorter than a lease."""
    frozen, silent = held(), held()
    expire(frozen.job_id)
    expire(silent.job_id)
    reaper = open_database(ledger_url)
    gave_up: list[ExceptionContext] = []
    event.listen(reaper, "handle_error", gave_up.append)  # where it waits for the lock it waits in vain
    with ledger.connect() as connection, connection.begin():
        connection.execute(update(jobs).where(jobs.c.id == frozen.job_id).values(event_seq=jobs.c.event_seq + 1))
        assert reap_expired(reaper) == 1
        assert gave_up == []
        assert job_of(ledger, silent).state == "queued"
        connection.rollback()
    assert reap_expired(reaper) == 1
    assert job_of(ledger, frozen).state == "queued"
    with reading(reaper) as connection:
        allowed = connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one()
    seconds = float(allowed.removesuffix("s"))
    defaults = {name: field.default for name, field in LedgerSettings.model_fields.items()}
    assert 0 < seconds + defaults["reaper_seconds"] < defaults["lease_seconds"]
    reaper.dispose()


def test_a_job_that_kills_every_worker_ends_after_max_failures(ledger: Engine, held: Held, expire: Any) -> None:
    job_id = None
    for _ in range(5):
        mine = held(job_id)
        job_id = mine.job_id
        expire(job_id)
        assert reap_expired(ledger) == 1
    job = job_of(ledger, mine)
    assert (job.state, job.failures, job.attempt) == ("failed", 5, 5)
    assert job.failure is not None
    assert job.failure["code"] == "worker_lost"
    assert next_claimable(ledger) == []


def test_a_silent_job_that_was_being_cancelled_is_cancelled(ledger: Engine, held: Held, expire: Any) -> None:
    mine = held()
    request_cancel(ledger, LOCAL_TENANT, mine.job_id)
    expire(mine.job_id)
    assert reap_expired(ledger) == 1
    assert (job_of(ledger, mine).state, job_of(ledger, mine).failures) == ("cancelled", 0)


@pytest.fixture
def due(ledger: Engine) -> Callable[[str, float], None]:
    """``due(job_id, -1)``: give a job a deadline that many seconds from now."""

    def give(job_id: str, seconds: float) -> None:
        with writing(ledger) as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(deadline_at=ledger_now(seconds)))

    return give


def test_a_queued_job_ends_at_its_deadline_without_an_attempt(
    ledger: Engine, queued: Any, due: Any, woken: Callable[[], int]
) -> None:
    late, later, without = queued(), queued(), queued()
    due(late, -1)
    due(later, 600)
    assert next_claimable(ledger) == [later, without]
    assert claim(ledger, late, "w", "t", 45) is None  # also before any reaper has come
    assert woken() == 3
    assert end_overdue(ledger) == 1
    assert end_overdue(ledger) == 0
    job = read_job(ledger, LOCAL_TENANT, late)
    assert job is not None
    assert (job.state, job.attempt, job.failures) == ("failed", 0, 0)
    assert job.finished_at is not None
    assert job.failure is not None
    assert (job.failure["category"], job.failure["code"]) == ("usage", "deadline_exceeded")
    last = events_after(ledger, LOCAL_TENANT, late)[-1]
    assert (last.type, last.data) == ("state", {"state": "failed", "attempt": 0, "reason": "deadline_exceeded"})
    assert woken() == 0
    assert claim(ledger, later, "w", "t", 45) is not None


@ON_BOTH
def test_a_job_that_cannot_be_moved_on_is_logged_and_stops_no_other(
    ledger: Engine, held: Held, queued: Any, due: Any, expire: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its piece is none that this version reads, so that what has become of its parent cannot be said."""
    parent, silent, late = queued(), held(), queued()
    behind = held().job_id, queued()
    with writing(ledger) as connection:
        broken = {"parent_id": parent, "piece": {"round": "none"}, "max_failures": 1}
        connection.execute(update(jobs).where(jobs.c.id.in_((silent.job_id, late))).values(broken))
        connection.execute(update(jobs).where(jobs.c.id == parent).values(state="waiting"))
    for each in (silent.job_id, behind[0]):
        expire(each)
    for each in (late, behind[1]):
        due(each, -1)
    assert (reap_expired(ledger), end_overdue(ledger)) == (1, 1)
    states = [read_job(ledger, LOCAL_TENANT, each) for each in (silent.job_id, late, *behind)]
    assert [each and each.state for each in states] == ["running", "queued", "queued", "failed"]
    logged = [vars(each)["job"] for each in caplog.records if each.levelname == "ERROR"]
    assert logged == [silent.job_id, late]


def test_a_deadline_that_passes_in_the_queue_is_seen_on_the_databases_clock(
    ledger: Engine, queued: Any, due: Any
) -> None:
    job_id = queued()
    due(job_id, 600)
    assert next_claimable(ledger) == [job_id]
    assert end_overdue(ledger) == 0
    due(job_id, 0.1)
    until(lambda: next_claimable(ledger) == [])
    assert end_overdue(ledger) == 1


def test_a_silent_holders_job_ends_where_its_deadline_has_passed(
    ledger: Engine, held: Held, expire: Any, due: Any
) -> None:
    overdue, in_time, cancelling = held(), held(), held()
    request_cancel(ledger, LOCAL_TENANT, cancelling.job_id)
    for each, seconds in ((overdue, -1), (in_time, 600), (cancelling, -1)):
        due(each.job_id, seconds)
        expire(each.job_id)
    assert reap_expired(ledger) == 3
    assert (job_of(ledger, overdue).state, job_of(ledger, overdue).failures) == ("failed", 1)
    failure = job_of(ledger, overdue).failure
    assert failure is not None
    assert (failure["category"], failure["code"]) == ("usage", "deadline_exceeded")
    assert job_of(ledger, in_time).state == "queued"
    assert job_of(ledger, cancelling).state == "cancelled"


def test_a_running_job_past_its_deadline_is_its_workers_to_end(ledger: Engine, held: Held, due: Any) -> None:
    mine = held()
    due(mine.job_id, -1)
    assert (reap_expired(ledger), end_overdue(ledger)) == (0, 0)
    assert job_of(ledger, mine).state == "running"


def test_many_end_each_overdue_job_once(ledger: Engine, queued: Any, due: Any, at_once: Any) -> None:
    ids = [queued() for _ in range(4)]
    for each in ids:
        due(each, -1)
    assert sum(at_once(8, lambda _: end_overdue(ledger))) == 4
    for each in ids:
        states = [event.data["state"] for event in events_after(ledger, LOCAL_TENANT, each)]
        assert states == ["queued", "failed"]


def test_many_reapers_take_each_job_once(ledger: Engine, held: Held, expire: Any, at_once: Any) -> None:
    claims = [held() for _ in range(4)]
    for each in claims:
        expire(each.job_id)
    assert sum(at_once(8, lambda _: reap_expired(ledger))) == 4
    assert {job_of(ledger, each).failures for each in claims} == {1}


def test_a_heartbeat_that_comes_first_keeps_the_job(ledger: Engine, held: Held, expire: Any) -> None:
    mine = held()
    expire(mine.job_id)
    heartbeat(ledger, mine, 45)
    assert reap_expired(ledger) == 0


@ON_BOTH
def test_leases_are_counted_on_the_databases_clock_below_the_second(ledger: Engine, queued: Any) -> None:
    job_id = queued()
    before = now_of(ledger)
    assert claim(ledger, job_id, "w", secrets.token_hex(8), 0.5) is not None
    after = now_of(ledger)
    with writing(ledger) as connection:
        expires_at = connection.execute(select(jobs.c.lease_expires_at)).scalar_one()
        rounded = timedelta(milliseconds=1)
        assert before - rounded <= expires_at - timedelta(seconds=0.5) <= after + rounded
        began = connection.execute(select(ledger_now())).scalar_one()
        connection.execute(update(jobs).values(lease_expires_at=ledger_now(0.2)))
        early = connection.execute(select(jobs.c.id).where(jobs.c.lease_expires_at < ledger_now())).all()
        took = connection.execute(select(ledger_now())).scalar_one() - began
        assert early == [] or took >= timedelta(seconds=0.2)
        assert len(connection.execute(select(jobs.c.id).where(jobs.c.lease_expires_at < ledger_now(0.3))).all()) == 1


def now_of(engine: Engine) -> Any:
    with reading(engine) as connection:
        return connection.execute(select(ledger_now())).scalar_one()
