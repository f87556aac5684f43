"""A job of several ranks gets as many GPUs of one node, all or none, and neither starves nor blocks halfway."""

import random
import time
from collections import defaultdict
from typing import Any

import pytest
from sqlalchemy import Engine, delete, select

from catalog.frames import Planned
from jobs.devices.leases import Place, free_drained, note_guardian, release
from jobs.devices.registry import Device, list_devices
from jobs.queue.attempt_endings import hand_back
from jobs.queue.attempt_writes import write_plan
from jobs.queue.claims import claim
from jobs.queue.reaper import reap_expired
from jobs.records import Claim
from jobs.scheduling.placement import has_future_work, next_places, reserve
from jobs.schema.database import reading, writing
from jobs.schema.tables import device_leases, devices, jobs, worker_devices
from tests.jobs.scheduling.claiming import GIB, RACED_ON, end, gpu, over_committed, shared, status, take
from tests.machine.stopwatch import Stopwatch

FOUR = (gpu("a", 12), gpu("b", 16), gpu("c", 40), gpu("d", 80))


def halved(engine: Engine) -> list[str]:
    """Attempts whose leases are not one for each rank, or lie on several nodes; read from the rows alone."""
    with reading(engine) as connection:
        rows = connection.execute(
            select(device_leases.c.job_id, devices.c.node, devices.c.kind, jobs.c.world_size)
            .join(devices, devices.c.uuid == device_leases.c.device_uuid)
            .join(jobs, jobs.c.id == device_leases.c.job_id)
        ).all()
    of_job = defaultdict(list)
    for row in rows:
        of_job[row.job_id].append(row)
    return [
        job_id
        for job_id, held in of_job.items()
        if len({row.node for row in held}) > 1 or len(held) != (1 if held[0].kind == "host" else held[0].world_size)
    ]


def test_all_ranks_get_the_smallest_devices_or_none_does(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(*FOUR, slots=4)
    small = take_job(ledger, worker, waiting(1, age=90))
    assert small.lease.device_uuids == ("FAKE-a",)
    pair = waiting(10, age=80, world_size=2)
    held = take_job(ledger, worker, pair)
    assert held.lease.device_uuids == ("FAKE-b", "FAKE-c")
    assert (held.world_size, held.lease.bytes, held.lease.bound_bytes) == (2, 16 * GIB, 16 * GIB)
    placed = status(ledger, pair)
    assert (placed.status, placed.device, placed.devices) == ("placed", "FAKE-b", ("FAKE-b", "FAKE-c"))
    assert "2 devices (b, c) of node with 2 ranks" in placed.message
    other = waiting(10, age=70, world_size=2)
    assert next_places(ledger, worker, 0) == []  # one device is free, and nothing is leased of it
    assert [each.jobs for each in list_devices(ledger)] == [1, 1, 1, 0]
    waits = status(ledger, other)
    assert waits.status == "waiting"
    assert waits.message == (
        "needs 2 devices of one node, 10.7 GB on each; waits for its turn and 2 free devices at once (free at most 1 "
        "on one node)"
    )
    end(ledger, held)
    assert take_job(ledger, worker, other).lease.device_uuids == ("FAKE-b", "FAKE-c")


def take_job(engine: Engine, worker: str, job_id: str) -> Claim:
    held = take(engine, worker, 0)
    assert held is not None
    assert held.job_id == job_id
    return held


def test_a_claim_of_several_devices_is_recognised_and_a_wrong_place_leaves_nothing(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    worker = joined(gpu("a", 16), gpu("b", 40), slots=2)
    joined(gpu("far", 16), node="another")
    job_id = waiting(3, world_size=2)
    wrong = (("FAKE-a",), ("FAKE-a", "FAKE-a"), ("FAKE-a", "FAKE-far"), ("FAKE-a", "FAKE-gone"), ())
    for devices_ in wrong:
        place = Place(job_id=job_id, worker_id=worker, device_uuids=devices_)
        assert claim(ledger, job_id, "w", "t", 45, place=place) is None
        assert [each.jobs for each in list_devices(ledger)] == [0, 0, 0]
    # the order in which they are named is nobody's: rank 0 computes on the first of the sorted
    place = Place(job_id=job_id, worker_id=worker, device_uuids=("FAKE-b", "FAKE-a"))
    first = claim(ledger, job_id, "w", "token", 45, place=place)
    assert first is not None
    assert first.lease.device_uuids == ("FAKE-a", "FAKE-b")
    assert claim(ledger, job_id, "w", "token", 45, place=place) == first


def test_all_leases_of_an_attempt_drain_and_end_together(
    ledger: Engine, joined: Any, waiting: Any, expire: Any
) -> None:
    worker = joined(gpu("a", 16), gpu("b", 16), slots=2)
    job_id = waiting(1, world_size=2)
    held = take_job(ledger, worker, job_id)
    note_guardian(ledger, job_id, held.fence, 4711, 99)
    expire(job_id)
    assert reap_expired(ledger) == 1
    assert [(each.jobs, each.draining, each.free_bytes) for each in list_devices(ledger)] == [(1, 1, 0)] * 2
    assert take(ledger, worker, 0) is None
    asked: list[Any] = []

    def lives(pid: int, started: int | None) -> bool:
        asked.append((pid, started))
        return False

    assert free_drained(ledger, worker, "space", (), lives) == 2
    assert set(asked) == {(4711, 99)}
    assert take_job(ledger, worker, job_id).attempt == 2


def test_one_job_of_two_ranks_takes_one_slot(ledger: Engine, joined: Any, waiting: Any) -> None:
    """Else a free device of this worker would not count as one that a job can be left to."""
    small = joined(gpu("a", 16), gpu("b", 16), gpu("c", 16), slots=2)
    take_job(ledger, small, waiting(1, age=90, world_size=2))
    large = joined(gpu("d", 80))
    waiting(1, age=0)
    assert next_places(ledger, large, 600) == []
    assert len(next_places(ledger, small, 600)) == 1


def test_on_a_host_ranks_share_its_memory(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(shared("h", 16), slots=2)
    job_id = waiting(1, world_size=4)
    held = take_job(ledger, worker, job_id)
    assert held.lease.device_uuids == ("HOST-h",)
    assert (held.lease.bytes, held.lease.bound_bytes) == (8 * GIB, 2 * GIB)
    assert write_plan(ledger, held, Planned(plan={"host_peak_bytes": int(0.9 * GIB)}))
    assert list_devices(ledger)[0].leased_bytes == pytest.approx(4 * GIB, abs=9)
    assert not write_plan(ledger, take_job(ledger, worker, waiting(world_size=4)), planned(3.2))
    alone = joined(shared("alone", 16))
    assert take_job(ledger, alone, waiting(age=500, world_size=2)).lease.bound_bytes == 8 * GIB
    assert status(ledger, waiting(5, world_size=4)).message == (
        "needs 21.5 GB for 4 ranks on one host; the largest known device is HOST-alone with 17.2 GB"
    )


def planned(gib: float) -> Planned:
    return Planned(plan={"host_peak_bytes": int(gib * GIB)})


def test_a_host_leaves_ranks_for_a_moment_to_free_gpus_of_another_worker(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    host, node = joined(shared("h", 64)), joined(gpu("a", 16), gpu("b", 16), slots=2)
    pair, triple = waiting(2, age=0, world_size=2), waiting(2, age=0, world_size=3)
    assert [each.job_id for each in next_places(ledger, host, 600)] == [triple]
    assert [each.job_id for each in next_places(ledger, host, 0)] == [pair, triple]
    assert [each.job_id for each in next_places(ledger, node, 600)] == [pair]


def test_a_plan_beyond_the_smallest_device_moves_the_job_to_a_group_that_holds_it(
    ledger: Engine, joined: Any, waiting: Any
) -> None:
    worker = joined(*FOUR, slots=4)
    job_id = waiting(1, world_size=2)
    held = take_job(ledger, worker, job_id)
    assert held.lease.device_uuids == ("FAKE-a", "FAKE-b")
    assert not write_plan(ledger, held, planned(27))  # and the tenth: 30, which c and d hold
    hand_back(ledger, held, "misplaced")
    release(ledger, held.job_id, held.fence)
    again = take_job(ledger, worker, job_id)
    assert again.lease.device_uuids == ("FAKE-c", "FAKE-d")
    assert write_plan(ledger, again, planned(45))  # 50: no other pair, so its own plan decides


def test_more_ranks_than_any_node_has_devices_are_said_plainly(ledger: Engine, joined: Any, waiting: Any) -> None:
    worker = joined(*FOUR, slots=4)
    joined(gpu("e", 16), gpu("f", 16), node="another")
    job_id = waiting(world_size=5)
    assert (status(ledger, job_id).status, status(ledger, job_id).message) == (
        "no_device",
        "needs 5 devices of one node; the most that a known node has of that size is 4",
    )
    assert not has_future_work(ledger, worker, 30)
    assert status(ledger, waiting(30, world_size=3)).message.endswith("has of that size is 2")
    waiting(10, world_size=4)
    assert has_future_work(ledger, worker, 30)


@pytest.mark.parametrize("reserving", [True, False])
def test_a_stream_of_small_jobs_does_not_starve_a_large_one(
    ledger: Engine, joined: Any, waiting: Any, reserving: bool
) -> None:
    """Two GPUs, of which one becomes free at a time: without a reservation both never are."""
    worker = joined(gpu("a", 16), gpu("b", 16), slots=2)
    running = [take_job(ledger, worker, waiting(1, age=300)) for _ in range(2)]
    large = waiting(1, age=70, world_size=2)
    for _ in range(12):
        waiting(1, age=10)
        if reserving:
            reserve(ledger, worker, 60)
            assert status(ledger, large).status == "reserved"
        end(ledger, running.pop(0))
        held = take(ledger, worker, 0)
        if held is not None and held.job_id == large:
            break
        running += [] if held is None else [held]
        if not running:
            break
    assert (status(ledger, large).status == "placed") is reserving
    if reserving:
        assert not any(each.reserved for each in list_devices(ledger))


def test_two_large_jobs_never_reserve_half_of_one_each(ledger: Engine, joined: Any, waiting: Any) -> None:
    """Both workers offer the same four GPUs; the older of the jobs gets all of them, and then the other."""
    one, other = joined(*FOUR, slots=4), joined(*FOUR, slots=4)
    running = [take_job(ledger, one, waiting(1, age=300)) for _ in range(4)]
    older, younger = waiting(1, age=90, world_size=4), waiting(1, age=80, world_size=4)
    small = waiting(1, age=0)
    for worker in (other, one, other):
        reserve(ledger, worker, 60)
        assert status(ledger, younger).status == "waiting"
    assert status(ledger, older).message == (
        "needs 4 devices of one node, 1.07 GB on each; 4 devices of node are kept for it, of which 4 are still in use"
    )
    for each in running:
        assert take(ledger, other, 0) is None
        end(ledger, each)
    first = take_job(ledger, other, older)
    reserve(ledger, one, 60)
    end(ledger, first)
    assert take_job(ledger, one, younger).job_id != small


def test_a_group_that_lost_a_device_is_given_up(ledger: Engine, joined: Any, waiting: Any) -> None:
    """The other devices of it serve again, and the job reserves another group where there is one."""
    node, far = joined(gpu("a", 16), gpu("b", 16), slots=2), joined(gpu("c", 40), gpu("d", 40), slots=2, node="far")
    running = {worker: [take_job(ledger, worker, waiting(1, age=300)) for _ in range(2)] for worker in (node, far)}
    large = waiting(1, age=70, world_size=2)
    reserve(ledger, far, 60)  # a smaller group is the other worker's
    assert status(ledger, large).status == "waiting"
    reserve(ledger, node, 60)
    assert status(ledger, large).devices == ("FAKE-a", "FAKE-b")
    left = running[node][0]
    (lost,) = {"FAKE-a", "FAKE-b"} - {left.lease.device_uuid}
    lose(ledger, lost)
    end(ledger, left)
    small = waiting(1, age=0)
    reserve(ledger, node, 60)
    assert take_job(ledger, node, small).lease.device_uuids == left.lease.device_uuids
    reserve(ledger, far, 60)
    assert status(ledger, large).devices == ("FAKE-c", "FAKE-d")


def lose(engine: Engine, uuid: str) -> None:
    """What a worker does that no longer finds a device."""
    with writing(engine) as connection:
        connection.execute(delete(worker_devices).where(worker_devices.c.device_uuid == uuid))


@pytest.mark.parametrize("number", [30, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dialect", RACED_ON)
def test_of_many_jobs_of_1_to_4_ranks_none_is_halved_and_none_starves(
    ledger: Engine, joined: Any, waiting: Any, at_once: Any, number: int
) -> None:
    """Five agents race for two nodes, and name each group's devices in an order of their own."""
    chosen = random.Random(11)
    ids = {
        waiting(chosen.choice((None, 1, 7, 11)), age=100, world_size=chosen.choice((1, 1, 1, 2, 3, 4)))
        for _ in range(number)
    }
    far: tuple[Device, ...] = tuple(gpu(f"far-{each.name}", each.capacity_bytes // GIB) for each in FOUR)
    fleet = [joined(*FOUR, slots=4) for _ in range(3)] + [joined(*far, slots=4, node="far") for _ in range(2)]
    ended: list[str] = []

    def work(agent: int) -> Any:
        faults = []
        mine: list[Claim] = []
        since, seen = Stopwatch(), 0
        while len(ended) < len(ids) and since.seconds() < 120:  # without any that ended
            if len(ended) > seen:
                since, seen = Stopwatch(), len(ended)
            held = take(ledger, fleet[agent], 0) if len(mine) < 2 else None
            if held is not None:
                mine.append(held)
                faults += over_committed(ledger) + halved(ledger)
            else:
                reserve(ledger, fleet[agent], 1)
                time.sleep(0.02)
            if mine and (held is None or len(mine) == 2):
                end(ledger, mine[0])
                ended.append(mine.pop(0).job_id)
        return faults

    assert at_once(5, work) == [[]] * 5
    assert sorted(ended) == sorted(ids)  # each once, and none was starved
