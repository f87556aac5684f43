"""The registry of workers and their devices in the ledger: what each offers, when it was seen, and its leases.

A worker registers under an id of its own and renews it; one that falls silent is counted on no more, and its row
goes in the end. A device is known by its UUID, so several workers may offer the same one: the lease decides who
computes there. What a device holds beside its jobs (`foreign_bytes`) is read while no job is on it, and `foreign_at`
says when it last was: where leases overlap without end the figure grows old.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    bindparam,
    case,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    update,
)

from catalog.record import record
from jobs.schema.clock import ledger_now
from jobs.schema.database import insert_into, reading, writing
from jobs.schema.tables import device_leases, devices, machines, worker_devices, workers

DeviceKind = Literal["cuda", "fake", "host"]

_FORGET_WORKER_SECONDS = 3600.0
_FORGET_DEVICE_SECONDS = 86_400.0


@record
class Device:
    """A device that a worker offers, as it was read just now."""

    uuid: str
    kind: DeviceKind
    name: str
    capacity_bytes: int
    used_bytes: int = 0
    """Memory in use, by jobs or others."""

    @property
    def whole(self) -> bool:
        """Whether a job gets the whole device; the host's memory is shared by bytes."""
        return self.kind != "host"


@record
class Worker:
    """A worker process's description of itself."""

    id: str
    node: str
    process_space: str
    """The scope of process numbers: a boot of a machine, and a namespace there."""
    version: str
    slots: int
    factories: tuple[str, ...]
    """The factories of the jobs that it takes; `*` is all."""
    isolation: tuple[str, ...] = ()
    """The walls between it and its jobs, as it measured them."""
    machine_id: str | None = None
    """The machine of `jobs.autoscale` that it runs on; None of a worker that was started otherwise."""
    paused: str | None = None
    """The reason why it takes no jobs at the moment; None where it does."""


@record
class DeviceStatus:
    """A device as everybody may see it."""

    uuid: str
    kind: DeviceKind
    name: str
    node: str
    capacity_bytes: int
    foreign_bytes: int
    """Memory in use by others than jobs."""
    leased_bytes: int
    """Memory leased to jobs, including draining leases."""
    free_bytes: int
    jobs: int
    draining: int
    """The draining ones among them: they write nothing any more."""
    seen_at: datetime
    stale: bool
    """No worker that was seen lately offers it."""
    reserved: bool
    """Kept for a job that waits for all of its memory to become free."""


def register(
    engine: Engine, worker: Worker, offered: Sequence[Device], expiry_seconds: float, leased: Collection[str] = ()
) -> None:
    """Insert a worker and its devices, or renew them.

    Args:
        offered: All devices that it offers, with the memory in use there.
        expiry_seconds: The worker counts as gone after so long without another call.
        leased: UUIDs of devices with leases (`leased_devices`): what others hold there is not read anew.
    """
    with writing(engine) as connection:
        values = {
            "id": worker.id,
            "node": worker.node[:200],
            "process_space": worker.process_space[:300],
            "version": worker.version[:40],
            "slots": worker.slots,
            "factories": list(worker.factories),
            "isolation": list(worker.isolation),
            "machine_id": worker.machine_id,
            "paused": _bounded(worker.paused),
            "seen_at": ledger_now(),
            "expires_at": ledger_now(expiry_seconds),
        }
        connection.execute(
            insert_into(connection, workers)
            .values(values | {"started_at": ledger_now()})
            .on_conflict_do_update(index_elements=[workers.c.id], set_=values)
        )
        if worker.machine_id is not None:
            connection.execute(
                update(machines)
                .where(machines.c.id == worker.machine_id, machines.c.joined_at.is_(None))
                .values(joined_at=ledger_now())
            )
        # in one order everywhere, so that two workers of the same devices never wait for each other
        for device in sorted(offered, key=lambda each: each.uuid):
            _register_device(connection, worker, device, leased=device.uuid in leased)
        known = [device.uuid for device in offered]
        connection.execute(
            delete(worker_devices).where(
                worker_devices.c.worker_id == worker.id, worker_devices.c.device_uuid.not_in(known)
            )
        )


def renew(engine: Engine, worker_id: str, used_bytes: dict[str, int], expiry_seconds: float) -> bool:
    """Extend a worker's registration, and update the memory in use on its devices.

    Args:
        used_bytes: Memory in use by UUID; a device that is left out keeps what others were last known to hold there.
        expiry_seconds: The worker counts as gone after so long without another call.

    Returns:
        False if the worker is not registered (any more), and must be registered again.
    """
    offered = select(worker_devices.c.device_uuid).where(worker_devices.c.worker_id == worker_id)
    with writing(engine) as connection:
        found = connection.execute(
            update(workers)
            .where(workers.c.id == worker_id)
            .values(seen_at=ledger_now(), expires_at=ledger_now(expiry_seconds))
        ).rowcount
        if not found:
            return False
        seen = sorted(used_bytes.keys() | set(connection.execute(offered).scalars()))
        if seen:
            connection.execute(
                update(devices)
                .where(devices.c.uuid == bindparam("device"))
                .values(
                    {"seen_at": ledger_now()} | _foreign(bindparam("device"), bindparam("used", type_=BigInteger()))
                ),
                [{"device": uuid, "used": used_bytes.get(uuid)} for uuid in seen],
            )
        return True


def pause(engine: Engine, worker_id: str, reason: str | None) -> None:
    """Note why a worker takes no jobs at the moment, such as `its disk is full`; None where it takes jobs again."""
    with writing(engine) as connection:
        connection.execute(update(workers).where(workers.c.id == worker_id).values(paused=_bounded(reason)))


def leased_devices(engine: Engine) -> set[str]:
    """Return the UUIDs of all devices with a lease, draining ones included.

    A worker calls this right before it reads the memory in use on its devices, and leaves these out of `renew`, or
    names them to `register`. Otherwise the memory of a job that ends right after the reading, and has no lease any
    more, would count as others'. This holds for a shared host as for a GPU: what others hold is read only while no job
    is there.
    """
    with reading(engine) as connection:
        return set(connection.execute(select(device_leases.c.device_uuid).distinct()).scalars())


def isolation_of_jobs(engine: Engine) -> tuple[str, ...] | None:
    """Return the names, sorted, of the walls that every worker has around its jobs; None while no worker is known."""
    with reading(engine) as connection:
        named = (
            connection.execute(select(workers.c.isolation).where(workers.c.expires_at > ledger_now())).scalars().all()
        )
    if not named:
        return None
    return tuple(sorted(set.intersection(*(set(each or ()) for each in named))))


def remove(engine: Engine, worker_id: str) -> None:
    """Delete a worker that ends; its devices stay known for a day, since jobs may wait for them."""
    with writing(engine) as connection:
        connection.execute(delete(workers).where(workers.c.id == worker_id))


def forget_silent(engine: Engine) -> int:
    """Delete workers that were silent for an hour and devices not offered for a day; return the number of rows."""
    leased = exists().where(device_leases.c.device_uuid == devices.c.uuid)
    offered = exists().where(worker_devices.c.device_uuid == devices.c.uuid)
    with writing(engine) as connection:
        gone = connection.execute(delete(workers).where(workers.c.expires_at < ledger_now(-_FORGET_WORKER_SECONDS)))
        old = connection.execute(
            delete(devices).where(devices.c.seen_at < ledger_now(-_FORGET_DEVICE_SECONDS), ~leased, ~offered)
        )
        return gone.rowcount + old.rowcount


def count_slots(engine: Engine) -> int:
    """Return how many jobs all workers that are at work can compute at a time."""
    seen = select(func.coalesce(func.sum(workers.c.slots), 0)).where(workers.c.expires_at >= ledger_now())
    with reading(engine) as connection:
        return int(connection.execute(seen).scalar_one())


def list_devices(engine: Engine) -> tuple[DeviceStatus, ...]:
    """Return the status of every known device, ordered by node."""
    with reading(engine) as connection:
        return read_devices(connection)


def read_devices(connection: Connection) -> tuple[DeviceStatus, ...]:
    """Return what `list_devices` returns, in the caller's transaction; by node, kind and name."""
    leases = (
        select(
            device_leases.c.device_uuid,
            func.sum(device_leases.c.bytes).label("bytes"),
            func.count().label("jobs"),
            func.count(device_leases.c.draining_at).label("draining"),
            func.max(case((device_leases.c.whole, 1), else_=0)).label("whole"),
        )
        .group_by(device_leases.c.device_uuid)
        .subquery()
    )
    offered = (
        exists()
        .where(worker_devices.c.device_uuid == devices.c.uuid)
        .where(workers.c.id == worker_devices.c.worker_id, workers.c.expires_at >= ledger_now())
    )
    query = (
        select(devices, leases, (~offered).label("stale"))
        .outerjoin(leases, leases.c.device_uuid == devices.c.uuid)
        .order_by(devices.c.node, devices.c.kind, devices.c.name, devices.c.uuid)
    )
    rows = connection.execute(query).all()
    return tuple(
        DeviceStatus(
            uuid=row.uuid,
            kind=row.kind,
            name=row.name,
            node=row.node,
            capacity_bytes=row.capacity_bytes,
            foreign_bytes=row.foreign_bytes,
            leased_bytes=int(row.bytes or 0),
            free_bytes=0 if row.whole else max(0, row.capacity_bytes - row.foreign_bytes - int(row.bytes or 0)),
            jobs=row.jobs or 0,
            draining=row.draining or 0,
            seen_at=row.seen_at,
            stale=bool(row.stale),
            reserved=row.reserved_job_id is not None,
        )
        for row in rows
    )


def _register_device(connection: Connection, worker: Worker, device: Device, *, leased: bool) -> None:
    values = {
        "node": worker.node[:200],
        "kind": device.kind,
        "name": device.name[:200],
        "capacity_bytes": device.capacity_bytes,
        "seen_at": ledger_now(),
    }
    others = {} if leased else _foreign(literal(device.uuid), literal(device.used_bytes, BigInteger))
    connection.execute(
        insert_into(connection, devices)
        .values(values | {"uuid": device.uuid, "foreign_bytes": device.used_bytes, "foreign_at": ledger_now()})
        .on_conflict_do_update(index_elements=[devices.c.uuid], set_=values | others)
    )
    connection.execute(
        insert_into(connection, worker_devices)
        .values(worker_id=worker.id, device_uuid=device.uuid)
        .on_conflict_do_nothing(index_elements=[worker_devices.c.worker_id, worker_devices.c.device_uuid])
    )


def _bounded(reason: str | None) -> str | None:
    return None if reason is None else reason[:300]


def _foreign(uuid: ColumnElement[str], used: ColumnElement[int | None]) -> dict[str, ColumnElement[Any]]:
    """Return the new values of others' use: it is read only while no job is there, and kept otherwise."""
    unread = or_(exists().where(device_leases.c.device_uuid == uuid), used.is_(None))
    return {
        "foreign_bytes": case((unread, devices.c.foreign_bytes), else_=used),
        "foreign_at": case((unread, devices.c.foreign_at), else_=ledger_now()),
    }
