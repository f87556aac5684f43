"""Tenants in turn: whoever has the least running comes first, however long another's backlog is."""

import itertools
import json
import random
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, insert, select, update

from jobs.lifecycle import HELD
from jobs.queue.attempt_endings import finish
from jobs.queue.claims import claim
from jobs.repository.submission import submit
from jobs.scheduling.fair_share import AHEAD
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import jobs, tenants
from tests.conftest import Dialect
from tests.jobs.conftest import ON_BOTH, POSTGRESQL_OFTEN
from tests.queue_order import next_claimable


@pytest.fixture(params=POSTGRESQL_OFTEN)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """SQLite by the commit, but for the tests that between them run each statement of this file."""
    chosen: Dialect = request.param
    return chosen


@pytest.fixture
def tenant(ledger: Engine) -> Callable[[str], str]:
    """``tenant("alice")``: the id of a new tenant."""

    def make(name: str) -> str:
        with writing(ledger) as connection:
            connection.execute(insert(tenants).values(id=name, name=name, created_at=ledger_now()))
        return name

    return make


@pytest.fixture
def queued_by(ledger: Engine, document: Callable[..., Any]) -> Callable[..., list[str]]:
    """``queued_by("alice", 3)``: the ids of three new jobs of hers."""

    def make(owner: str, number: int = 1, **given: Any) -> list[str]:
        return [submit(ledger, owner, document(), **given).job.id for _ in range(number)]

    return make


def take(engine: Engine, **given: Any) -> Any:
    """What an idle worker takes."""
    job_id = next(iter(next_claimable(engine, **given)), None)
    return job_id and claim(engine, job_id, "w", secrets.token_hex(8), 45)


def test_a_tenant_who_comes_late_gets_the_next_slot(ledger: Engine, tenant: Any, queued_by: Any) -> None:
    backlog, other, late = map(tenant, ("backlog", "other", "late"))
    queued_by(backlog, 50)
    queued_by(other, 2)
    assert [take(ledger).tenant_id for _ in range(4)] == [backlog, other, backlog, other]
    assert [take(ledger).tenant_id for _ in range(2)] == [backlog, backlog]  # nobody else waits: nothing lies idle
    queued_by(late, 2)
    assert [take(ledger).tenant_id for _ in range(3)] == [late, late, backlog]


def test_one_worker_that_does_one_job_at_a_time_serves_the_tenants_in_turn(
    ledger: Engine, tenant: Any, queued_by: Any
) -> None:
    backlog, late = tenant("backlog"), tenant("late")
    queued_by(backlog, 20)
    served = []
    for number in range(6):
        if number == 2:
            queued_by(late, 2)
        held = take(ledger)
        served.append(held.tenant_id)
        finish(ledger, held)  # so that nothing runs at the next look
    assert served == [backlog, backlog, late, backlog, late, backlog]


def test_one_look_is_in_turn_as_well_for_those_who_lose_the_race_for_its_first(
    ledger: Engine, tenant: Any, queued_by: Any
) -> None:
    a, b = queued_by(tenant("a"), 5), queued_by(tenant("b"), 2)
    assert next_claimable(ledger) == [a[0], b[0], a[1], b[1], a[2], a[3], a[4]]
    assert next_claimable(ledger, limit=3) == [a[0], b[0], a[1]]


def test_what_ended_counts_no_more_and_what_is_being_cancelled_does(
    ledger: Engine, tenant: Any, queued_by: Any
) -> None:
    a, b = queued_by(tenant("a"), 4), queued_by(tenant("b"), 4)
    first, second = take(ledger), take(ledger)
    assert (first.job_id, second.job_id) == (a[0], b[0])
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == a[0]).values(state="cancelling"))
    finish(ledger, second)
    assert next_claimable(ledger, limit=2) == [b[1], a[1]]


def test_a_tenants_urgent_jobs_go_before_its_own_and_before_nobody_elses(
    ledger: Engine, tenant: Any, queued_by: Any, document: Any
) -> None:
    a, b = tenant("a"), tenant("b")
    plain, other = queued_by(a, 2), queued_by(b, 2)
    urgent = [submit(ledger, a, document(schedule={"priority": 10})).job.id for _ in range(3)]
    last = submit(ledger, a, document(schedule={"priority": -10})).job.id
    # were the priority to count between tenants, b would wait for all three
    assert [take(ledger).job_id for _ in range(5)] == [other[0], urgent[0], other[1], urgent[1], urgent[2]]
    assert next_claimable(ledger) == [*plain, last]


def served(engine: Engine, seconds_ago: float) -> None:
    """Everybody was last served this long ago."""
    with writing(engine) as connection:
        connection.execute(update(tenants).values(served_at=ledger_now(-seconds_ago)))


def test_an_estimate_goes_before_everybodys_jobs_once_and_then_in_turn(
    ledger: Engine, tenant: Any, queued_by: Any, document: Any
) -> None:
    a, b, c = tenant("a"), tenant("b"), tenant("c")
    busy = queued_by(a, 3)
    take(ledger), take(ledger)
    other = queued_by(b, 2)
    first, second = (submit(ledger, a, document(), estimate=True).job.id for _ in range(2))
    third = submit(ledger, c, document(), estimate=True).job.id
    served(ledger, 600)
    # a has two running, and its first estimate is ahead nonetheless; its second is its fourth then
    assert next_claimable(ledger) == [third, first, *other, second, busy[2]]
    assert [take(ledger).job_id for _ in range(2)] == [third, first]
    served(ledger, 600)
    assert next_claimable(ledger) == [*other, second, busy[2]]  # one of its estimates runs


def test_estimates_without_end_hold_up_nobody(ledger: Engine, tenant: Any, queued_by: Any, document: Any) -> None:
    """With one worker nothing runs when it looks: what was served last tells that they had their turn."""
    floods = [tenant("flood"), tenant("another")]
    backlog = [submit(ledger, each, document(), estimate=True).job.id for each in floods * 12]
    jobs_of_b = queued_by(tenant("b"), 5)
    order = []
    for _ in range(15):
        held = take(ledger)
        order.append(held.job_id)
        finish(ledger, held)
    assert set(order[:2]) == set(backlog[:2])
    assert [order.index(each) for each in jobs_of_b] == [2, 5, 8, 11, 14]


def test_what_does_not_fit_holds_up_nothing_behind_it(ledger: Engine, tenant: Any, queued_by: Any) -> None:
    a = tenant("a")
    queued_by(a, 30, needs_bytes=2**40)
    small = queued_by(a, 1, needs_bytes=2**20)
    assert next_claimable(ledger, free_bytes=2**30) == small


@ON_BOTH
def test_any_queue_is_ordered_as_numbering_all_of_it_says(ledger: Engine, tenant: Any) -> None:
    """Against the rule applied to every job in plain Python: ahead once or not, running plus position, age, id."""
    names = [tenant(f"tenant-{number}") for number in range(5)]
    chosen = random.Random(7)
    rows = [
        {
            "id": new_id(),
            "tenant_id": chosen.choice(names[: chosen.randint(1, 5)]),
            "kind": "capacity",
            "document": json.loads("{}"),
            "document_sha256": "0" * 64,
            "state": chosen.choice(["queued"] * 6 + ["running", "cancelling", "succeeded"]),
            "priority": chosen.choice([0, 0, 0, 3, -10, 10, AHEAD]),
            "needs_bytes": chosen.choice([None, 5, 50]),
        }
        for _ in range(300)
    ]
    with writing(ledger) as connection:
        connection.execute(insert(jobs).values(created_at=ledger_now(), queued_at=ledger_now()), rows)
        for row in rows:
            connection.execute(
                update(jobs).where(jobs.c.id == row["id"]).values(queued_at=ledger_now(-chosen.randint(0, 30)))
            )
    with reading(ledger) as connection:
        stored = connection.execute(select(jobs)).all()
    for limit, free in itertools.product((1, 7, 20, 300), (None, 10)):
        running = Counter(row.tenant_id for row in stored if row.state in HELD)
        estimating = {row.tenant_id for row in stored if row.state in HELD and row.priority == AHEAD}
        waiting = sorted(
            (row for row in stored if row.state == "queued" and (free is None or (row.needs_bytes or 0) <= free)),
            key=lambda row: (-row.priority, row.queued_at, row.id),
        )
        before: Counter[str] = Counter()
        keyed = []
        for row in waiting:
            before[row.tenant_id] += 1
            ahead = row.priority == AHEAD and before[row.tenant_id] == 1 and row.tenant_id not in estimating
            turn = running[row.tenant_id] + before[row.tenant_id]
            keyed.append((not ahead, turn, row.queued_at, row.id))
        assert next_claimable(ledger, limit, free) == [key[-1] for key in sorted(keyed)[:limit]]
