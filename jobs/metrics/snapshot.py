"""A snapshot: counts and ages of what the ledger holds at one moment, for the operator's metrics.

Every query reads queued and running jobs, or counters, through an index: ended jobs, however many, cost nothing.
"""

from collections.abc import Mapping

from sqlalchemy import Connection, Engine, func, literal, select, text

from catalog.record import record
from jobs.devices.registry import DeviceStatus, read_devices
from jobs.lifecycle import HELD, State
from jobs.metrics.counters import Counter, Reconciler, read_counters, seconds_since_round
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading
from jobs.schema.tables import jobs, workers

_STATEMENT_SECONDS = 2


@record
class LedgerSnapshot:
    """Counts and ages, of all tenants together."""

    active_jobs: Mapping[State, int]
    """Those that have not ended, by state."""
    queue_oldest_seconds: float
    """The longest time that a job has been in the queue; 0 where it is empty."""
    leases_expired: int
    """Jobs with an expired lease that no reaper has taken yet."""
    workers: int
    """The number of workers that were seen lately."""
    slots: int
    """The number of jobs that they can run at once."""
    slots_busy: int
    """The slots that hold a job."""
    devices: tuple[DeviceStatus, ...]
    counters: Mapping[Counter, Mapping[str, int]]
    seconds_since_round: Mapping[Reconciler, float]
    """Seconds by reconciler; one that never had a round is absent."""


def take_snapshot(engine: Engine) -> LedgerSnapshot:
    """Take a snapshot in one transaction of at most two seconds per statement.

    ``LedgerUnavailable`` if the database does not answer.
    """
    with reading(engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SET LOCAL statement_timeout = '{_STATEMENT_SECONDS}s'"))
        waiting, waiting_seconds = _waiting(connection)
        workers_seen, slots = _workers(connection)
        return LedgerSnapshot(
            workers=workers_seen,
            slots=slots,
            slots_busy=_busy(connection),
            devices=read_devices(connection),
            active_jobs={**_open(connection), "queued": waiting},
            queue_oldest_seconds=waiting_seconds,
            leases_expired=connection.execute(
                select(func.count()).where(jobs.c.state.in_(HELD), jobs.c.lease_expires_at < ledger_now())
            ).scalar_one(),
            counters=read_counters(connection),
            seconds_since_round=seconds_since_round(connection),
        )


def _waiting(connection: Connection) -> tuple[int, float]:
    # in the statement's text, for the index that holds queued jobs alone
    queued = jobs.c.state == literal("queued", literal_execute=True)
    count, oldest, now = connection.execute(
        select(func.count(), func.min(jobs.c.queued_at), ledger_now()).where(queued)
    ).one()
    return count, 0.0 if oldest is None else max(0.0, (now - oldest).total_seconds())


def _open(connection: Connection) -> dict[State, int]:
    """Jobs that are neither queued nor over, by state; pieces of divided jobs among them."""
    states: list[State] = [*sorted(HELD), "waiting"]
    found = connection.execute(
        select(jobs.c.state, func.count().label("number")).where(jobs.c.state.in_(states)).group_by(jobs.c.state)
    )
    return dict.fromkeys(states, 0) | {row.state: row.number for row in found}


def _workers(connection: Connection) -> tuple[int, int]:
    seen = select(func.count(), func.coalesce(func.sum(workers.c.slots), 0)).where(workers.c.expires_at >= ledger_now())
    number, slots = connection.execute(seen).one()
    return number, int(slots)


def _busy(connection: Connection) -> int:
    held = select(func.count()).where(jobs.c.state.in_(HELD), jobs.c.lease_expires_at >= ledger_now())
    return int(connection.execute(held).scalar_one())
