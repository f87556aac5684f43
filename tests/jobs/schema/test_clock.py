"""The database's clock is set: neither turns nor durations depend on the hours that it alone has run."""

import secrets
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import Engine, insert, null, select, update

from jobs.queue.attempt_endings import finish, hand_back
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.store import read_job, request_cancel
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now, ledger_now_after
from jobs.schema.database import reading, writing
from jobs.schema.tables import jobs, tenants
from tests.jobs.conftest import ON_BOTH
from tests.queue_order import next_claimable

HOURS = 3 * 3600.0


@ON_BOTH
def test_turns_go_on_after_a_clock_that_is_set_back(ledger: Engine, document: Callable[..., Any]) -> None:
    """The moments that the tests store lie ahead of the clock then."""
    for name in ("a", "b"):
        with writing(ledger) as connection:
            connection.execute(insert(tenants).values(id=name, name=name, created_at=ledger_now()))
        for _ in range(4):
            submit(ledger, name, document())
    order = []
    for turn in range(8):
        if turn == 2:
            with writing(ledger) as connection:
                ahead = ledger_now_after(tenants.c.served_at, HOURS)
                connection.execute(update(tenants).where(tenants.c.served_at.is_not(None)).values(served_at=ahead))
        held = claim(ledger, next_claimable(ledger)[0], "w", secrets.token_hex(8), 45)
        assert held is not None
        order.append(held.tenant_id)
        finish(ledger, held)
    assert order == ["a", "b"] * 4


@ON_BOTH
@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("succeeds", [True, False])
def test_no_duration_of_a_job_is_negative(
    ledger: Engine, queued: Callable[..., str], held: Callable[..., Claim], *, starts: bool, succeeds: bool
) -> None:
    """One that began after it was submitted, and ended after it began; a cancelled one may have begun or not."""
    job_id = queued()
    set_ahead(ledger, "created_at", HOURS)
    if starts or succeeds:
        mine = held(job_id)
        assert moments(ledger, job_id)[1] >= moments(ledger, job_id)[0]
        set_ahead(ledger, "started_at", 2 * HOURS)
        finish(ledger, mine) if succeeds else hand_back(ledger, mine)
    if not succeeds:
        request_cancel(ledger, LOCAL_TENANT, job_id)
    told = moments(ledger, job_id)
    assert told == sorted(told)
    assert len(told) == 2 + (starts or succeeds)


def set_ahead(engine: Engine, column: str, seconds: float) -> None:
    with writing(engine) as connection:
        connection.execute(update(jobs).values({column: ledger_now(seconds)}))


def moments(engine: Engine, job_id: str) -> list[datetime]:
    """When it was submitted, began and ended, as far as it has."""
    job = read_job(engine, LOCAL_TENANT, job_id)
    assert job is not None
    return [each for each in (job.created_at, job.started_at, job.finished_at) if each is not None]


@ON_BOTH
def test_the_clock_follows_a_stored_moment_that_lies_ahead(ledger: Engine) -> None:
    with reading(ledger) as connection:
        now, ahead, after, none = connection.execute(
            select(ledger_now(), ledger_now(HOURS), ledger_now_after(ledger_now(HOURS), 1), ledger_now_after(null()))
        ).one()
    assert 0.9 < (after - ahead).total_seconds() < 30
    assert 0 <= (none - now).total_seconds() < 30
