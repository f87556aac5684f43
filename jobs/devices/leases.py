"""Leases of devices: taken with the claim, corrected by the plan, over when the job's processes are gone.

A job of several ranks leases that many GPUs of one node in one transaction, all or none; on a host its ranks share one
lease. Who locks both a job and a device locks the job first, and who locks several devices takes them in the order of
their UUIDs. A lease outlives the right to write: once its attempt has ended or was taken away it *drains*. It is freed
by any process that can see that the lease has no live process left; where that cannot be seen, from another machine or
container, after the worker has been silent so long that its guardian has killed them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Row,
    String,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    true,
    update,
)

from catalog.record import record
from jobs.devices.offered_classes import offered_class
from jobs.devices.registry import DeviceKind
from jobs.devices.requirements import needs_on, suits
from jobs.metrics.counters import add
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
# a change to the row of a device locks it: on both databases none other leases of it before the transaction ends
_LOCK = (
    update(devices)
    .where(devices.c.uuid == bindparam("device"))
    .values(lease_seq=devices.c.lease_seq + 1)
    .returning(*devices.c)
)
_LOCK_FOR = _LOCK.values(reserved_job_id=func.nullif(devices.c.reserved_job_id, bindparam("job", type_=String())))


@record
class Place:
    """The devices that a queued job fits on, as they were looked up."""

    job_id: str
    worker_id: str
    device_uuids: tuple[str, ...]
    """One for each rank; the host's alone where ranks share it."""
    most_running: int = 0
    """The cap on the running jobs of a tenant under which it was looked up; 0 for none."""


@record
class DeviceLease:
    """The devices and memory that an attempt may use."""

    device_uuids: tuple[str, ...]
    """Sorted: rank r computes on the r-th. One alone where ranks share a host."""
    kind: DeviceKind
    bytes: int
    """Leased bytes of the device; of several, those of the one with the fewest."""
    bound_bytes: int | None
    """The limit of the plan of one rank; None where it has the host to itself and takes the free memory."""

    @property
    def device_uuid(self) -> str:
        """The device of rank 0."""
        return self.device_uuids[0]


def lease(connection: Connection, taken: Row[Any], place: Place) -> DeviceLease | None:
    """Lease devices for a job that the same transaction has just claimed; where this returns None it must roll back.

    Args:
        taken: The row of the job, as `take` returned it.
        place: The devices, and the worker that offers them.

    Returns:
        The lease, or None if a device has not enough free memory for the job, there are more or fewer devices than
        ranks or on several nodes, or the worker may not run the job.
    """
    uuids = tuple(sorted(place.device_uuids))
    locked = [connection.execute(_LOCK_FOR, {"device": uuid, "job": taken.id}).one_or_none() for uuid in uuids]
    there = [device for device in locked if device is not None]
    if len(there) < len(uuids) or len({(device.node, device.kind) for device in there}) != 1:
        return None
    on_host = there[0].kind == "host"
    if len(there) != (1 if on_host else taken.world_size) or len(set(uuids)) != len(uuids):
        return None
    leased = [_lease_one(connection, taken, place.worker_id, device) for device in there]
    sizes = [each for each in leased if each is not None]
    if len(sizes) < len(leased):
        return None
    return _device_lease(taken, uuids, there[0].kind, sizes)


def _lease_one(connection: Connection, taken: Row[Any], worker_id: str, device: Row[Any]) -> int | None:
    """Lease one device, and return the leased bytes; None if it cannot be."""
    found = connection.execute(_THERE, {"worker": worker_id, "device": device.uuid}).one_or_none()
    if found is None or not suits(taken, device.kind, found.factories):
        return None
    free = device.capacity_bytes - device.foreign_bytes - int(found.bytes)
    needs = needs_on(taken, device.kind)
    whole = device.kind != "host"
    if (whole and found.number) or (needs > free and taken.needs_bytes is not None) or (whole and free <= 0):
        return None
    leased = free if whole else max(needs, _share(taken, device, free, int(found.all_slots)))
    connection.execute(
        _LEASE,
        {
            "job_id": taken.id,
            "fence": taken.fence,
            "tenant_id": taken.tenant_id,
            "device_uuid": device.uuid,
            "bytes": leased,
            "whole": whole,
            "worker_id": found.id,
            "process_space": found.process_space,
        },
    )
    return leased


def lease_of(connection: Connection, job: Row[Any]) -> DeviceLease | None:
    """Return the lease of a job's current attempt, or None if the attempt has none."""
    rows = connection.execute(
        select(device_leases, devices.c.kind)
        .join(devices, devices.c.uuid == device_leases.c.device_uuid)
        .where(device_leases.c.job_id == job.id, device_leases.c.fence == job.fence)
        .order_by(device_leases.c.device_uuid)
    ).all()
    if not rows:
        return None
    return _device_lease(job, [row.device_uuid for row in rows], rows[0].kind, [row.bytes for row in rows])


def correct(connection: Connection, drawn: Row[Any], needs: int) -> bool:
    """Replace the leased bytes by those of the attempt's memory plan.

    The attempt stays where no device on offer could hold it: then its own plan decides whether it can run here.

    Args:
        drawn: The locked row of the job, as `draw` returned it.
        needs: The bytes of the plan, of one rank.

    Returns:
        False if the job must be handed back, since another device has room for it and this one has not.
    """
    mine = and_(device_leases.c.job_id == drawn.id, device_leases.c.fence == drawn.fence)
    rows = connection.execute(select(device_leases).where(mine)).all()
    if not rows:
        return True
    row, here = rows[0], [each.device_uuid for each in rows]
    if row.whole:
        return needs <= min(each.bytes for each in rows) or not _held_elsewhere(connection, drawn, needs, here)
    of_rank, needs = needs, needs * drawn.world_size
    device = connection.execute(_LOCK, {"device": row.device_uuid}).one_or_none()
    if device is None:
        return True
    held = _leased(connection, row.device_uuid, ~mine)
    alone = held.number == 0
    room = device.capacity_bytes if alone else device.capacity_bytes - device.foreign_bytes - held.bytes
    if needs > room:
        elsewhere = _held_elsewhere(connection, drawn, of_rank, here)
        # once alone it would find what others than jobs leave of the host, and for more it would wait for ever
        if elsewhere or (not alone and needs <= device.capacity_bytes - device.foreign_bytes):
            return False
    # where it goes on although it is more than there is, no job is let in beside it
    connection.execute(update(device_leases).where(mine).values(bytes=min(needs, max(room, 0))))
    return True


def drain(connection: Connection, drawn: Row[Any]) -> None:
    """Mark the lease of a locked job's attempt as draining: it may write no more, but its processes may still run."""
    silent_since = drawn.lease_expires_at if drawn.lease_expires_at and drawn.lease_expires_at < drawn.now else None
    connection.execute(
        update(device_leases)
        .where(device_leases.c.job_id == drawn.id, device_leases.c.fence == drawn.fence)
        .values(draining_at=silent_since or ledger_now())
    )


def follow_clock(connection: Connection, drawn: Row[Any], lease_seconds: float) -> None:
    """Move the beginning of an attempt's lease with a clock that was set since its last heartbeat.

    By that, no more than ``lease_seconds`` have passed. So a tenant is charged for at most one of these for each time
    that the clock is set, and not for hours that the clock alone has run.

    Args:
        drawn: The locked row of the job, as `draw` returned it, with the lease that is about to be renewed.
        lease_seconds: Its length.
    """
    latest: datetime = drawn.lease_expires_at
    earliest = latest - timedelta(seconds=lease_seconds)
    if earliest <= drawn.now <= latest:
        return
    set_by = drawn.now - max(earliest, min(drawn.now, latest))
    mine = and_(device_leases.c.job_id == drawn.id, device_leases.c.fence == drawn.fence)
    for uuid, leased_at in connection.execute(
        select(device_leases.c.device_uuid, device_leases.c.leased_at).where(mine)
    ).all():
        one = update(device_leases).where(mine, device_leases.c.device_uuid == uuid)
        connection.execute(one.values(leased_at=leased_at + set_by))


def note_guardian(engine: Engine, job_id: str, fence: int, pid: int, started: int | None) -> None:
    """Record the process that leads an attempt's process group, so that others can tell whether it still runs.

    ``started`` is in the kernel's clock ticks since boot; None where that cannot be read.
    """
    with writing(engine) as connection:
        connection.execute(
            update(device_leases)
            .where(device_leases.c.job_id == job_id, device_leases.c.fence == fence)
            .values(guardian_pid=pid, guardian_started=started)
        )


def release(engine: Engine, job_id: str, fence: int) -> None:
    """Delete the lease of an attempt after all its processes have ended."""
    with writing(engine) as connection:
        forget(connection, device_leases.c.job_id == job_id, device_leases.c.fence == fence)


def forget(connection: Connection, *conditions: ColumnElement[bool]) -> None:
    """Delete the leases that fit all conditions, and count for their tenants how long their attempts held them.

    They count until they drained or their attempt's lease ran out: while a service is off, none is there to free them.
    """
    held = and_(jobs.c.id == device_leases.c.job_id, jobs.c.fence == device_leases.c.fence)
    expiry = select(jobs.c.lease_expires_at).where(held).correlate(device_leases).scalar_subquery()
    leased = device_leases.c
    columns = (leased.tenant_id, leased.leased_at, ledger_now(), leased.draining_at, expiry)
    for tenant_id, since, *ends in connection.execute(
        delete(device_leases).where(*conditions).returning(*columns)
    ).all():
        seconds = (min(filter(None, ends)) - since).total_seconds()
        add(connection, "device_milliseconds", tenant_id, max(0, round(1000 * seconds)))


def free_drained(
    engine: Engine,
    worker_id: str,
    process_space: str,
    running: Collection[tuple[str, int]],
    lives: Callable[[int, int | None], bool],
) -> int:
    """Delete the draining leases of attempts that have no running process any more.

    Args:
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
    gone = set()
    freed = 0
    for row in draining:
        if (row.job_id, row.fence) in running:
            continue
        if row.process_space == process_space and row.guardian_pid is not None:
            ended = not lives(row.guardian_pid, row.guardian_started)
        else:
            ended = row.worker_id == worker_id or bool(row.over)
        if ended:
            gone.add((row.job_id, row.fence))
            freed += 1
    for job_id, fence in sorted(gone):
        release(engine, job_id, fence)
    return freed


def _leased(connection: Connection, uuid: str, *conditions: ColumnElement[bool]) -> Row[Any]:
    return connection.execute(
        select(func.count().label("number"), func.coalesce(func.sum(device_leases.c.bytes), 0).label("bytes")).where(
            device_leases.c.device_uuid == uuid, *conditions
        )
    ).one()


def _device_lease(job: Row[Any], uuids: Sequence[str], kind: DeviceKind, leased: Sequence[int]) -> DeviceLease:
    least, ranks = min(leased), job.world_size if kind == "host" else 1
    bounded = kind != "host" or least > needs_on(job, kind)
    return DeviceLease(
        device_uuids=tuple(uuids), kind=kind, bytes=least, bound_bytes=least // ranks if bounded else None
    )


def _share(job: Row[Any], device: Row[Any], free: int, slots: int) -> int:
    """Return a job's equal share of a shared host; 0 if it has the host to itself or a plan of its own.

    Ranks never have it to themselves: each would plan for all that is free.
    """
    share = int(device.capacity_bytes // max(1, slots))
    if job.plan is None and slots > 1 and share <= free:
        return share
    return max(free, 0) if job.plan is None and job.world_size > 1 else 0


def _held_elsewhere(connection: Connection, drawn: Row[Any], needs: int, here: Sequence[str]) -> bool:
    """Return whether other devices on offer could hold the job beside the memory in use there by others.

    So could those of a machine that an autoscaler would start for it.

    Of a host they never let go of all. A GPU may be all the job's some day: that is waited for where a device of this
    lease is too small for it even when empty, not where the two are equals. For several ranks enough such GPUs must
    be on offer by one worker.
    """
    capacity = devices.c.capacity_bytes
    smallest = select(func.min(_here.c.capacity_bytes)).where(_here.c.uuid.in_(here)).scalar_subquery()
    on_host = devices.c.kind == "host"
    least = case((on_host, needs * drawn.world_size), else_=needs)
    found = connection.execute(
        select(devices.c.kind, workers.c.id, workers.c.factories)
        .join(worker_devices, worker_devices.c.device_uuid == devices.c.uuid)
        .join(workers, workers.c.id == worker_devices.c.worker_id)
        .where(
            workers.c.expires_at >= ledger_now(),
            # of several some may serve again beside larger ones
            devices.c.uuid.not_in(here) if len(here) == 1 else true(),
            or_(
                capacity - devices.c.foreign_bytes >= least,
                and_(~on_host, capacity >= needs, smallest < needs),
            ),
        )
    ).all()
    able = Counter((row.id, row.kind) for row in found if suits(drawn, row.kind, row.factories))
    if any(number >= (1 if kind == "host" else drawn.world_size) for (_, kind), number in able.items()):
        return True
    return offered_class(connection, drawn, needs) is not None
