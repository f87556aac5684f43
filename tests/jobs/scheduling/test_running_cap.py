"""A cap on the running jobs of a tenant: who has queued a thousand cannot hold every device for days."""

import json
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, insert, update

from jobs.codec import parse_document
from jobs.devices.leases import Place, release
from jobs.devices.registry import Device, Worker, list_devices, register
from jobs.queue.attempt_endings import finish
from jobs.queue.claims import claim, heartbeat
from jobs.queue.reaper import reap_expired
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.store import read_job
from jobs.repository.submission import submit
from jobs.scheduling.placement import next_places, placement_of, reserve
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import device_leases, jobs, tenants
from jobs.tenancy.quotas import usage
from jobs.tenancy.shared_workers import ALLOWED_WITHOUT

GIB = 2**30
DOCUMENT = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}


@pytest.fixture
def other(ledger: Engine) -> str:
    """Another tenant."""
    with writing(ledger) as connection:
        connection.execute(insert(tenants).values(id="other", name="other", created_at=ledger_now()))
    return "other"


def gpus(ledger: Engine, number: int) -> str:
    """A worker with so many GPUs of 16 GiB, and a slot for each."""
    worker = Worker(
        id=new_id(),
        node="node",
        process_space="space",
        version="0",
        slots=number,
        factories=(),
        isolation=(ALLOWED_WITHOUT,),
    )
    offered = [
        Device(uuid=f"FAKE-{each}", kind="fake", name=str(each), capacity_bytes=16 * GIB, used_bytes=0)
        for each in range(number)
    ]
    register(ledger, worker, offered, 600)
    return worker.id


def queued(ledger: Engine, tenant_id: str = LOCAL_TENANT, *, age: float = 30, needs: int | None = None) -> str:
    job_id = submit(ledger, tenant_id, parse_document(json.dumps(DOCUMENT).encode()), needs_bytes=needs).job.id
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(queued_at=ledger_now(-age)))
    return job_id


def put(ledger: Engine, place: Place) -> Claim | None:
    return claim(ledger, place.job_id, "w", secrets.token_hex(8), 45, place=place)


def take(ledger: Engine, worker: str, most: int) -> Claim | None:
    """What an agent with a free slot does."""
    return next(filter(None, (put(ledger, each) for each in next_places(ledger, worker, 0, most))), None)


def test_a_tenant_with_a_backlog_leaves_devices_to_others(ledger: Engine, other: str) -> None:
    worker = gpus(ledger, 4)
    for _ in range(8):
        queued(ledger, age=600)
    held = [take(ledger, worker, 2) for _ in range(3)]
    assert [each is not None for each in held] == [True, True, False]
    theirs = queued(ledger, other, age=0)
    began = take(ledger, worker, 2)
    assert began is not None
    assert began.job_id == theirs
    # without a cap the backlog takes what is left
    assert take(ledger, worker, 0) is not None


def test_a_job_that_ends_makes_room_for_the_next_of_its_tenant(ledger: Engine) -> None:
    worker = gpus(ledger, 2)
    first, second = queued(ledger, age=9), queued(ledger, age=8)
    held = take(ledger, worker, 1)
    assert held is not None
    assert held.job_id == first
    waits = read_job(ledger, LOCAL_TENANT, second)
    assert waits is not None
    told = placement_of(ledger, waits, 1)
    assert told is not None
    assert (told.status, told.device) == ("waiting", None)
    assert told.message.startswith("1 of your jobs run, as many as may at a time")
    finish(ledger, held)
    release(ledger, held.job_id, held.fence)
    following = take(ledger, worker, 1)
    assert following is not None
    assert following.job_id == second


def test_workers_that_look_at_once_exceed_no_cap(ledger: Engine) -> None:
    """Each has found a job while none was running: the claim itself must refuse."""
    worker = gpus(ledger, 6)
    for _ in range(6):
        queued(ledger)
    found = [each.job_id for each in next_places(ledger, worker, 0, 2)]
    assert len(found) == 6
    at_once = threading.Barrier(6)

    def race(number: int) -> bool:
        at_once.wait()
        place = Place(job_id=found[number], worker_id=worker, device_uuids=(f"FAKE-{number}",), most_running=2)
        return put(ledger, place) is not None

    with ThreadPoolExecutor(6) as threads:
        assert sorted(threads.map(race, range(6))) == [False] * 4 + [True] * 2
    # what was refused is as it was: neither a device nor a job is held by it
    assert sum(each.jobs for each in list_devices(ledger)) == 2
    assert len(next_places(ledger, worker, 0)) == 4


def test_one_estimate_runs_beside_the_jobs_of_its_tenant(ledger: Engine) -> None:
    worker = gpus(ledger, 4)
    queued(ledger)
    assert take(ledger, worker, 1) is not None
    queued(ledger)
    document = parse_document(json.dumps(DOCUMENT).encode())
    estimates = [submit(ledger, LOCAL_TENANT, document, estimate=True).job.id for _ in range(2)]
    held = take(ledger, worker, 1)
    assert held is not None
    assert held.job_id in estimates
    assert take(ledger, worker, 1) is None


def test_no_device_is_kept_for_a_tenant_that_runs_as_many_as_it_may(ledger: Engine, other: str) -> None:
    worker = Worker(
        id=new_id(),
        node="node",
        process_space="space",
        version="0",
        slots=9,
        factories=(),
        isolation=(ALLOWED_WITHOUT,),
    )
    host = Device(uuid="HOST-a", kind="host", name="a", capacity_bytes=16 * GIB, used_bytes=0)
    register(ledger, worker, [host], 600)
    queued(ledger, age=300, needs=10 * GIB)
    assert take(ledger, worker.id, 1) is not None
    queued(ledger, age=200, needs=12 * GIB)
    reserve(ledger, worker.id, 60, 1)
    theirs = queued(ledger, other, age=0, needs=GIB)
    assert [each.job_id for each in next_places(ledger, worker.id, 0, 1)] == [theirs]
    # kept for it before it had reached its cap: that ends
    reserve(ledger, worker.id, 60)
    assert next_places(ledger, worker.id, 0, 1) == []
    reserve(ledger, worker.id, 60, 1)
    assert [each.job_id for each in next_places(ledger, worker.id, 0, 1)] == [theirs]


def test_the_time_of_a_devices_leases_counts_for_its_tenant_alone(ledger: Engine, other: str) -> None:
    """From the claim to the end of the attempt."""
    worker = gpus(ledger, 2)
    queued(ledger, age=9)
    queued(ledger, other, age=8)
    for seconds in (100, 50):
        held = take(ledger, worker, 0)
        assert held is not None
        with writing(ledger) as connection:
            mine = device_leases.c.job_id == held.job_id
            connection.execute(update(device_leases).where(mine).values(leased_at=ledger_now(-seconds)))
        finish(ledger, held)
        release(ledger, held.job_id, held.fence)
        release(ledger, held.job_id, held.fence)  # once more frees nothing, and counts nothing
    spent = {each.tenant: each.device_seconds for each in usage(ledger)}
    assert 100 <= spent["local"] < 160
    assert 50 <= spent["other"] < 110


@pytest.mark.parametrize("noticed", [True, False])
def test_the_time_that_a_service_is_off_counts_for_no_tenant(ledger: Engine, noticed: bool) -> None:
    """Whether the job was taken from its silent holder before the lease of the device is freed, or not yet."""
    worker = gpus(ledger, 1)
    queued(ledger)
    held = take(ledger, worker, 0)
    assert held is not None
    with writing(ledger) as connection:
        connection.execute(update(device_leases).values(leased_at=ledger_now(-36_000)))
        connection.execute(update(jobs).where(jobs.c.id == held.job_id).values(lease_expires_at=ledger_now(-35_900)))
    if noticed:
        assert reap_expired(ledger) == 1
    release(ledger, held.job_id, held.fence)
    assert 100 <= usage(ledger, "local")[0].device_seconds < 160


@pytest.mark.parametrize("set_by", [10_800, -10_800, 0])
def test_the_hours_that_the_clock_was_set_by_count_for_no_tenant(ledger: Engine, set_by: float) -> None:
    """A device held for 100 s, of which the last heartbeat of 45 s was 5 s ago: at most one of these more or less."""
    worker = gpus(ledger, 1)
    queued(ledger)
    held = take(ledger, worker, 0)
    assert held is not None
    with writing(ledger) as connection:
        connection.execute(update(device_leases).values(leased_at=ledger_now(-100 - set_by)))
        connection.execute(update(jobs).values(lease_expires_at=ledger_now(40 - set_by)))
    for _ in range(2):  # the second finds nothing to mend
        heartbeat(ledger, held, 45)
    finish(ledger, held)
    release(ledger, held.job_id, held.fence)
    assert 100 - 45 <= usage(ledger, "local")[0].device_seconds < 160 + 45


def test_what_runs_on_after_its_end_counts_up_to_it(ledger: Engine) -> None:
    worker = gpus(ledger, 1)
    queued(ledger)
    held = take(ledger, worker, 0)
    assert held is not None
    finish(ledger, held)
    with writing(ledger) as connection:
        moments = {"leased_at": ledger_now(-36_000), "draining_at": ledger_now(-35_900)}
        connection.execute(update(device_leases).values(moments))
    release(ledger, held.job_id, held.fence)
    assert 100 <= usage(ledger, "local")[0].device_seconds < 160
