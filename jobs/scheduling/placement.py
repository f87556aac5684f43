"""Which queued job goes on which device: the smallest free one that holds it, and room kept for who waits long.

A worker leaves a job for a short grace to a smaller free device of another worker that was seen lately. A job that
waits long for more than is free on a device reserves one: nothing younger is put there until it is (`reserve`).
What is decided here may be overtaken; that a device is never leased beyond what it has is for
`jobs.devices.leases` to prevent.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Connection, Engine, Row, and_, case, literal, or_, select, true, update

from catalog.job import JobDocument
from catalog.memory_requirements import factories_of
from catalog.responses import PlacementView
from jobs.devices.leases import Place, device_class, suits, suits_condition
from jobs.records import Job
from jobs.scheduling.candidate_slots import NEEDS, CandidateSlot, candidates_query, slot_values
from jobs.scheduling.fair_share import AHEAD, is_due, tenants_without_slot
from jobs.scheduling.fleet import FleetDevice, Offer, offered_by, read_fleet
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import device_leases, devices, jobs

_CANDIDATES = 20


def next_places(
    engine: Engine, worker_id: str, grace_seconds: float, most_running: int = 0, limit: int = 20
) -> list[Place]:
    """Return the jobs that a worker should try to claim, and a device of its own for each.

    Args:
        engine: The ledger's database.
        worker_id: The worker.
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
        # what is the same of two devices is asked once
        alike = {
            (each.size, each.free_bytes, each.reserver and each.reserver.id): (each, offer) for each, offer in free
        }
        slots, values = [], {"most_bytes": max(each.free_bytes for each, _ in free), "before_grace": -grace_seconds}
        if most_running:
            values["most_running"] = most_running
        for number, (each, offer) in enumerate(alike.values()):
            slot, slot_parameters = _candidate_slot(fleet, each, offer, number)
            slots.append(slot)
            values |= slot_parameters
        query = candidates_query(connection.dialect.name, limit, slots, capped=most_running > 0)
        found = connection.execute(query, values).all()
    return [
        Place(job_id=row.id, worker_id=worker_id, device_uuid=row.device, most_running=most_running)
        for row in found
        if row.device is not None
    ]


def has_future_work(engine: Engine, worker_id: str, read_seconds: float) -> bool:
    """Return whether any queued job could run on the worker's devices once they are free.

    Args:
        engine: The ledger's database.
        worker_id: The worker.
        read_seconds: Others' use of a device counts if it was read so recently; an older reading is about to be
            renewed.

    Returns:
        True if there may be work to come.
    """
    with reading(engine) as connection:
        own = offered_by(read_fleet(connection), worker_id)
        # one that offers nothing is not known (any more), or its devices do not answer: they may again
        fits = [
            and_(each.most_bytes_if_read(read_seconds) >= NEEDS, suits_condition(each.kind, offer.factories))
            for each, offer in own
        ]
        holds = or_(*fits) if fits else true()
        return bool(
            connection.execute(
                select(jobs.c.id)
                .where(jobs.c.state == literal("queued", literal_execute=True), is_due(), holds)
                .limit(1)
            ).all()
        )


def reserve(engine: Engine, worker_id: str, after_seconds: float, most_running: int = 0) -> None:
    """Reserve each of the worker's devices for the job that has waited there longest for more than is free.

    A job gets one device reserved, the smallest that could hold it beside the memory in use by others. That use is read
    only while no job is there: where the reading is old the device is reserved until it is renewed, and no longer if it
    is
    too much. A job that fits on every device of its kind is never passed over for its size, so it reserves none: fair
    share
    between tenants decides, not the time of waiting. Neither does one of a tenant that runs as many jobs as it may.

    Args:
        engine: The ledger's database.
        worker_id: The worker.
        after_seconds: Only for jobs that have waited so long.
        most_running: Cap on the running jobs of a tenant; 0 sets none.
    """
    with reading(engine) as connection:
        fleet = read_fleet(connection)
        full = tenants_without_slot(connection, most_running) if most_running else frozenset()
        wanted = {
            each.uuid: _reserver(connection, fleet, (each, offer), after_seconds, full)
            for each, offer in offered_by(fleet, worker_id)
            if each.reserver is None
        }
        stale = {
            each.uuid
            for each, _ in offered_by(fleet, worker_id)
            if each.reserver is not None and (each.reserver.tenant_id in full or _placed(fleet, each))
        }
    changes = {uuid: job for uuid, job in wanted.items() if job is not None} | dict.fromkeys(stale)
    if changes:
        with writing(engine) as connection:
            for uuid in sorted(changes):
                connection.execute(update(devices).where(devices.c.uuid == uuid).values(reserved_job_id=changes[uuid]))


def placement_of(engine: Engine, job: Job, most_running: int = 0) -> PlacementView | None:
    """Return the device of a job, or the reason why it has none yet.

    Args:
        engine: The ledger's database.
        job: The job.
        most_running: Cap on the running jobs of a tenant; 0 sets none.

    Returns:
        The placement, or None if the job has ended.
    """
    if job.ended:
        return None
    with reading(engine) as connection:
        row = connection.execute(select(jobs).where(jobs.c.id == job.id)).one_or_none()
        if row is None:
            return None
        if row.state != "queued":
            return _placement_of_running(connection, row)
        fleet = read_fleet(connection)
        full = most_running and row.priority < AHEAD and row.tenant_id in tenants_without_slot(connection, most_running)
    if full:
        message = f"{most_running} of your jobs run, as many as may at a time; it begins after one of them has ended"
        return PlacementView(status="waiting", message=message, device=None)
    return _placement_of_queued(fleet, row)


def placement_before(engine: Engine, document: JobDocument, needs_bytes: int | None) -> PlacementView:
    """Return the placement that a job of this document would have if it were submitted now.

    Args:
        engine: The ledger's database.
        document: The document.
        needs_bytes: Device memory that it is known to need; None if unknown.

    Returns:
        The placement.
    """
    with reading(engine) as connection:
        fleet = read_fleet(connection)
    model, data = factories_of(document)
    asked: Any = SimpleNamespace(
        id=None, needs_bytes=needs_bytes, model_factory=model, data_factory=data, device_class=None, queued_at=None
    )
    return _placement_of_queued(fleet, asked)


def _placement_of_running(connection: Connection, row: Row[Any]) -> PlacementView | None:
    found = connection.execute(
        select(device_leases.c.device_uuid, devices.c.name, devices.c.node)
        .join(devices, devices.c.uuid == device_leases.c.device_uuid)
        .where(device_leases.c.job_id == row.id, device_leases.c.fence == row.fence)
    ).one_or_none()
    if found is None:
        return None
    return PlacementView(status="placed", message=f"computes on {found.name} of {found.node}", device=found.device_uuid)


def _placement_of_queued(fleet: Sequence[FleetDevice], row: Row[Any]) -> PlacementView:
    kept = next((each for each in fleet if each.reserver is not None and each.reserver.id == row.id), None)
    needs = "" if row.needs_bytes is None else f"needs {readable(row.needs_bytes)}; "
    if kept is not None:
        message = f"{needs}the device {kept.uuid} with {readable(kept.capacity_bytes)} is kept for it"
        return PlacementView(status="reserved", message=message, device=kept.uuid)
    if any(each.could_hold(row, live=True) for each in fleet):
        what = "its turn and a free device"
        if not any(each.could_lease(row) for each in fleet):
            what = "memory that others than jobs hold on every device that could hold it"
        return PlacementView(status="waiting", message=f"{needs}waits for {what}", device=None)
    if any(each.could_hold(row, live=False) for each in fleet):
        message = f"{needs}the devices that could hold it belong to workers that have not been seen lately"
        return PlacementView(status="no_worker", message=message, device=None)
    if not any(each.offers for each in fleet):
        largest = max((each.capacity_bytes for each in fleet), default=None)
        if largest is None or (row.needs_bytes or 0) <= largest:
            message = f"{needs}no worker offers a device; it begins when one does"
            return PlacementView(status="no_worker", message=message, device=None)
    return _nowhere(fleet, row)


def _nowhere(fleet: Sequence[FleetDevice], row: Row[Any]) -> PlacementView:
    """Name the requirement that no known device or worker meets."""
    named = [name for name in (row.model_factory, row.data_factory) if name is not None]
    able = [each for each in fleet if any(suits(row, each.kind, offer.factories) for offer in each.offers)]
    if not able and any(each.offers for each in fleet):
        if named and not any(
            "*" in offer.factories or set(named) <= set(offer.factories) for each in fleet for offer in each.offers
        ):
            message = f"no known worker lists {' and '.join(f'`{name}`' for name in named)}"
        else:
            message = f"its first attempt computed on a device of class `{row.device_class}`, and no worker offers one"
        return PlacementView(status="no_worker", message=message, device=None)
    largest = max(able or fleet, key=lambda each: each.capacity_bytes)
    message = (
        f"needs {readable(row.needs_bytes or 0)}; the largest known device is {largest.uuid} "
        f"with {readable(largest.capacity_bytes)}"
    )
    return PlacementView(status="no_device", message=message, device=None)


def readable(size_bytes: int) -> str:
    """Return a number of bytes with a decimal unit, such as `1.07 GB`.

    Args:
        size_bytes: The number.

    Returns:
        The text, with three significant digits.
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes} B"


def _candidate_slot(
    fleet: Sequence[FleetDevice], device: FleetDevice, offer: Offer, number: int
) -> tuple[CandidateSlot, dict[str, Any]]:
    """Which queued jobs may be put on this device by this worker now."""
    smaller = [
        each
        for each in fleet
        if each.size < device.size
        and each.free_bytes >= 0
        and each.reserver is None
        and not each.offered_by(offer.worker_id)
        and any(other.live and other.free_slots > 0 for other in each.offers)
    ]
    classes = tuple(sorted({device_class(each.kind) for each in smaller}))
    most = [max(each.free_bytes for each in smaller if device_class(each.kind) == kind) for kind in classes]
    slot = CandidateSlot(kind=device.kind, factories=offer.factories, kept=device.reserver is not None, smaller=classes)
    return slot, slot_values(number, device.uuid, device.free_bytes, device.reserver, most)


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
        return None  # free for whoever comes next
    rows = connection.execute(
        select(jobs)
        .where(
            jobs.c.state == literal("queued", literal_execute=True),
            jobs.c.needs_bytes > more_than,
            jobs.c.needs_bytes
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
        if job.id in kept or any(each.takes_now(job) for each in fleet):
            continue
        smaller = [
            each for each in fleet if each.rank < device.rank and each.reserver is None and each.could_lease(job)
        ]
        if not smaller:
            found: str = job.id
            return found
    return None


def _placed(fleet: Sequence[FleetDevice], device: FleetDevice) -> bool:
    """Return whether the device's reservation is void: its job could start elsewhere, or no longer fits here."""
    job = device.reserver
    if job is None or not device.leaves(job):
        return True
    return any(each.takes_now(job) for each in fleet if each.uuid != device.uuid and each.reserver is None)
