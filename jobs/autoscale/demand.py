"""The demand: waiting jobs by their needs, and the room for them on workers that run or will soon.

Both are read in one transaction. Jobs count that could be claimed now: queued, due, and of a tenant that may run one
more. A machine on its way counts with all that its class says of it; once its worker has registered, with what that
offers; and no more once the worker has left, though the launcher may still show it.
"""

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, func, literal, select

from jobs.autoscale.decision import Room, WaitingJobs, room_of
from jobs.lifecycle import HELD
from jobs.scheduling.fair_share import is_due
from jobs.scheduling.fleet import FleetDevice, Offer, read_fleet
from jobs.schema.tables import jobs, machine_classes, machines, workers

COMING = ("starting", "pending", "running")

_KINDS = 2000
"""Groups of equal jobs that are looked at, those that wait longest first."""


def read_waiting(connection: Connection, most_running: int) -> list[WaitingJobs]:
    """Read the jobs that could be claimed now, grouped by what they need."""
    needs = (
        func.coalesce(jobs.c.needs_bytes, 0).label("needs_bytes"),
        jobs.c.device_class,
        jobs.c.world_size,
        jobs.c.model_factory,
        jobs.c.data_factory,
    )
    oldest = func.min(jobs.c.queued_at).label("oldest")
    query = (
        # an id begins with the time at which it was made
        select(jobs.c.tenant_id, *needs, func.count().label("number"), func.min(jobs.c.id).label("example"), oldest)
        .where(jobs.c.state == literal("queued", literal_execute=True), is_due())
        .group_by(jobs.c.tenant_id, *needs)
        .order_by(oldest)
        .limit(_KINDS)
    )
    may_run = _running(connection) if most_running else {}
    groups = []
    for row in connection.execute(query):
        number = row.number
        if most_running:
            number = min(number, max(0, most_running - may_run.get(row.tenant_id, 0)))
            may_run[row.tenant_id] = may_run.get(row.tenant_id, 0) + number
        if number:
            named = (row.model_factory, row.data_factory)
            groups.append(
                WaitingJobs(
                    needs_bytes=row.needs_bytes,
                    device_class=row.device_class,
                    world_size=row.world_size,
                    factories=tuple(sorted({name for name in named if name is not None})),
                    count=number,
                    example=row.example,
                )
            )
    return groups


def read_rooms(connection: Connection) -> list[Room]:
    """Read the room on present workers, and on machines that were started for waiting jobs and are on their way."""
    known = {(row.scope, row.name): row for row in connection.execute(select(machine_classes))}
    worth: dict[str, int] = {}
    rooms = []
    for machine in connection.execute(select(machines).where(machines.c.state.in_(COMING))):
        its = known.get((machine.scope, machine.class_name))
        if its is not None:
            worth[machine.id] = its.jobs_per_device
            if machine.joined_at is None:
                rooms.append(room_of(its))
    return rooms + _present(connection, worth)


def _running(connection: Connection) -> dict[str, int]:
    """Running jobs by tenant."""
    query = (
        select(jobs.c.tenant_id, func.count().label("number")).where(jobs.c.state.in_(HELD)).group_by(jobs.c.tenant_id)
    )
    return {row.tenant_id: row.number for row in connection.execute(query)}


def _present(connection: Connection, worth: Mapping[str, int]) -> list[Room]:
    """Rooms of the workers that were seen lately; those of a machine are worth what its class says."""
    offered: dict[str, list[tuple[FleetDevice, Offer]]] = {}
    for each in read_fleet(connection):
        for offer in each.offers:
            if offer.live:
                offered.setdefault(offer.worker_id, []).append((each, offer))
    taken: set[str] = set()
    rooms = []
    for worker in connection.execute(select(workers.c.id, workers.c.slots, workers.c.machine_id)):
        # a device that several workers offer counts for one of them, unless it is a host, which they share
        devices = [(each, offer) for each, offer in offered.get(worker.id, []) if each.uuid not in taken]
        taken |= {each.uuid for each, _ in devices if each.kind != "host"}
        rooms += _of_worker(devices, worker.slots, worth.get(worker.machine_id or "", 1))
    return rooms


def _of_worker(devices: Sequence[tuple[FleetDevice, Offer]], slots: int, worth: int) -> list[Room]:
    """Rooms of one worker, one for each size of device: what is free, and what its devices are worth beyond that."""
    sizes: dict[tuple[str, int], list[tuple[FleetDevice, Offer]]] = {}
    for each, offer in devices:
        now = each.free_bytes >= 0 and worth == 1  # else jobs may wait for all of it
        sizes.setdefault((each.kind, each.free_bytes if now else each.capacity_bytes), []).append((each, offer))
    rooms = []
    for (kind, size), alike in sizes.items():
        free = sum(1 for each, offer in alike if each.free_bytes >= 0)
        free_slots = max(0, alike[0][1].free_slots)
        later = worth - 1
        on_host = kind == "host"
        room = Room(
            kind=kind,
            device_bytes=size,
            devices=len(alike) if later else free,
            slots=(free_slots if on_host else min(free_slots, free))
            + later * (slots if on_host else min(slots, len(alike))),
            units=free + later * len(alike),
            factories=alike[0][1].factories,
            shared=kind == "host" and not later,
        )
        if room.slots:
            rooms.append(room)
    return rooms
