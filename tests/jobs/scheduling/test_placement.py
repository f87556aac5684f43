"""Devices are leased with the claim: never beyond what they have, the smallest sufficient one first, nobody starved."""

import random
import re
import time
from typing import Any

import pytest
from sqlalchemy import Engine, insert, update

from catalog.frames import Planned
from jobs.devices.leases import Place, free_drained, note_guardian, release
from jobs.devices.registry import Device, list_devices, renew
from jobs.queue.attempt_endings import finish, hand_back
from jobs.queue.attempt_writes import write_plan
from jobs.queue.claims import claim
from jobs.queue.reaper import reap_expired
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.store import read_job
from jobs.scheduling.fair_share import AHEAD
from jobs.scheduling.placement import has_future_work, next_places, reserve
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.tables import device_leases, devices, jobs, tenants, workers
from tests.conftest import Dialect
from tests.jobs.conftest import ON_BOTH, POSTGRESQL_OFTEN
from tests.jobs.scheduling.claiming import GIB, RACED_ON, end, gpu, over_committed, shared, status, take
from tests.machine.stopwatch import Stopwatch

FACTORY = {"model": {"source": "factory", "factory": "lab.models:net"}}


@pytest.fixture(params=POSTGRESQL_OFTEN)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """SQLite by the commit, but for the tests that between them run each statement of this file."""
    chosen: Dialect = request.param
    return chosen


def test_a_gpu_is_one_jobs_alone_until_nothing_of_it_runs(ledger: Engine, joined: Any, waiting: Any) -> None:
    first, second = waiting(), waiting(1)
    one, other = joined(gpu("a", 16)), joined(gpu("a", 16))
    held = take(ledger, one)
    assert held is not None
    assert (held.job_id, held.lease.device_uuid, held.lease.bytes) == (first, "FAKE-a", 16 * GIB)
    assert held.lease.bound_bytes == 16 * GIB
    assert status(ledger, first).device == "FAKE-a"
    assert take(ledger, other) is None
    finish(ledger, held)
    assert take(ledger, other) is None  # its process may still hold the memory
    assert [(each.free_bytes, each.draining) for each in list_devices(ledger)] == [(0, 1)]
    release(ledger, held.job_id, held.fence)
    again = take(ledger, other)
    assert again is not None
    assert again.job_id == second


def test_a_claim_whose_reply_was_lost_finds_its_lease(ledger: Engine, joined: Any, waiting: Any) -> None:
    place = Place(job_id=waiting(3), worker_id=joined(gpu("a", 16)), device_uuids=("FAKE-a",))
    first = claim(ledger, place.job_id, "w", "token", 45, place=place)
    assert first is not None
    assert claim(ledger, place.job_id, "w", "token", 45, place=place) == first


def test_a_place_that_is_taken_leaves_the_job_as_it_was(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(gpu("a", 16))
    job_id, later = waiting(1), waiting(1)
    before = read_job(ledger, LOCAL_TENANT, later)
    assert take(ledger, worker) is not None
    for taken in (
        Place(job_id=later, worker_id=worker, device_uuids=("FAKE-a",)),
        Place(job_id=later, worker_id=worker, device_uuids=("FAKE-unknown",)),
        Place(job_id=later, worker_id="gone", device_uuids=("FAKE-a",)),
    ):
        assert claim(ledger, later, "w", "t", 45, place=taken) is None
    assert read_job(ledger, LOCAL_TENANT, later) == before
    assert job_id != later


@ON_BOTH
def test_the_smallest_that_holds_it_comes_first_and_a_host_last(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(gpu("b", 80), gpu("a", 16), gpu("c", 40), shared("h", 8), slots=9)
    ids = [waiting(each, age=30 - place) for place, each in enumerate((10, 10, 10, 1, 1))]
    taken = [take(ledger, worker) for _ in ids]
    assert [each and each.job_id for each in taken] == ids
    assert [each and each.lease.device_uuid for each in taken] == ["FAKE-a", "FAKE-c", "FAKE-b", "HOST-h", "HOST-h"]


def test_a_large_device_leaves_a_small_job_to_a_small_one_for_a_moment(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    large, small = joined(gpu("large", 80)), joined(gpu("small", 16))
    fits, too_large = waiting(10, age=0), waiting(40, age=0)
    assert [each.job_id for each in next_places(ledger, large, 600)] == [too_large]
    assert [each.job_id for each in next_places(ledger, small, 600)] == [fits]
    assert [each.job_id for each in next_places(ledger, large, 0)] == [fits, too_large]
    held = take(ledger, small)
    assert held is not None
    assert [each.job_id for each in next_places(ledger, large, 600)] == [too_large]
    another = waiting(10, age=0)  # the small one is taken: there is nobody to leave it to
    assert [each.job_id for each in next_places(ledger, large, 600)] == [too_large, another]


def test_nothing_is_left_to_a_worker_that_was_not_seen(ledger: Engine, joined: Any, waiting: Any) -> None:
    large, _ = joined(gpu("large", 80)), joined(gpu("small", 16), expiry=-1)
    job_id = waiting(10, age=0)
    assert [each.job_id for each in next_places(ledger, large, 600)] == [job_id]


def test_what_fits_nowhere_here_holds_up_nothing_behind_it(ledger: Engine, joined: Any, waiting: Any) -> None:
    for _ in range(25):
        waiting(100)
    worker = joined(gpu("a", 16))
    small = waiting(1, age=0)
    assert [each.job_id for each in next_places(ledger, worker, 6)] == [small]


def test_what_others_hold_of_a_gpu_is_not_given_away(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(gpu("a", 16, used=10))
    waiting(8)
    assert next_places(ledger, worker, 6) == []
    fits = waiting(5)
    held = take(ledger, worker)
    assert held is not None
    assert (held.job_id, held.lease.bytes) == (fits, 6 * GIB)


def test_a_host_is_shared_by_bytes_and_by_its_slots_until_plans_are_known(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    worker = joined(shared("h", 16), slots=2)
    ids = [waiting() for _ in range(3)]
    first, second = take(ledger, worker), take(ledger, worker)
    assert first is not None
    assert second is not None
    assert (first.lease.bytes, first.lease.bound_bytes, second.lease.bound_bytes) == (8 * GIB, 8 * GIB, 8 * GIB)
    assert write_plan(ledger, first, Planned(plan={"host_peak_bytes": int(2.7 * GIB)}))
    assert write_plan(ledger, second, Planned(plan={"host_peak_bytes": int(4.5 * GIB)}))
    (host,) = list_devices(ledger)
    assert host.leased_bytes == pytest.approx(8 * GIB, abs=9)
    third = take(ledger, worker)
    assert third is not None
    assert third.lease.bytes == 8 * GIB or third.lease.bound_bytes is None
    assert over_committed(ledger) == []
    assert {each.job_id for each in (first, second, third)} == set(ids)


def test_one_worker_with_one_slot_has_the_host_to_itself(ledger: Engine, joined: Any, waiting: Any) -> None:
    waiting()
    held = take(ledger, joined(shared("h", 16)))
    assert held is not None
    assert held.lease.bound_bytes is None  # its budget is what is free, as ever


def test_a_plan_that_needs_more_sends_the_job_to_a_device_that_holds_it(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    small, large = joined(gpu("small", 16)), joined(gpu("large", 80))
    job_id = waiting(1)
    held = take(ledger, small)
    assert held is not None
    assert not write_plan(ledger, held, Planned(plan={"host_peak_bytes": 36 * GIB, "micro_batch": 1}))
    hand_back(ledger, held, "misplaced")
    release(ledger, held.job_id, held.fence)
    job = read_job(ledger, LOCAL_TENANT, job_id)
    assert job is not None
    # uncounted, and a plan for a device too small for it is nobody's to follow
    assert (job.state, job.attempt, job.plan, job.needs_bytes) == ("queued", 0, None, pytest.approx(40 * GIB, abs=9))
    assert next_places(ledger, small, 0) == []
    again = take(ledger, large)
    assert again is not None
    assert write_plan(ledger, again, Planned(plan={"host_peak_bytes": 36 * GIB, "micro_batch": 1}))
    job = read_job(ledger, LOCAL_TENANT, job_id)
    assert job is not None
    assert job.plan == {"host_peak_bytes": 36 * GIB, "micro_batch": 1}


def test_a_plan_that_a_host_of_one_slot_cannot_follow_is_kept_by_nobody(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    cpu = joined(shared("h", 16))
    cuda = joined(Device(uuid="GPU-a", kind="cuda", name="GPU", capacity_bytes=80 * GIB))
    job_id = waiting()
    held = take(ledger, cpu, 0)
    assert held is not None
    assert held.lease.bound_bytes is None
    plan = Planned(plan={"host_peak_bytes": 36 * GIB})
    assert not write_plan(ledger, held, plan)
    assert not write_plan(ledger, held, plan)  # nor where the reply of the first was lost
    hand_back(ledger, held, "misplaced")
    release(ledger, held.job_id, held.fence)
    job = read_job(ledger, LOCAL_TENANT, job_id)
    assert job is not None
    assert (job.plan, job.needs_bytes) == (None, pytest.approx(40 * GIB, abs=9))
    assert next_places(ledger, cpu, 0) == []
    again = take(ledger, cuda)  # no class of device has been tied to it
    assert again is not None
    assert again.job_id == job_id
    assert write_plan(ledger, again, Planned(plan={"device_peak_bytes": GIB}))


def test_what_replaces_a_plan_is_kept_whatever_it_needs(ledger: Engine, joined: Any, waiting: Any) -> None:
    """By the first one rows may have been computed already, and those promise what repeats them."""
    small, _ = joined(gpu("small", 16)), joined(gpu("large", 80))
    job_id = waiting(1)
    held = take(ledger, small)
    assert held is not None
    assert write_plan(ledger, held, Planned(plan={"host_peak_bytes": 9 * GIB}))
    corrected = {"host_peak_bytes": 36 * GIB, "planning_errors": [{}]}
    assert write_plan(ledger, held, Planned(plan=corrected))
    job = read_job(ledger, LOCAL_TENANT, job_id)
    assert job is not None
    assert job.plan == corrected


@pytest.mark.parametrize("others", [(), (8,), (16,)])
def test_it_goes_on_where_it_is_if_nobody_could_hold_it(ledger: Engine, joined: Any, waiting: Any, others: Any) -> None:
    worker = joined(gpu("a", 16))
    for number, gib in enumerate(others):
        joined(gpu(f"other-{number}", gib))
    job_id = waiting(1)
    held = take(ledger, worker, 0)
    assert held is not None
    assert write_plan(ledger, held, Planned(plan={"host_peak_bytes": 36 * GIB}))
    job = read_job(ledger, LOCAL_TENANT, job_id)
    assert job is not None
    assert job.plan == {"host_peak_bytes": 36 * GIB}


def test_a_wandering_job_visits_each_size_once(ledger: Engine, joined: Any, waiting: Any) -> None:
    """Whatever its plans say, it goes up a staircase of devices and stays on the last: no ping-pong."""
    fleet = [joined(gpu(f"size-{gib}", gib)) for gib in (8, 16, 32, 64)]
    job_id = waiting(1)
    visited = []
    for _ in range(20):
        held = next((found for worker in fleet if (found := take(ledger, worker, 0)) is not None), None)
        assert held is not None
        visited.append(held.lease.device_uuid)
        if write_plan(ledger, held, Planned(plan={"host_peak_bytes": held.lease.bytes})):
            break  # it asks for a little more than it has, wherever it is
        hand_back(ledger, held)
        release(ledger, held.job_id, held.fence)
    assert visited == ["FAKE-size-8", "FAKE-size-16", "FAKE-size-32", "FAKE-size-64"]
    assert status(ledger, job_id).status == "placed"


def test_a_job_that_outgrew_its_share_of_the_host_waits_for_room(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(shared("h", 16), slots=2)
    first, second = waiting(), waiting()
    a, b = take(ledger, worker), take(ledger, worker)
    assert a is not None
    assert b is not None
    assert not write_plan(ledger, a, Planned(plan={"host_peak_bytes": 9 * GIB}))
    hand_back(ledger, a)
    release(ledger, a.job_id, a.fence)
    assert next_places(ledger, worker, 0) == []  # 10 GiB do not fit beside the share of the other
    end(ledger, b)
    held = take(ledger, worker)
    assert held is not None
    assert (held.job_id, held.lease.bytes) == (first, pytest.approx(10 * GIB, abs=9))
    assert second == b.job_id


def test_a_job_that_outgrew_what_others_leave_of_the_host_goes_on_as_it_can(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    """It could never be leased that much: queued again it would wait for ever."""
    worker = joined(shared("h", 16, used=4), slots=2)
    waiting(1), waiting(1)
    a, b = take(ledger, worker), take(ledger, worker)
    assert a is not None
    assert b is not None
    assert write_plan(ledger, a, Planned(plan={"host_peak_bytes": 13 * GIB}))
    assert list_devices(ledger)[0].free_bytes == 0
    assert over_committed(ledger) == []


@pytest.mark.parametrize("kind", [shared, gpu])
def test_a_job_is_not_handed_back_to_a_device_that_never_leases_it_as_much(
    ledger: Engine, joined: Any, waiting: Any, kind: Any
) -> None:
    """The other holds as much by its capacity, but others leave no more of it than of this one."""
    worker, _ = joined(kind("a", 16, used=4), slots=2), joined(kind("b", 16, used=4), slots=2)
    waiting(1), waiting(1)
    held, _ = take(ledger, worker), take(ledger, worker)
    assert held is not None
    assert write_plan(ledger, held, Planned(plan={"host_peak_bytes": int(11.7 * GIB)}))  # and the tenth: 13
    assert over_committed(ledger) == []


@pytest.mark.parametrize(("other", "goes"), [(gpu("b", 80, used=70), True), (shared("b", 80, used=70), False)])
def test_for_what_is_too_small_for_it_a_job_waits_for_a_gpu_that_others_may_leave(
    ledger: Engine, joined: Any, waiting: Any, other: Device, goes: bool
) -> None:
    worker, _ = joined(gpu("a", 16)), joined(other)
    waiting(1)
    held = take(ledger, worker, 0)
    assert held is not None
    assert held.lease.device_uuid == "FAKE-a"
    assert write_plan(ledger, held, Planned(plan={"host_peak_bytes": 36 * GIB})) is not goes


def test_the_numbers_of_a_planned_job_stay_on_their_class_of_device(ledger: Engine, joined: Any, waiting: Any) -> None:
    real = Device(uuid="GPU-a", kind="cuda", name="GPU", capacity_bytes=80 * GIB)
    cpu, cuda = joined(shared("h", 999)), joined(real)
    job_id = waiting(1)
    held = take(ledger, cuda)
    assert held is not None
    write_plan(ledger, held, Planned(plan={"device_peak_bytes": GIB}))
    hand_back(ledger, held)
    release(ledger, held.job_id, held.fence)
    assert next_places(ledger, cpu, 0) == []
    assert [each.job_id for each in next_places(ledger, cuda, 0)] == [job_id]


@ON_BOTH
def test_a_factory_goes_to_a_worker_that_lists_it(ledger: Engine, joined: Any, waiting: Any) -> None:
    plain, lab, any_ = (
        joined(shared(name, 16), factories=listed)
        for name, listed in (("a", ("other:net",)), ("b", ("other:net", "lab.models:net")), ("c", ("*",)))
    )
    job_id = waiting(**FACTORY)
    assert next_places(ledger, plain, 0) == []
    assert not has_future_work(ledger, plain, 30)
    place = Place(job_id=job_id, worker_id=plain, device_uuids=("HOST-a",))
    assert claim(ledger, job_id, "w", "t", 45, place=place) is None
    assert [each.job_id for each in next_places(ledger, lab, 0)] == [job_id]
    assert [each.job_id for each in next_places(ledger, any_, 0)] == [job_id]


def test_a_reaped_lease_drains_until_nothing_of_its_group_lives(
    ledger: Engine, joined: Any, waiting: Any, expire: Any
) -> None:
    old, new = joined(gpu("a", 16)), joined(gpu("a", 16))
    job_id = waiting(1)
    held = take(ledger, old)
    assert held is not None
    note_guardian(ledger, job_id, held.fence, 4711, 99)
    expire(job_id)
    assert reap_expired(ledger) == 1
    assert take(ledger, new) is None
    asked = []

    def lives(pid: int, began: int | None) -> bool:
        asked.append((pid, began))
        return len(asked) == 1

    assert free_drained(ledger, new, "space", (), lives) == 0
    assert take(ledger, new) is None
    assert free_drained(ledger, new, "space", (), lives) == 1
    assert asked == [(4711, 99)] * 2
    again = take(ledger, new)
    assert again is not None
    assert again.job_id == job_id


@ON_BOTH
def test_elsewhere_a_lease_ends_with_the_guardians_grace_once_the_worker_is_silent(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    """From another container nobody can ask for a process: silence for longer than a guardian takes to kill decides."""
    old, new = joined(gpu("a", 16)), joined(gpu("a", 16), process_space="another")
    job_id = waiting(1)
    held = take(ledger, old)
    assert held is not None
    note_guardian(ledger, job_id, held.fence, 4711, 99)
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(lease_expires_at=ledger_now(-1)))
    assert reap_expired(ledger) == 1

    def unasked(*_: Any) -> bool:
        raise AssertionError

    assert free_drained(ledger, new, "another", (), unasked) == 0
    with writing(ledger) as connection:
        connection.execute(update(device_leases).values(draining_at=ledger_now(-4)))
    assert free_drained(ledger, new, "another", (), unasked) == 0  # it lives, and gives the device back itself
    with writing(ledger) as connection:
        connection.execute(update(workers).where(workers.c.id == old).values(expires_at=ledger_now(-1)))
    assert free_drained(ledger, new, "another", (), unasked) == 1


def test_a_lease_is_kept_while_its_own_worker_looks_after_it(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(gpu("a", 16))
    waiting(1)
    held = take(ledger, worker)
    assert held is not None
    finish(ledger, held)
    assert free_drained(ledger, worker, "space", {(held.job_id, held.fence)}, lambda *_: False) == 0
    assert free_drained(ledger, worker, "space", (), lambda *_: False) == 1  # its child never started
    assert list_devices(ledger)[0].free_bytes == 16 * GIB


@ON_BOTH
def test_an_old_large_job_reserves_the_smallest_device_that_can_hold_it(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    small, middle, large = (joined(gpu(name, gib)) for name, gib in (("a", 16), ("b", 40), ("c", 80)))
    busy = [waiting(each, age=300) for each in (10, 35, 70)]
    held = [take(ledger, worker, 0) for worker in (small, middle, large)]
    assert [each and each.job_id for each in held] == busy
    big = waiting(30, age=70)
    young = [waiting(5, age=10) for _ in range(3)]
    for worker in (large, small, middle):
        reserve(ledger, worker, 60)
    assert status(ledger, big).status == "reserved"
    assert status(ledger, big).device == "FAKE-b"
    assert [each.reserved for each in list_devices(ledger)] == [False, True, False]
    for each in held:
        assert each is not None
        end(ledger, each)
    assert [each.job_id for each in next_places(ledger, middle, 0)] == [big]
    assert [each.job_id for each in next_places(ledger, small, 0)] == young
    taken = take(ledger, middle, 0)
    assert taken is not None
    assert taken.job_id == big
    assert not any(each.reserved for each in list_devices(ledger))


def test_who_may_still_pass_a_job_that_a_device_is_kept_for(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(shared("h", 16), slots=9)
    waiting(10, age=300)
    assert take(ledger, worker) is not None
    big = waiting(12, age=70)
    reserve(ledger, worker, 60)
    waiting(1, age=10)
    waiting(1, age=10, priority=-5)
    older, urgent = waiting(1, age=80), waiting(1, age=10, priority=5)
    assert {each.job_id for each in next_places(ledger, worker, 0)} == {older, urgent}
    assert status(ledger, big).status == "reserved"


@ON_BOTH
def test_estimates_without_end_keep_no_reserved_device_from_its_job(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(shared("h", 16), slots=9)
    waiting(10, age=300)
    assert take(ledger, worker) is not None
    big = waiting(12, age=70)
    with writing(ledger) as connection:
        connection.execute(insert(tenants).values(id="other", name="other", created_at=ledger_now()))
        connection.execute(update(jobs).where(jobs.c.id == big).values(tenant_id="other"))
    reserve(ledger, worker, 60)
    estimate = waiting(age=1, priority=AHEAD)
    assert next_places(ledger, worker, 0) == []  # the tenant was served just now
    with writing(ledger) as connection:
        connection.execute(update(tenants).values(served_at=ledger_now(-600)))
    assert [each.job_id for each in next_places(ledger, worker, 0)] == [estimate]


def test_what_every_device_could_hold_reserves_none(ledger: Engine, joined: Any, waiting: Any) -> None:
    """Between jobs of one size the tenants' turns decide, not who waits longest."""
    worker = joined(gpu("a", 16), gpu("b", 16), slots=2)
    for _ in range(4):
        waiting(10, age=300)
    assert take(ledger, worker) is not None
    assert take(ledger, worker) is not None
    reserve(ledger, worker, 60)
    assert not any(each.reserved for each in list_devices(ledger))


def test_a_reservation_ends_with_what_it_was_for(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(shared("h", 16), slots=9)
    waiting(10, age=300)
    assert take(ledger, worker) is not None
    big, small = waiting(12, age=70), waiting(1, age=1)
    reserve(ledger, worker, 60)
    assert next_places(ledger, worker, 0) == []
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == big).values(state="cancelled"))
    assert [each.job_id for each in next_places(ledger, worker, 0)] == [small]


def hold(engine: Engine, device: str, gib: int) -> None:
    """Others than jobs hold this much there from now on."""
    with writing(engine) as connection:
        connection.execute(update(devices).where(devices.c.uuid == device).values(foreign_bytes=gib * GIB))


@ON_BOTH
@pytest.mark.parametrize("device", [shared("h", 16, used=4), gpu("h", 16, used=4)])
def test_no_device_is_kept_for_what_others_leave_no_room_for(
    ledger: Engine, joined: Any, waiting: Any, device: Device
) -> None:
    joined(gpu("tiny", 2))  # so that not every GPU could hold it
    worker = joined(device, slots=9)
    waiting(10, age=300)
    held = take(ledger, worker)
    assert held is not None
    big = waiting(14, age=70)
    reserve(ledger, worker, 60)
    assert not any(each.reserved for each in list_devices(ledger))
    shown = status(ledger, big)
    assert shown.status == "waiting"
    assert "than jobs hold" in shown.message
    hold(ledger, device.uuid, 1)
    reserve(ledger, worker, 60)
    assert status(ledger, big).device == device.uuid
    hold(ledger, device.uuid, 4)
    reserve(ledger, worker, 60)
    assert not any(each.reserved for each in list_devices(ledger))
    young = waiting(1, age=1)
    end(ledger, held)
    assert [each.job_id for each in next_places(ledger, worker, 0)] == [young]


def read_ago(engine: Engine, minutes: float | None) -> None:
    """It was that long ago that it was read what others hold, since jobs were there ever since; None: nobody knows."""
    with writing(engine) as connection:
        connection.execute(update(devices).values(foreign_at=None if minutes is None else ledger_now(-60 * minutes)))


@ON_BOTH
@pytest.mark.parametrize("others", [shared("h", 64, used=20), gpu("h", 64, used=20)])
@pytest.mark.parametrize("minutes", [20, None])
def test_what_others_held_long_ago_keeps_no_job_from_beginning(
    ledger: Engine, joined: Any, waiting: Any, others: Device, minutes: float | None
) -> None:
    """Jobs follow each other without a gap, so what others hold is not read; it has long been nothing."""
    worker = joined(others, slots=9)
    waiting(10, age=300)
    held = take(ledger, worker)
    assert held is not None
    big, young = waiting(50, age=70), waiting(1, age=1)
    reserve(ledger, worker, 60)
    assert not any(each.reserved for each in list_devices(ledger))
    assert "than jobs hold" in status(ledger, big).message
    read_ago(ledger, minutes)
    shown = status(ledger, big).message
    assert shown.endswith("waits for its turn and a free device: the one device that could hold it is in use")
    reserve(ledger, worker, 60)
    assert status(ledger, big).device == others.uuid
    end(ledger, held)
    reserve(ledger, worker, 60)
    assert next_places(ledger, worker, 0) == []  # it is empty, but what others hold has not been read yet
    assert renew(ledger, worker, {others.uuid: 0}, 600)
    reserve(ledger, worker, 60)
    first = take(ledger, worker)
    assert first is not None
    assert first.job_id == big
    assert status(ledger, young).status == "waiting"


def test_a_device_that_was_emptied_in_vain_is_emptied_again_at_twice_the_age(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    worker = joined(shared("h", 64, used=20), slots=9)
    waiting(10, age=9000)
    held = take(ledger, worker)
    assert held is not None
    big, young = waiting(50, age=3600), waiting(1, age=1)
    read_ago(ledger, 61)
    reserve(ledger, worker, 60)
    assert status(ledger, big).status == "reserved"
    end(ledger, held)
    assert renew(ledger, worker, {"HOST-h": 20 * GIB}, 600)
    reserve(ledger, worker, 60)
    assert status(ledger, big).status == "waiting"
    again = take(ledger, worker)
    assert again is not None
    assert again.job_id == young
    for waited, read, kept in ((90, 30, "waiting"), (118, 58, "waiting"), (122, 62, "reserved")):
        with writing(ledger) as connection:
            connection.execute(update(jobs).where(jobs.c.id == big).values(queued_at=ledger_now(-60 * waited)))
        read_ago(ledger, read)
        reserve(ledger, worker, 60)
        assert status(ledger, big).status == kept


@ON_BOTH
def test_between_equal_gpus_a_job_that_others_left_no_room_for_reserves_one(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    """By its size it would fit on each, so turns should decide; but it is passed over for its size on each."""
    worker = joined(gpu("a", 80, used=10), gpu("b", 80, used=10), slots=3)
    waiting(60, age=300), waiting(60, age=300)
    held = [take(ledger, worker) for _ in range(2)]
    big, young = waiting(75, age=70), waiting(60, age=1)
    reserve(ledger, worker, 60)
    assert not any(each.reserved for each in list_devices(ledger))
    read_ago(ledger, 20)
    reserve(ledger, worker, 60)
    assert [each.reserved for each in list_devices(ledger)] == [True, False]
    for each in held:
        assert each is not None
        end(ledger, each)
    assert [each.job_id for each in next_places(ledger, worker, 0)] == [young]  # on the other
    assert renew(ledger, worker, {"FAKE-a": 0}, 600)
    assert next_places(ledger, worker, 0) == [
        Place(job_id=big, worker_id=worker, device_uuids=("FAKE-a",)),
        Place(job_id=young, worker_id=worker, device_uuids=("FAKE-b",)),
    ]


@ON_BOTH
@pytest.mark.parametrize("device", [shared("h", 16, used=4), gpu("h", 16, used=4)])
def test_nothing_may_come_of_what_others_leave_no_room_for(
    ledger: Engine, joined: Any, waiting: Any, device: Device
) -> None:
    """While jobs are there it is not known, and it is read right after the last of them."""
    worker = joined(device)
    waiting(14)
    assert not has_future_work(ledger, worker, 30)
    read_ago(ledger, 1)
    assert has_future_work(ledger, worker, 30)
    assert renew(ledger, worker, {device.uuid: 4 * GIB}, 600)
    assert not has_future_work(ledger, worker, 30)
    assert renew(ledger, worker, {device.uuid: 1 * GIB}, 600)
    assert has_future_work(ledger, worker, 30)


def test_a_smaller_device_that_others_fill_keeps_no_larger_one_from_being_reserved(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    joined(gpu("tiny", 2)), joined(gpu("small", 16, used=14))
    worker = joined(gpu("large", 80))
    waiting(60, age=300)
    assert take(ledger, worker) is not None
    big = waiting(10, age=70)
    reserve(ledger, worker, 60)
    assert status(ledger, big).device == "FAKE-large"


def test_no_device_is_kept_while_its_job_may_not_begin_yet(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(shared("h", 16), slots=9)
    waiting(10, age=300)
    assert take(ledger, worker) is not None
    big, young = waiting(12, age=70), waiting(1, age=1)
    reserve(ledger, worker, 60)
    assert next_places(ledger, worker, 0) == []
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == big).values(not_before=ledger_now(600)))
    assert [each.job_id for each in next_places(ledger, worker, 0)] == [young]


@pytest.mark.parametrize(
    ("offered", "given", "found", "said"),
    [
        ((), {"gib": 1}, "no_worker", "no worker offers a device; it begins when one does"),
        (((gpu("a", 16),), {}), {"gib": 1}, "waiting", "needs 1.07 GB; waits for its turn"),
        (((gpu("a", 16),), {}), {}, "waiting", "waits for its turn"),
        (((gpu("a", 16), gpu("b", 8)), {}), {"gib": 40}, "no_device", "needs 42.9 GB; .* is FAKE-a with 17.2 GB"),
        (((gpu("a", 16),), {"expiry": -1}), {"gib": 1}, "no_worker", "not been seen lately"),
        (((gpu("a", 16),), {"factories": ("x:y",)}), FACTORY, "no_worker", "no known worker lists `lab.models:net`"),
        (((gpu("a", 16),), {"factories": ("*",)}), FACTORY, "waiting", ""),
    ],
)
def test_what_a_queued_job_waits_for_is_said(
    ledger: Engine, joined: Any, waiting: Any, offered: Any, given: Any, found: str, said: str
) -> None:
    if offered:
        joined(*offered[0], **offered[1])
    shown = status(ledger, waiting(**given))
    assert shown.status == found
    assert re.search(said, shown.message)


def test_an_ended_job_has_no_place(ledger: Engine, joined: Any, waiting: Any) -> None:
    job_id = waiting(1)
    held = take(ledger, joined(gpu("a", 16)))
    assert held is not None
    end(ledger, held)
    assert status(ledger, job_id) is None


@pytest.mark.parametrize("number", [48, pytest.param(120, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dialect", RACED_ON)
def test_of_many_jobs_on_shared_devices_no_device_is_ever_over_committed(
    ledger: Engine, joined: Any, waiting: Any, at_once: Any, number: int
) -> None:
    """Six agents race for four GPUs and a host that all of them offer; each looks at the rows while it holds some."""
    offered = (gpu("a", 16), gpu("b", 16), gpu("c", 40), gpu("d", 80), shared("h", 32))
    chosen = random.Random(5)
    ids = {waiting(chosen.choice((None, 1, 3, 10, 15, 38, 70)), age=100) for _ in range(number)}
    fleet = [joined(*offered, slots=2) for _ in range(8)]

    ended_in_all: list[str] = []

    def work(agent: int) -> Any:
        faults = []
        mine: list[Claim] = []
        since, ended = Stopwatch(), 0
        while len(ended_in_all) < len(ids) and since.seconds() < 120:  # without any that ended
            if len(ended_in_all) > ended:
                since, ended = Stopwatch(), len(ended_in_all)
            held = take(ledger, fleet[agent], 0) if len(mine) < 2 else None
            if held is not None:
                mine.append(held)
                faults += over_committed(ledger)
            else:
                reserve(ledger, fleet[agent], 1)
                time.sleep(0.05)
            if mine and (held is None or len(mine) == 2):
                end(ledger, mine[0])
                ended_in_all.append(mine.pop(0).job_id)
        return faults

    assert at_once(6, work) == [[]] * 6
    assert sorted(ended_in_all) == sorted(ids)  # each once, and none was starved
