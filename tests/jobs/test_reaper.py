"""Silent holders lose their jobs; the others keep them."""

import secrets
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, select, update

from jobs.claims import (
    claim,
    heartbeat,
    next_claimable,
)
from jobs.clock import ledger_now
from jobs.database import reading, writing
from jobs.reaper import reap_expired
from jobs.records import LOCAL_TENANT, Claim, Job
from jobs.store import read_job, request_cancel
from jobs.tables import jobs, outbox

Held = Callable[..., Claim]


def job_of(engine: Engine, held: Claim) -> Job:
    job = read_job(engine, LOCAL_TENANT, held.job_id)
    assert job is not None
    return job


def test_the_reaper_takes_what_fell_silent_and_nothing_else(ledger: Engine, held: Held, expire: Any) -> None:
    silent, alive = held(), held()
    expire(silent.job_id)
    assert reap_expired(ledger) == 1
    assert reap_expired(ledger) == 0
    job = job_of(ledger, silent)
    assert (job.state, job.failures, job.attempt, job.fence) == ("queued", 1, 1, 1)
    assert job_of(ledger, alive).state == "running"
    with reading(ledger) as connection:
        assert [row.job_id for row in connection.execute(select(outbox))] == [silent.job_id]


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


def test_leases_are_counted_on_the_databases_clock_below_the_second(ledger: Engine, queued: Any) -> None:
    mine = claim(ledger, queued(), "w", secrets.token_hex(8), 0.5)
    assert mine is not None
    with writing(ledger) as connection:
        left = connection.execute(
            select(jobs.c.lease_expires_at, ledger_now().label("now")).where(jobs.c.id == mine.job_id)
        ).one()
        assert 0 < (left.lease_expires_at - left.now).total_seconds() <= 0.5
        connection.execute(update(jobs).values(lease_expires_at=ledger_now(0.2)))
        assert connection.execute(select(jobs.c.id).where(jobs.c.lease_expires_at < ledger_now())).all() == []
        assert len(connection.execute(select(jobs.c.id).where(jobs.c.lease_expires_at < ledger_now(0.3))).all()) == 1
