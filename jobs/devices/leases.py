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
from jobs.devices.offered_classes import offered_classes
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
    most_running: int = 0
    """The cap on the running jobs of a tenant under which it was looked up; 0 for none."""


@record
class DeviceLease:
    """The device and memory that an attempt may use."""

    device_uuid: str
    kind: DeviceKind
    bytes: int
    bound_bytes: int | None
    """The limit of the attempt's plan; None where it has the host to itself and takes the free memory."""


def lease(connection: Connection, taken: Row[Any], place: Place) -> DeviceLease | None:
    """Lease a device for a job that the same transaction has just claimed.

    Args:
        connection: A connection with an open transaction.
        taken: The row of the job, as `take` returned it.
        place: The device, and the worker that offers it.

    Returns:
        The lease, or None if the device has not enough free memory for the job or the worker may not run it.
    """
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
    """Return the device lease of a job's current attempt.

    Args:
        connection: A connection with an open transaction.
        job: The job's row.

    Returns:
        The lease, or None if the attempt has none.
    """
    row = connection.execute(
        select(device_leases, devices.c.kind)
        .join(devices, devices.c.uuid == device_leases.c.device_uuid)
        .where(device_leases.c.job_id == job.id, device_leases.c.fence == job.fence)
    ).one_or_none()
    if row is None:
        return None
    return _device_lease(row.device_uuid, row.kind, row.bytes, whole=row.whole, needs=job.needs_bytes or 0)


def correct(connection: Connection, drawn: Row[Any], needs: int) -> bool:
    """Replace the leased bytes by those of the attempt's memory plan.

    The attempt stays where no device on offer could hold it: then its own plan decides whether it can run here.

    Args:
        connection: A connection with an open transaction.
        drawn: The locked row of the job, as `draw` returned it.
        needs: The bytes of the plan.

    Returns:
        False if the job must be handed back, since another device has room for it and this one has not.
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
    """Mark the lease of a job's attempt as draining: the attempt may write no more, but its processes may still run.

    Args:
        connection: A connection with an open transaction.
        drawn: The locked row of the job, as `draw` returned it.
    """
    silent_since = drawn.lease_expires_at if drawn.lease_expires_at and drawn.lease_expires_at < drawn.now else None
    connection.execute(
        update(device_leases)
        .where(device_leases.c.job_id == drawn.id, device_leases.c.fence == drawn.fence)
        .values(draining_at=silent_since or ledger_now())
    )


def note_guardian(engine: Engine, job_id: str, fence: int, pid: int, started: int | None) -> None:
    """Record the process that leads an attempt's process group, so that others can tell whether it still runs.

    Args:
        engine: The ledger's database.
        job_id: The job.
        fence: The attempt, by its fencing token.
        pid: The process's number.
        started: When it began, in the kernel's clock ticks since boot; None where that cannot be read.
    """
    with writing(engine) as connection:
        connection.execute(
            update(device_leases)
            .where(device_leases.c.job_id == job_id, device_leases.c.fence == fence)
            .values(guardian_pid=pid, guardian_started=started)
        )


def release(engine: Engine, job_id: str, fence: int) -> None:
    """Delete the lease of an attempt after all its processes have ended.

    Args:
        engine: The ledger's database.
        job_id: The job.
        fence: The attempt, by its fencing token.
    """
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
    """Delete the draining leases of attempts that have no running process any more.

    Args:
        engine: The ledger's database.
        worker_id: The worker that asks.
        process_space: The machine and namespace in which this worker can tell whether a process lives.
        running: (job, fence) of the attempts that this worker still supervises.
        lives: Returns whether any process lives in the group of a guardian with that number and start.

    Returns:
        The number of deleted leases.
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
    """Return whether a device may run a job, apart from its memory.

    Args:
        job: The job's row.
        kind: The device's kind.
        factories: The factories that its worker lists; `*` means all.

    Returns:
        True if the worker lists the job's factories, and the device has the class of the job's first attempt.
    """
    named = {name for name in (job.model_factory, job.data_factory) if name is not None}
    return job.device_class in (None, device_class(kind)) and ("*" in factories or named <= set(factories))


def device_class(kind: str) -> str:
    """Return the class of devices that compute the same numbers: a fake GPU computes on the CPU.

    Args:
        kind: A device's kind.

    Returns:
        `cuda` or `cpu`.
    """
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
    """Return a job's equal share of a shared host; 0 if it has the host to itself or a plan of its own."""
    share = int(device.capacity_bytes // max(1, slots))
    return 0 if planned or slots <= 1 or share > free else share


def _held_elsewhere(connection: Connection, drawn: Row[Any], needs: int, here: str) -> bool:
    """Return whether another device on offer could hold the job beside the memory in use there by others.

    So could one of a machine that an autoscaler would start for it.

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
    return any(suits(drawn, row.kind, row.factories) for row in (*found, *offered_classes(connection, needs)))


def suits_condition(kind: str, factories: Collection[str]) -> ColumnElement[bool]:
    """Return `suits` as an SQL condition on `jobs`.

    Args:
        kind: The device's kind.
        factories: The factories that its worker lists; `*` means all.

    Returns:
        The condition.
    """
    conditions: list[ColumnElement[bool]] = [
        or_(jobs.c.device_class.is_(None), jobs.c.device_class == device_class(kind))
    ]
    if "*" not in factories:
        listed = sorted(factories)
        conditions += [or_(each.is_(None), each.in_(listed)) for each in (jobs.c.model_factory, jobs.c.data_factory)]
    return and_(*conditions)
