"""Workers and devices in the ledger: known while they are seen, the same device under the same UUID, nothing twice."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, delete, insert, select, update

from jobs.devices.registry import (
    Device,
    Worker,
    forget_silent,
    isolation_of_jobs,
    leased_devices,
    list_devices,
    register,
    remove,
    renew,
)
from jobs.records import LOCAL_TENANT
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import device_leases, devices, worker_devices, workers

SMALL = Device(uuid="FAKE-a", kind="fake", name="fake GPU 0", capacity_bytes=16 * 2**30)
LARGE = Device(uuid="FAKE-b", kind="fake", name="fake GPU 1", capacity_bytes=80 * 2**30)
HOST = Device(uuid="HOST-a", kind="host", name="host memory", capacity_bytes=64 * 2**30, used_bytes=2**30)


@pytest.fixture
def joined(ledger: Engine) -> Callable[..., Worker]:
    """``joined(SMALL, LARGE)``: a worker that has registered with these devices."""

    def make(*offered: Device, expiry: float = 3600, **given: Any) -> Worker:
        chosen = {"node": "node-1", "process_space": "space", "version": "0", "slots": 1, "factories": ()} | given
        worker = Worker(id=new_id(), **chosen)
        register(ledger, worker, offered, expiry)
        return worker

    return make


def lease(engine: Engine, device: Device, size: int, *, draining: bool = False) -> None:
    with writing(engine) as connection:
        connection.execute(
            insert(device_leases).values(
                job_id=new_id(),
                fence=1,
                tenant_id=LOCAL_TENANT,
                device_uuid=device.uuid,
                bytes=size,
                whole=device.whole,
                worker_id=secrets.token_hex(4),
                process_space="space",
                leased_at=ledger_now(),
                draining_at=ledger_now() if draining else None,
            )
        )


def known(engine: Engine, table: Any) -> int:
    with reading(engine) as connection:
        return len(connection.execute(select(table)).all())


def test_the_weakest_worker_says_which_walls_hold(ledger: Engine) -> None:
    assert isolation_of_jobs(ledger) is None
    for walls in (("memory", "own_user"), ("memory", "system_calls")):
        worker = Worker(id=new_id(), node="n", process_space="s", version="0", slots=1, factories=(), isolation=walls)
        register(ledger, worker, [], 60)
    assert isolation_of_jobs(ledger) == ("memory",)
    register(ledger, replace(worker, isolation=()), [], 60)  # an earlier version measured nothing
    assert isolation_of_jobs(ledger) == ()


def test_what_is_registered_is_listed_with_what_is_free(ledger: Engine, joined: Any) -> None:
    joined(SMALL, LARGE)
    joined(HOST, node="node-2")
    lease(ledger, LARGE, 5)
    lease(ledger, HOST, 2**30)
    lease(ledger, HOST, 2**30, draining=True)
    found = {each.uuid: each for each in list_devices(ledger)}
    assert [found[each.uuid].free_bytes for each in (SMALL, LARGE, HOST)] == [16 * 2**30, 0, 61 * 2**30]
    host = found[HOST.uuid]
    assert (host.node, host.kind, host.capacity_bytes, host.foreign_bytes) == ("node-2", "host", 64 * 2**30, 2**30)
    assert (host.leased_bytes, host.jobs, host.draining, host.stale, host.reserved) == (2**31, 2, 1, False, False)


def test_two_workers_of_one_gpu_make_one_device(ledger: Engine, joined: Any) -> None:
    first, second = joined(SMALL), joined(SMALL, LARGE)
    assert [each.uuid for each in list_devices(ledger)] == [SMALL.uuid, LARGE.uuid]
    remove(ledger, second.id)
    assert [(each.uuid, each.stale) for each in list_devices(ledger)] == [(SMALL.uuid, False), (LARGE.uuid, True)]
    remove(ledger, first.id)
    assert all(each.stale for each in list_devices(ledger))
    assert known(ledger, workers) == known(ledger, worker_devices) == 0


def test_registering_again_renews_and_drops_what_is_no_longer_there(ledger: Engine, joined: Any) -> None:
    worker = joined(SMALL, LARGE, expiry=-1)
    assert [each.stale for each in list_devices(ledger)] == [True, True]
    register(ledger, worker, (LARGE,), 45)
    assert [(each.uuid, each.stale) for each in list_devices(ledger)] == [(SMALL.uuid, True), (LARGE.uuid, False)]
    assert known(ledger, workers) == 1


def test_a_worker_that_is_forgotten_is_told_to_register(ledger: Engine, joined: Any) -> None:
    worker = joined(SMALL, expiry=-1)
    assert renew(ledger, worker.id, {SMALL.uuid: 0}, 45)
    assert not list_devices(ledger)[0].stale
    remove(ledger, worker.id)
    assert not renew(ledger, worker.id, {SMALL.uuid: 0}, 45)
    assert list_devices(ledger)[0].stale


def test_what_others_hold_is_read_while_no_job_is_there(ledger: Engine, joined: Any) -> None:
    worker = joined(SMALL)
    renew(ledger, worker.id, {SMALL.uuid: 3}, 45)
    assert list_devices(ledger)[0].foreign_bytes == 3
    lease(ledger, SMALL, SMALL.capacity_bytes)
    renew(ledger, worker.id, {SMALL.uuid: 10 * 2**30}, 45)
    assert list_devices(ledger)[0].foreign_bytes == 3
    register(ledger, worker, (Device(**vars(SMALL) | {"used_bytes": 7}),), 45)
    assert list_devices(ledger)[0].foreign_bytes == 3


def test_when_that_was_read_is_known(ledger: Engine, joined: Any) -> None:
    def lately(act: Callable[[], Any]) -> bool:
        with writing(ledger) as connection:
            connection.execute(update(devices).values(foreign_at=ledger_now(-600)))
        act()
        with reading(ledger) as connection:
            return bool(connection.execute(select(devices.c.foreign_at > ledger_now(-300))).scalar_one())

    worker = joined(SMALL)
    with reading(ledger) as connection:
        assert connection.execute(select(devices.c.foreign_at > ledger_now(-300))).scalar_one()
    assert lately(lambda: renew(ledger, worker.id, {SMALL.uuid: 3}, 45))
    assert lately(lambda: register(ledger, worker, (SMALL,), 45))
    assert not lately(lambda: renew(ledger, worker.id, {}, 45))  # it was leased as that was read
    lease(ledger, SMALL, SMALL.capacity_bytes)
    assert not lately(lambda: renew(ledger, worker.id, {SMALL.uuid: 3}, 45))
    assert not lately(lambda: register(ledger, worker, (SMALL,), 45))


@pytest.mark.parametrize("device", [SMALL, HOST])
def test_the_memory_of_a_job_that_ends_after_the_reading_is_not_taken_for_others(
    ledger: Engine, joined: Any, device: Device
) -> None:
    worker = joined(device, LARGE)
    renew(ledger, worker.id, {device.uuid: 3, LARGE.uuid: 4}, 45)
    with writing(ledger) as connection:
        connection.execute(update(devices).values(seen_at=ledger_now(-600)))
    assert leased_devices(ledger) == set()
    lease(ledger, device, 9 * 2**30, draining=True)
    leased = leased_devices(ledger)
    assert leased == {device.uuid}
    read = {device.uuid: 10 * 2**30, LARGE.uuid: 5}  # by the driver, while the jobs are there
    with writing(ledger) as connection:
        connection.execute(delete(device_leases))
    renew(ledger, worker.id, {uuid: used for uuid, used in read.items() if uuid not in leased}, 45)
    with reading(ledger) as connection:
        lately = connection.execute(select(devices).where(devices.c.seen_at > ledger_now(-60))).all()
    # what was left out was seen nonetheless
    assert {row.uuid: row.foreign_bytes for row in lately} == {device.uuid: 3, LARGE.uuid: 5}


def test_nor_is_it_where_the_worker_registers_meanwhile(ledger: Engine, joined: Any) -> None:
    worker = joined(SMALL, LARGE)
    renew(ledger, worker.id, {SMALL.uuid: 3, LARGE.uuid: 4}, 45)
    lease(ledger, SMALL, SMALL.capacity_bytes)
    leased = leased_devices(ledger)
    read = [Device(**vars(each) | {"used_bytes": 10 * 2**30}) for each in (SMALL, LARGE)]
    with writing(ledger) as connection:
        connection.execute(delete(device_leases))
    register(ledger, worker, read, 45, leased)
    assert {each.uuid: each.foreign_bytes for each in list_devices(ledger)} == {SMALL.uuid: 3, LARGE.uuid: 10 * 2**30}


def test_the_long_silent_are_forgotten_but_not_what_is_leased(ledger: Engine, joined: Any) -> None:
    joined(SMALL, LARGE, expiry=-3700)
    live = joined(HOST)
    lease(ledger, LARGE, LARGE.capacity_bytes, draining=True)
    assert forget_silent(ledger) == 1
    assert [each.uuid for each in list_devices(ledger)] == [SMALL.uuid, LARGE.uuid, HOST.uuid]
    with writing(ledger) as connection:
        connection.execute(update(devices).values(seen_at=ledger_now(-90_000)))
    assert forget_silent(ledger) == 1
    assert [each.uuid for each in list_devices(ledger)] == [LARGE.uuid, HOST.uuid]
    assert renew(ledger, live.id, {}, 45)


def test_many_may_register_the_same_devices_at_once(ledger: Engine, joined: Any, at_once: Any) -> None:
    def act(number: int) -> Any:
        worker = joined(*((SMALL, LARGE) if number % 2 else (LARGE, SMALL)))
        return [renew(ledger, worker.id, {LARGE.uuid: 1, SMALL.uuid: 1}, 45) for _ in range(5)]

    assert at_once(8, act) == [[True] * 5] * 8
    assert known(ledger, devices) == 2
    assert known(ledger, worker_devices) == 16
