"""The placement of queued jobs: the smallest free device that holds one, and room kept for one that waits long.

A worker leaves a job for a short grace to a smaller free device of another worker that was seen lately. A job that
waits long for more than is free on a device reserves one: nothing younger is put there until it is (`reserve`).
What is decided here may be overtaken; that a device is never leased beyond what it has is for
`jobs.devices.leases` to prevent.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Row, and_, case, literal, or_, select, true, update

from catalog.requests.job import JobDocument
from catalog.requests.memory_requirements import factories_of
from catalog.responses.views import PlacementView
from jobs.devices.leases import Place
from jobs.devices.offered_classes import offered_class
from jobs.devices.requirements import suits_condition
from jobs.records import Job
from jobs.scheduling.candidate_slots import NEEDS
from jobs.scheduling.device_groups import (
    could_start,
    groups_to_reserve,
    is_whole,
    starts_now,
)
from jobs.scheduling.fair_share import AHEAD, is_due, tenants_without_slot
from jobs.scheduling.fleet import FleetDevice, Offer, offered_by, read_fleet
from jobs.scheduling.free_places import find_candidates, free_places
from jobs.scheduling.queue_position import queue_position
from jobs.scheduling.waiting_reason import NO_WALLS, waiting_placement
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import device_leases, devices, jobs
from jobs.tenancy.shared_workers import waits_for_walls

_CANDIDATES = 20


def next_places(
    engine: Engine, worker_id: str, grace_seconds: float, most_running: int = 0, limit: int = 20
) -> list[Place]:
    """Return the jobs that a worker should try to claim, and a device of its own for each.

    Args:
        grace_seconds: A job is left to a smaller free device of another worker for so long.
        most_running: Cap on the running jobs of a tenant; 0 sets none.
        limit: The number of jobs.

    Returns:
        The places in fair-share order; empty if the worker is not registered.
    """
    with reading(engine) as connection:
        fleet = read_fleet(connection)
        own = offered_by(fleet, worker_id)
        free = [(each, offer) for each, offer in own if each.free_bytes >= 0]
        if not free:
            return []
        by_label = {place.label: place for place in free_places(free)}
        found = find_candidates(connection, list(by_label.values()), fleet, grace_seconds, most_running, limit)
        chosen = {row.id: by_label[row.device] for row in found if row.device is not None}
        rows = _rows_of(connection, [job_id for job_id, place in chosen.items() if (place.ranks or 1) > 1])
    uuids = {job_id: place.uuids_for(rows.get(job_id)) for job_id, place in chosen.items()}
    return [
        Place(job_id=job_id, worker_id=worker_id, device_uuids=devices, most_running=most_running)
        for job_id, devices in uuids.items()
        if devices is not None
    ]


def _rows_of(connection: Connection, job_ids: Sequence[str]) -> dict[str, Row[Any]]:
    if not job_ids:
        return {}
    return {row.id: row for row in connection.execute(select(jobs).where(jobs.c.id.in_(job_ids)))}


def has_future_work(engine: Engine, worker_id: str, read_seconds: float) -> bool:
    """Return whether any queued job could run on the worker's devices once they are free.

    Others' use of a device counts if it was read so recently; an older reading is about to be renewed.
    """
    with reading(engine) as connection:
        own = offered_by(read_fleet(connection), worker_id)
        # one that offers nothing is not known (any more), or its devices do not answer: they may again
        fits = _future_places(own, read_seconds)
        holds = or_(*fits) if fits else true()
        return bool(
            connection.execute(
                select(jobs.c.id)
                .where(jobs.c.state == literal("queued", literal_execute=True), is_due(), holds)
                .limit(1)
            ).all()
        )


def _future_places(own: Sequence[tuple[FleetDevice, Offer]], read_seconds: float) -> list[ColumnElement[bool]]:
    """The jobs that one worker's devices could hold once they are free: of one rank, or of several together."""
    fits: list[ColumnElement[bool]] = []
    for (kind, factories), members in _by_kind(own).items():
        sizes = sorted((each.most_bytes_if_read(read_seconds) for each in members), reverse=True)
        may = suits_condition(kind, factories)
        if kind == "host":
            fits += [and_(size >= NEEDS * jobs.c.world_size, may) for size in sizes[:1]]
        else:
            fits += [and_(jobs.c.world_size == ranks, size >= NEEDS, may) for ranks, size in enumerate(sizes, start=1)]
    return fits


def _by_kind(own: Sequence[tuple[FleetDevice, Offer]]) -> dict[tuple[str, tuple[str, ...]], list[FleetDevice]]:
    kinds: dict[tuple[str, tuple[str, ...]], list[FleetDevice]] = {}
    for each, offer in own:
        kinds.setdefault((each.kind, offer.factories), []).append(each)
    return kinds


def reserve(engine: Engine, worker_id: str, after_seconds: float, most_running: int = 0) -> None:
    """Reserve each of the worker's devices for the job that has waited there longest for more than is free.

    A job of several ranks gets a group of GPUs reserved, before those of one do. Any other gets one device reserved,
    the smallest that could hold it beside the memory in use by others. That use is read only while no job is there:
    where the reading is old the device is reserved until it is renewed, and no longer if it is too much. A job of one
    rank that fits on every device of its kind is never passed over for its size, so it reserves none: fair share
    between tenants decides, not the time of waiting. Neither does one of a tenant that runs as many jobs as it may.

    Args:
        after_seconds: Only for jobs that have waited so long.
        most_running: Cap on the running jobs of a tenant; 0 sets none.
    """
    with reading(engine) as connection:
        fleet = read_fleet(connection)
        full = tenants_without_slot(connection, most_running) if most_running else frozenset()
        groups = groups_to_reserve(connection, fleet, worker_id, after_seconds, full)
        wanted: dict[str, str | None] = {
            each.uuid: _reserver(connection, fleet, (each, offer), after_seconds, full)
            for each, offer in offered_by(fleet, worker_id)
            if each.reserver is None and each.uuid not in groups
        }
        stale = {
            each.uuid
            for each, _ in offered_by(fleet, worker_id)
            if each.reserver is not None and (each.reserver.tenant_id in full or _placed(fleet, each))
        }
    changes = {uuid: job for uuid, job in wanted.items() if job is not None} | groups | dict.fromkeys(stale)
    if changes:
        with writing(engine) as connection:
            for uuid in sorted(changes):
                connection.execute(update(devices).where(devices.c.uuid == uuid).values(reserved_job_id=changes[uuid]))


def placement_of(engine: Engine, job: Job, most_running: int = 0) -> PlacementView | None:
    """Return the device of a job, or the reason why it has none yet; None if the job has ended.

    ``most_running`` caps the running jobs of a tenant; 0 sets none.
    """
    if job.ended:
        return None
    with reading(engine) as connection:
        row = connection.execute(
            select(jobs, is_due().label("due"), ledger_now().label("now")).where(jobs.c.id == job.id)
        ).one_or_none()
        if row is None:
            return None
        if row.state != "queued":
            return _placement_of_running(connection, row)
        if waits_for_walls(connection):
            return NO_WALLS
        fleet, offered = read_fleet(connection), offered_class(connection, row, row.needs_bytes or 0)
        full = most_running and row.priority < AHEAD and row.tenant_id in tenants_without_slot(connection, most_running)
        position = queue_position(connection, fleet, row, 0 if full else most_running)
    return waiting_placement(fleet, row, offered, position, most_running if full else 0)


def placement_before(engine: Engine, document: JobDocument, needs_bytes: int | None) -> PlacementView:
    """Return the placement that a job of this document would have if it were submitted now.

    ``needs_bytes`` is the device memory that it is known to need; None if unknown.
    """
    model, data = factories_of(document)
    asked: Any = SimpleNamespace(
        id=None,
        needs_bytes=needs_bytes,
        world_size=document.world_size,
        model_factory=model,
        data_factory=data,
        device_class=None,
        queued_at=None,
        due=True,
    )
    with reading(engine) as connection:
        fleet, offered = read_fleet(connection), offered_class(connection, asked, needs_bytes or 0)
        apart = not waits_for_walls(connection)
    return waiting_placement(fleet, asked, offered) if apart else NO_WALLS


def _placement_of_running(connection: Connection, row: Row[Any]) -> PlacementView | None:
    found = connection.execute(
        select(device_leases.c.device_uuid, devices.c.name, devices.c.node)
        .join(devices, devices.c.uuid == device_leases.c.device_uuid)
        .where(device_leases.c.job_id == row.id, device_leases.c.fence == row.fence)
        .order_by(device_leases.c.device_uuid)
    ).all()
    if not found:
        return None
    ranks = "" if row.world_size == 1 else f" with {row.world_size} ranks"
    names = found[0].name if len(found) == 1 else f"{len(found)} devices ({', '.join(each.name for each in found)})"
    return PlacementView(
        status="placed",
        message=f"computes on {names} of {found[0].node}{ranks}",
        device=found[0].device_uuid,
        devices=tuple(each.device_uuid for each in found),
    )


def _reserver(
    connection: Connection,
    fleet: Sequence[FleetDevice],
    offered: tuple[FleetDevice, Offer],
    after_seconds: float,
    full: frozenset[str],
) -> str | None:
    """The job that this device is to be kept for from now on; none of a tenant in ``full``."""
    device, offer = offered
    whole = [each.capacity_bytes for each in fleet if each.kind != "host" and any(o.live for o in each.offers)]
    more_than = max(device.free_bytes, 0) if device.kind == "host" else min([*whole, device.most_bytes])
    if device.kind != "host" and device.free_bytes >= 0:
        return None  # free for the next job
    ranks = jobs.c.world_size if device.kind == "host" else 1
    rows = connection.execute(
        select(jobs)
        .where(
            jobs.c.state == literal("queued", literal_execute=True),
            *([] if device.kind == "host" else [jobs.c.world_size == 1]),
            jobs.c.needs_bytes * ranks > more_than,
            jobs.c.needs_bytes * ranks
            <= case((jobs.c.queued_at > device.doubted_since, device.capacity_bytes), else_=device.most_bytes),
            jobs.c.queued_at <= ledger_now(-after_seconds),
            suits_condition(device.kind, offer.factories),
            jobs.c.tenant_id.not_in(full),
            is_due(),
        )
        .order_by(jobs.c.queued_at, jobs.c.id)
        .limit(_CANDIDATES)
    ).all()
    kept = {each.reserver.id for each in fleet if each.reserver is not None}
    for job in rows:
        if job.id in kept or starts_now(fleet, job, lambda _: True):
            continue
        smaller = [each for each in fleet if each.rank < device.rank and each.reserver is None]
        if not could_start(smaller, job):
            found: str = job.id
            return found
    return None


def _placed(fleet: Sequence[FleetDevice], device: FleetDevice) -> bool:
    """Return whether the device's reservation is void: its job could start elsewhere, or no longer fits here."""
    job = device.reserver
    if job is None or not device.leaves(job):
        return True
    if job.world_size > 1 and device.kind != "host" and not is_whole(fleet, job):
        return True
    return starts_now(fleet, job, lambda each: each.uuid != device.uuid and each.reserver is None)
