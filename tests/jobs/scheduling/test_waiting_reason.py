"""The reason why a job waits: held against what the scheduler then does, and without a trace of other tenants."""

import json
import random
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Engine, insert, select, update

from jobs.codec import parse_document
from jobs.devices.registry import pause
from jobs.lifecycle import HELD
from jobs.records import LOCAL_TENANT
from jobs.repository.store import read_job
from jobs.repository.submission import submit
from jobs.scheduling.placement import next_places, placement_of, reserve
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import jobs, tenants
from tests.jobs.scheduling.claiming import GIB, gpu, shared, status, take

DOCUMENT = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}


def placed(ledger: Engine, tenant: str, job_id: str, most_running: int = 0) -> Any:
    job = read_job(ledger, tenant, job_id)
    assert job is not None
    return placement_of(ledger, job, most_running)


def queued(ledger: Engine, tenant: str, age: float, priority: int = 0, gib: float = 1) -> str:
    document = parse_document(json.dumps(DOCUMENT).encode())
    job_id = submit(ledger, tenant, document, needs_bytes=int(gib * GIB)).job.id
    with writing(ledger) as connection:
        values = {"queued_at": ledger_now(-age), "priority": priority}
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(**values))
    return job_id


def others(ledger: Engine, *names: str) -> None:
    with writing(ledger) as connection:
        for name in names:
            connection.execute(insert(tenants).values(id=name, name=name, created_at=ledger_now()))


def _numbered(ledger: Engine, owners: dict[str, str]) -> list[str]:
    """The waiting jobs by turn, by the rows: a tenant's running jobs and those before it; then who was served."""
    with reading(ledger) as connection:
        rows = {row.id: row for row in connection.execute(select(jobs))}
        served = {row.id: row.served_at for row in connection.execute(select(tenants))}
    turns = Counter(row.tenant_id for row in rows.values() if row.state in HELD)
    keys = []
    for row in sorted((rows[each] for each in owners), key=lambda row: (-row.priority, row.queued_at, row.id)):
        turns[row.tenant_id] += 1
        at = served[row.tenant_id]
        keys.append((turns[row.tenant_id], at is not None, at or row.queued_at, row.queued_at, row.id))
    # a tenant that was never served comes first, and among those the older job
    return [key[-1] for key in sorted(keys)]


@pytest.mark.part(of=8, by=("dialect",))
@pytest.mark.parametrize("seed", [1, 2])
def test_the_position_is_the_number_of_claims_that_the_scheduler_makes_before(
    ledger: Engine, joined: Any, seed: int
) -> None:
    """Of other tenants it may be one more or less for each: jobs of one turn go by who was served longest ago."""
    draw = random.Random(seed)
    others(ledger, "second-tenant", "third-tenant")
    worker = joined(shared("h", 64), slots=20)
    for _ in range(draw.randrange(3)):
        queued(ledger, "third-tenant", 900)
        assert take(ledger, worker) is not None
    owners = {}
    for _ in range(12):
        tenant = draw.choice([LOCAL_TENANT, LOCAL_TENANT, "second-tenant", "third-tenant"])
        owners[queued(ledger, tenant, draw.uniform(5, 600), draw.choice([0, 0, 5]))] = tenant
    # what no device could hold, and what may not be claimed yet, goes before nothing
    queued(ledger, "second-tenant", 5000, gib=100)
    paused = queued(ledger, LOCAL_TENANT, 5000)
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == paused).values(not_before=ledger_now(600)))
    in_order = _numbered(ledger, owners)
    said = {job_id: placed(ledger, tenant, job_id) for job_id, tenant in owners.items()}
    claimed: list[str] = []
    while (held := take(ledger, worker)) is not None:
        claimed.append(held.job_id)
    assert sorted(claimed) == sorted(owners)
    for place, job_id in enumerate(claimed):
        own = sum(owners[each] == owners[job_id] for each in claimed[:place])
        assert said[job_id].own_before == own
        assert abs(said[job_id].others_before - (place - own)) <= 2
        before = in_order[: in_order.index(job_id)]
        assert said[job_id].others_before == sum(owners[each] != owners[job_id] for each in before)
        for name in {*owners, *owners.values()} - {job_id}:
            assert name not in said[job_id].message


def test_a_tenant_with_a_full_share_goes_before_no_other(ledger: Engine, joined: Any) -> None:
    others(ledger, "second-tenant")
    worker = joined(shared("h", 64), slots=9)
    first = queued(ledger, "second-tenant", 900)
    (place,) = next_places(ledger, worker, 0, 1)
    assert place.job_id == first
    assert take(ledger, worker) is not None
    theirs = [queued(ledger, "second-tenant", age) for age in (800, 700, 600)]
    ours = queued(ledger, LOCAL_TENANT, 5)
    assert placed(ledger, LOCAL_TENANT, ours, 1).others_before == 0
    last = placed(ledger, "second-tenant", theirs[-1], 1)
    assert (last.own_before, last.others_before) == (2, None)
    assert last.message == (
        "1 of your jobs run, as many as may at a time; it begins after one of them has ended; 2 of your jobs are before"
        " it"
    )


def test_no_more_than_a_hundred_are_counted(ledger: Engine, joined: Any) -> None:
    joined(shared("h", 64))
    others(ledger, "second-tenant")
    last = queued(ledger, LOCAL_TENANT, 5)
    with writing(ledger) as connection:
        row = dict(connection.execute(select(jobs).where(jobs.c.id == last)).one()._mapping)
        copies = [row | {"id": f"{last[:-4]}{n:04d}", "idempotency_key": str(n)} for n in range(120)]
        connection.execute(insert(jobs), [each | {"queued_at": row["created_at"]} for each in copies])
        connection.execute(update(jobs).where(jobs.c.id != last).values(queued_at=ledger_now(-60)))
    said = placed(ledger, LOCAL_TENANT, last)
    assert said.message.endswith("at least 100 jobs are before it")
    assert (said.own_before, said.others_before) == (100, 0)


def test_a_worker_that_takes_no_jobs_is_said_with_its_reason_and_is_left_nothing(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    full = joined(gpu("a", 16), node="first")
    job_id = waiting(1, age=1)
    pause(ledger, full, "its disk has 1 GB free, and it takes jobs from 5 GB on")
    said = status(ledger, job_id)
    assert said.status == "no_worker"
    assert said.message == (
        "needs 1.07 GB; the workers that could hold it take no jobs at the moment (first: its disk has 1 GB free, and"
        " it takes jobs from 5 GB on)"
    )
    # a job is left for a grace to a smaller device, but not to one that takes none
    large = joined(gpu("b", 80), node="second")
    assert status(ledger, job_id).status == "waiting"
    assert [each.job_id for each in next_places(ledger, large, 60)] == [job_id]
    pause(ledger, full, None)
    assert next_places(ledger, large, 60) == []
    pause(ledger, large, "no process can be started there")
    assert status(ledger, job_id).status == "waiting"


def test_the_devices_in_use_are_counted(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(gpu("a", 16), gpu("b", 16), gpu("c", 4), slots=3)
    for _ in range(2):
        waiting(8, age=90)
        assert take(ledger, worker) is not None
    job_id = waiting(8, age=1)
    said = "needs 8.59 GB; waits for its turn and a free device: "
    assert status(ledger, job_id).message == said + "the 2 devices that could hold it are in use"
    before = waiting(8, age=60)
    others(ledger, "second-tenant")
    queued(ledger, "second-tenant", 900), queued(ledger, "second-tenant", 800)
    busy = ", and the 2 devices that could hold it are in use"
    # two of ours run, so both of theirs come first
    assert status(ledger, before).message == f"{said}2 jobs of others are before it{busy}"
    assert status(ledger, job_id).message == f"{said}1 of your jobs and 2 jobs of others are before it{busy}"


def test_a_device_that_is_kept_for_another_job_is_said(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(shared("h", 16), slots=9)
    waiting(10, age=300)
    assert take(ledger, worker) is not None
    waiting(12, age=200)
    reserve(ledger, worker, 60)
    young = waiting(1, age=1)
    assert next_places(ledger, worker, 0) == []
    assert status(ledger, young).message.endswith(
        "1 of your jobs is before it, and the free device that could hold it is kept for a job that has waited longer"
    )


def test_a_job_that_pauses_says_until_when(ledger: Engine, joined: Any, waiting: Any) -> None:
    joined(shared("h", 16), slots=9)
    job_id = waiting(1)
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(not_before=ledger_now(3600)))
        until = connection.execute(select(jobs.c.not_before).where(jobs.c.id == job_id)).scalar_one()
    said = status(ledger, job_id)
    assert (
        said.message == f"an attempt could not go on; the next begins at {until:%Y-%m-%d %H:%M:%S} UTC at the earliest"
    )
    with writing(ledger) as connection:
        connection.execute(
            update(jobs).where(jobs.c.id == job_id).values(not_before=ledger_now(-9), deadline_at=ledger_now(-1))
        )
    assert status(ledger, job_id).message == "its deadline has passed; it is about to end"
    with reading(ledger) as connection:
        assert not connection.execute(select(jobs.c.id).where(jobs.c.state.in_(HELD))).all()
