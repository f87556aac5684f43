"""The fleet as one look at the ledger shows it: every device, what is free there and left by others, who offers it.

A device is *smaller* than another by its capacity, and every GPU is smaller than a host, which computes more slowly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, func, select

from jobs.devices.requirements import needs_on, suits
from jobs.scheduling.fair_share import is_due
from jobs.schema.clock import ledger_now
from jobs.schema.tables import device_leases, devices, jobs, worker_devices, workers

_BELIEVED = timedelta(minutes=15)
"""The age up to which a reading of others' use of a device is trusted."""
_NEVER = datetime.fromtimestamp(0, UTC)

# built once: building a statement takes longer than the database takes to answer it
_leased = (
    select(
        device_leases.c.device_uuid,
        func.sum(device_leases.c.bytes).label("bytes"),
        func.count().label("number"),
    )
    .group_by(device_leases.c.device_uuid)
    .subquery()
)
_DEVICES = select(devices, _leased.c.bytes, _leased.c.number, ledger_now().label("now")).outerjoin(
    _leased, _leased.c.device_uuid == devices.c.uuid
)
_busy = (
    # the ranks of one job take one slot
    select(device_leases.c.worker_id, func.count(device_leases.c.job_id.distinct()).label("number"))
    .where(device_leases.c.draining_at.is_(None))
    .group_by(device_leases.c.worker_id)
    .subquery()
)
_OFFERS = (
    select(
        worker_devices.c.device_uuid,
        workers.c.id,
        workers.c.factories,
        workers.c.slots,
        _busy.c.number,
        workers.c.paused,
        (workers.c.expires_at >= ledger_now()).label("live"),
    )
    .join(workers, workers.c.id == worker_devices.c.worker_id)
    .outerjoin(_busy, _busy.c.worker_id == workers.c.id)
)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A device as one worker offers it."""

    worker_id: str
    factories: tuple[str, ...]
    free_slots: int
    """0 while its worker is paused."""
    live: bool
    paused: str | None = None
    """The reason why its worker takes no jobs at the moment."""

    @property
    def takes_jobs(self) -> bool:
        """Whether its worker was seen lately, and takes jobs where a slot is free."""
        return self.live and self.paused is None


@dataclass(frozen=True, kw_only=True)
class FleetDevice:
    """A device, with what is free there now."""

    uuid: str
    node: str
    kind: str
    capacity_bytes: int
    most_bytes: int
    """The bytes that jobs may lease, after others' use as last read."""
    free_bytes: int
    """-1 where nothing may be put there, however little it needs."""
    read_at: datetime
    """When it was last read what others hold: while jobs are there it cannot be."""
    now: datetime
    offers: list[Offer] = field(default_factory=list)
    reserver: Row[Any] | None = None
    """The job that it is kept for."""

    @property
    def size(self) -> tuple[bool, int]:
        """The order of devices by size; equal ones are interchangeable."""
        return self.kind == "host", self.capacity_bytes

    @property
    def rank(self) -> tuple[bool, int, str]:
        """The order from small to large, the same for everybody who looks."""
        return *self.size, self.uuid

    def offered_by(self, worker_id: str) -> bool:
        """Return whether a worker offers this device."""
        return any(each.worker_id == worker_id for each in self.offers)

    def takes_now(self, job: Row[Any]) -> bool:
        """Return whether a live worker with a free slot may run a job, or one rank of it, here, in the free memory."""
        return needs_on(job, self.kind) <= self.free_bytes and any(
            each.live and each.free_slots > 0 and suits(job, self.kind, each.factories) for each in self.offers
        )

    def could_hold(self, job: Row[Any], *, live: bool, taking: bool = False) -> bool:
        """Return whether the job, on a GPU one rank of it, would fit if nothing else were on the device.

        A worker must be allowed to run it here: with ``live`` one that was seen lately, with ``taking`` one that takes
        jobs at the moment.
        """
        return needs_on(job, self.kind) <= self.capacity_bytes and any(
            (each.live or not live) and (each.takes_jobs or not taking) and suits(job, self.kind, each.factories)
            for each in self.offers
        )

    @property
    def doubted_since(self) -> datetime:
        """Jobs queued later doubt what others are said to hold: it was read long ago, and may be gone.

        It is read anew when the device was emptied for one. Where that was in vain the job believes it for as long as
        it had waited by then: it has the device emptied again at twice the age only.
        """
        age = self.now - self.read_at
        return self.now - 2 * age if age > _BELIEVED else self.now

    def most_bytes_if_read(self, seconds: float) -> int:
        """Return the capacity, less others' use if that was read at most so many seconds ago."""
        return self.most_bytes if self.now - self.read_at <= timedelta(seconds=seconds) else self.capacity_bytes

    def leaves(self, job: Row[Any]) -> bool:
        """Return whether others' use leaves enough memory for a job, as far as the job trusts the last reading."""
        doubted = (job.queued_at or self.now) > self.doubted_since
        return needs_on(job, self.kind) <= (self.capacity_bytes if doubted else self.most_bytes)

    def could_lease(self, job: Row[Any]) -> bool:
        """Return whether a job could run here once no other does.

        Reserving the device for a job that cannot is of no use.
        """
        return self.leaves(job) and self.could_hold(job, live=True)


def read_fleet(connection: Connection) -> list[FleetDevice]:
    """Read every known device, from small to large, with its offers and its free memory."""
    rows = connection.execute(_DEVICES).all()
    reserved = [row.reserved_job_id for row in rows if row.reserved_job_id is not None]
    waiting = {}
    if reserved:
        found = connection.execute(
            select(jobs).where(jobs.c.id.in_(reserved), jobs.c.state == "queued", is_due())
        ).all()
        waiting = {row.id: row for row in found}
    offers = _offers(connection)
    fleet = []
    for row in rows:
        most = max(0, row.capacity_bytes - row.foreign_bytes)
        free = max(0, most - int(row.bytes or 0))
        if row.kind != "host" and (row.number or free == 0):
            free = -1
        fleet.append(
            FleetDevice(
                uuid=row.uuid,
                node=row.node,
                kind=row.kind,
                capacity_bytes=row.capacity_bytes,
                most_bytes=most,
                free_bytes=free,
                read_at=row.foreign_at or _NEVER,
                now=row.now,
                offers=offers.get(row.uuid, []),
                # a device whose workers are gone keeps no room: the job may reserve another
                reserver=waiting.get(row.reserved_job_id) if any(o.live for o in offers.get(row.uuid, [])) else None,
            )
        )
    return sorted(fleet, key=lambda each: each.rank)


def _offers(connection: Connection) -> dict[str, list[Offer]]:
    rows = connection.execute(_OFFERS).all()
    offers: dict[str, list[Offer]] = {}
    for row in rows:
        offers.setdefault(row.device_uuid, []).append(
            Offer(
                worker_id=row.id,
                factories=tuple(row.factories),
                free_slots=row.slots - (row.number or 0) if row.paused is None else 0,
                live=bool(row.live),
                paused=row.paused,
            )
        )
    return offers


def offered_by(fleet: Sequence[FleetDevice], worker_id: str) -> list[tuple[FleetDevice, Offer]]:
    """Return the devices of one worker."""
    return [(each, offer) for each in fleet for offer in each.offers if offer.worker_id == worker_id]
