"""A job's hold on a device: taken with the claim, corrected by the plan, over when its processes are gone.

Who locks both a job and a device locks the job first. A lease outlives the right to write: once its attempt has ended
or was taken away it *drains*, and it is freed by whoever can see that no process of it lives; where that cannot be
seen, from another machine or container, after the worker has been silent for so long that its guardian has killed them.
"""

from collections.abc import Callable, Collection
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Row,
    String,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)

from catalog.record import record
from jobs.devices.registry import DeviceKind
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import device_leases, devices, jobs, worker_devices, workers

_GUARDIAN_GRACE_SECONDS = 3.0
"""From the end of a lease until the guardian of a silent worker has killed what it guards."""

_others = workers.alias("others")
_here = devices.alias("here")
# built once, and what is asked of a device in one statement: a claim waits for each
_LEASES_THERE = device_leases.c.device_uuid == bindparam("device")
_THERE = select(
    workers.c.id,
    workers.c.process_space,
    workers.c.factories,
    select(func.count()).select_from(device_leases).where(_LEASES_THERE).scalar_subquery().label("number"),
    select(func.coalesce(func.sum(device_leases.c.bytes), 0)).where(_LEASES_THERE).scalar_subquery().label("bytes"),
    select(func.coalesce(func.sum(_others.c.slots), 0))
    .join(worker_devices, worker_devices.c.worker_id == _others.c.id)
    .where(worker_devices.c.device_uuid == bindparam("device"), _others.c.expires_at >= ledger_now())
    .scalar_subquery()
    .label("all_slots"),
).where(workers.c.id == bindparam("worker"))
_LEASE = insert(device_leases).values(leased_at=ledger_now())
# whoever changes the row of a device locks it: on both databases nobody else leases of it before the transaction ends
_LOCK = (
    update(devices)
    .where(devices.c.uuid == bindparam("device"))
    .values(lease_seq=devices.c.lease_seq + 1)
    .returning(*devices.c)
)
_LOCK_FOR = _LOCK.values(reserved_job_id=func.nullif(devices.c.reserved_job_id, bindparam("job", type_=String())))


@record
class Place:
    """A device that a queued job fits on, as it was looked up."""

    job_id: str
    worker_id: str
    device_uuid: str


@record
class DeviceLease:
    """What an attempt may use."""

    device_uuid: str
    kind: DeviceKind
    bytes: int
    bound_bytes: int | None
    """What the attempt must plan within; None where it has the host to itself and takes what is free."""


def lease(connection: Connection, taken: Row[Any], place: Place) -> DeviceLease | None:
    """Lease the device of ``place`` for the job that was just ``taken``; None where it has no room for it."""
    device = connection.execute(_LOCK_FOR, {"device": place.device_uuid, "job": taken.id}).one_or_none()
    found = connection.execute(_THERE, {"worker": place.worker_id, "device": place.device_uuid}).one_or_none()
    if device is None or found is None or not suits(taken, device.kind, found.factories):
        return None
    free = device.capacity_bytes - device.foreign_bytes - int(found.bytes)
    needs = taken.needs_bytes or 0
    whole = device.kind != "host"
    if (whole and found.number) or (needs > free and taken.needs_bytes is not None) or (whole and free <= 0):
        return None
    share = _share(device, free, int(found.all_slots), planned=taken.plan is not None)
    leased = free if whole else max(needs, share)
    connection.execute(
        _LEASE,
        {
            "job_id": taken.id,
            "fence": taken.fence,
            "tenant_id": taken.tenant_id,
            "device_uuid": place.device_uuid,
            "bytes": leased,
            "whole": whole,
            "worker_id": found.id,
            "process_space": found.process_space,
        },
    )
    return _device_lease(place.device_uuid, device.kind, leased, whole=whole, needs=needs)


def lease_of(connection: Connection, job: Row[Any]) -> DeviceLease | None:
    """What the holder of a job has leased."""
    row = connection.execute(
        select(device_leases, devices.c.kind)
        .join(devices, devices.c.uuid == device_leases.c.device_uuid)
        .where(device_leases.c.job_id == job.id, device_leases.c.fence == job.fence)
    ).one_or_none()
    if row is None:
        return None
    return _device_lease(row.device_uuid, row.kind, row.bytes, whole=row.whole, needs=job.needs_bytes or 0)


def correct(connection: Connection, drawn: Row[Any], needs: int) -> bool:
    """Lease what the plan says instead of what was guessed; False where the job belongs on another device.

    It stays where no device that is offered could hold it: then its own plan says whether it can be done here.
    """
    mine = and_(device_leases.c.job_id == drawn.id, device_leases.c.fence == drawn.fence)
    row = connection.execute(select(device_leases).where(mine)).one_or_none()
    if row is None:
        return True
    if row.whole:
        return needs <= row.bytes or not _held_elsewhere(connection, drawn, needs, row.device_uuid)
    device = connection.execute(_LOCK, {"device": row.device_uuid}).one_or_none()
    if device is None:
        return True
    held = _leased(connection, row.device_uuid, ~mine)
    alone = held.number == 0
    room = device.capacity_bytes if alone else device.capacity_bytes - device.foreign_bytes - held.bytes
    if needs > room:
        elsewhere = _held_elsewhere(connection, drawn, needs, row.device_uuid)
        # once alone it would find what others than jobs leave of the host, and for more it would wait for ever
        if elsewhere or (not alone and needs <= device.capacity_bytes - device.foreign_bytes):
            return False
    # where it goes on although it is more than there is, nobody is let in beside it
    connection.execute(update(device_leases).where(mine).values(bytes=min(needs, max(room, 0))))
    return True


def drain(connection: Connection, drawn: Row[Any]) -> None:
    """The attempt that held the locked job may write no more; its processes may live yet."""
    silent_since = drawn.lease_expires_at if drawn.lease_expires_at and drawn.lease_expires_at < drawn.now else None
    connection.execute(
        update(device_leases)
        .where(device_leases.c.job_id == drawn.id, device_leases.c.fence == drawn.fence)
        .values(draining_at=silent_since or ledger_now())
    )


def note_guardian(engine: Engine, job_id: str, fence: int, pid: int, started: int | None) -> None:
    """Say which process leads the group that computes, and when it began, by its machine's own count."""
    with writing(engine) as connection:
        connection.execute(
            update(device_leases)
            .where(device_leases.c.job_id == job_id, device_leases.c.fence == fence)
            .values(guardian_pid=pid, guardian_started=started)
        )


def release(engine: Engine, job_id: str, fence: int) -> None:
    """End the lease of an attempt of which nothing runs any more."""
    with writing(engine) as connection:
        connection.execute(
            delete(device_leases).where(device_leases.c.job_id == job_id, device_leases.c.fence == fence)
        )


def free_drained(
    engine: Engine,
    worker_id: str,
    process_space: str,
    running: Collection[tuple[str, int]],
    lives: Callable[[int, int | None], bool],
) -> int:
    """End the draining leases of which nothing runs any more; returns how many.

    Args:
        engine: The ledger.
        worker_id: Who asks.
        process_space: Where the asker can tell whether a process lives.
        running: (job, fence) of what the asker itself still looks after.
        lives: Whether anything lives of the group that a guardian of that number and beginning leads.
    """
    seen = exists().where(workers.c.id == device_leases.c.worker_id, workers.c.expires_at >= ledger_now())
    query = select(
        device_leases,
        and_(device_leases.c.draining_at < ledger_now(-_GUARDIAN_GRACE_SECONDS), ~seen).label("over"),
    ).where(device_leases.c.draining_at.is_not(None))
    with reading(engine) as connection:
        draining = connection.execute(query).all()
    gone = []
    for row in draining:
        if (row.job_id, row.fence) in running:
            continue
        if row.process_space == process_space and row.guardian_pid is not None:
            ended = not lives(row.guardian_pid, row.guardian_started)
        else:
            ended = row.worker_id == worker_id or bool(row.over)
        if ended:
            gone.append((row.job_id, row.fence))
    for job_id, fence in gone:
        release(engine, job_id, fence)
    return len(gone)


def suits(job: Any, kind: str, factories: Collection[str]) -> bool:  # noqa: ANN401 - a row of `jobs`
    """Whether a device of that kind under a worker with that list may compute the job, whatever it needs."""
    named = {name for name in (job.model_factory, job.data_factory) if name is not None}
    return job.device_class in (None, device_class(kind)) and ("*" in factories or named <= set(factories))


def device_class(kind: str) -> str:
    """What decides the numbers: a fake GPU computes on the CPU."""
    return "cuda" if kind == "cuda" else "cpu"


def _leased(connection: Connection, uuid: str, *conditions: ColumnElement[bool]) -> Row[Any]:
    return connection.execute(
        select(func.count().label("number"), func.coalesce(func.sum(device_leases.c.bytes), 0).label("bytes")).where(
            device_leases.c.device_uuid == uuid, *conditions
        )
    ).one()


def _device_lease(uuid: str, kind: DeviceKind, leased: int, *, whole: bool, needs: int) -> DeviceLease:
    return DeviceLease(
        device_uuid=uuid, kind=kind, bytes=leased, bound_bytes=leased if whole or leased > needs else None
    )


def _share(device: Row[Any], free: int, slots: int, *, planned: bool) -> int:
    """What a job on a shared host may plan within: an equal part for each slot; 0 where it is alone or knows better."""
    share = int(device.capacity_bytes // max(1, slots))
    return 0 if planned or slots <= 1 or share > free else share


def _held_elsewhere(connection: Connection, drawn: Row[Any], needs: int, here: str) -> bool:
    """Whether another device that is offered now could hold the job beside what others than jobs hold there.

    Of a host they never let go of all. A GPU may be all the job's some day: that is waited for where this device is too
    small for it whoever leaves it, not where the two are equals.
    """
    capacity = devices.c.capacity_bytes
    this = select(_here.c.capacity_bytes).where(_here.c.uuid == here).scalar_subquery()
    found = connection.execute(
        select(devices.c.kind, workers.c.factories)
        .join(worker_devices, worker_devices.c.device_uuid == devices.c.uuid)
        .join(workers, workers.c.id == worker_devices.c.worker_id)
        .where(
            workers.c.expires_at >= ledger_now(),
            devices.c.uuid != here,
            or_(
                capacity - devices.c.foreign_bytes >= needs,
                and_(devices.c.kind != "host", capacity >= needs, this < needs),
            ),
        )
    ).all()
    return any(suits(drawn, row.kind, row.factories) for row in found)


def suited(kind: str, factories: Collection[str]) -> ColumnElement[bool]:
    """`suits` as a condition on `jobs`."""
    conditions: list[ColumnElement[bool]] = [
        or_(jobs.c.device_class.is_(None), jobs.c.device_class == device_class(kind))
    ]
    if "*" not in factories:
        listed = sorted(factories)
        conditions += [or_(each.is_(None), each.in_(listed)) for each in (jobs.c.model_factory, jobs.c.data_factory)]
    return and_(*conditions)
