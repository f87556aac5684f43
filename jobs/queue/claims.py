"""Claims: an attempt's hold on a job, with its device leases, and the heartbeat that renews it.

Each function is one transaction. `heartbeat` and `last_heartbeat` raise `LeaseLost` if the job has
another holder by now, or none: then the attempt's child must be killed and nothing more be written.

A job has a user number, the same for all its attempts on all machines: those that share a folder must agree about it,
and a slot is another job's a moment later. So the ledger gives the number with the job's first claim. The `USERS`
numbers follow one another; a number is given again only when every job that had it has ended.
"""

import contextlib
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Double, Engine, Row, bindparam, delete, func, insert, select, update

from jobs.devices.leases import DeviceLease, Place, follow_clock, lease, lease_of
from jobs.lifecycle import HELD, TERMINAL
from jobs.queue.attempt_writes import kept_stages
from jobs.queue.fence import by_holder, change, draw_fenced, take
from jobs.queue.piece_progress import percent_after_pieces
from jobs.records import Claim
from jobs.repository.row_records import read_row
from jobs.scheduling.fair_share import is_within_cap
from jobs.schema.clock import ledger_now, ledger_now_after
from jobs.schema.database import writing
from jobs.schema.identifiers import is_id
from jobs.schema.tables import job_users, jobs, layer_results, tenants
from jobs.tenancy.shared_workers import may_take

_MICROSECOND = 1e-6
USERS = 40_000
"""User numbers for jobs; they fit into the 65,536 that a container with a user namespace has."""


def user_number(connection: Connection, job: Row[Any]) -> int:
    """Return the number of a job's user, and give it one at its first claim."""
    own = connection.execute(select(job_users.c.number).where(job_users.c.job_id == job.id)).scalar_one_or_none()
    while own is None:
        given = insert(job_users).values(job_id=job.id, tenant_id=job.tenant_id).returning(job_users.c.number)
        own = connection.execute(given).scalar_one()
        if _is_taken(connection, own):
            connection.execute(delete(job_users).where(job_users.c.number == own))
            own = None
    return int(own) % USERS


def _is_taken(connection: Connection, number: int) -> bool:
    """Whether a job that has yet to end has the same user, by a number that was given rounds ago."""
    earlier = list(range(number % USERS, number, USERS))
    if not earlier:
        return False
    found = select(jobs.c.id).join(job_users, job_users.c.job_id == jobs.c.id)
    taken = found.where(job_users.c.number.in_(earlier), jobs.c.state.not_in(TERMINAL)).limit(1)
    return connection.execute(taken).one_or_none() is not None


class _PlaceTaken(Exception):
    """A device or the tenant's last running slot was taken, or tenants are not apart; the claim is rolled back."""


_RECOGNISE = (
    update(jobs)
    .where(jobs.c.id == bindparam("job"), jobs.c.claim_token == bindparam("token"), jobs.c.state.in_(HELD))
    .values(lease_expires_at=ledger_now(bindparam("seconds", type_=Double())))
    .returning(*jobs.c)
)
"""Its lease runs from now: who asks counts it from this question on."""
_LAST_SERVED = select(func.max(tenants.alias("all_tenants").c.served_at)).scalar_subquery()
_SERVED = (
    update(tenants)
    .values(served_at=ledger_now_after(_LAST_SERVED, _MICROSECOND))
    .where(tenants.c.id == bindparam("served"))
)
"""Later than any tenant was served, or a clock that is set back has all others wait until it has caught up."""


def claim(
    engine: Engine,
    job_id: str,
    owner: str,
    claim_token: str,
    lease_seconds: float,
    place: Place | None = None,
) -> Claim | None:
    """Claim a queued job and lease its devices: all or nothing.

    Args:
        owner: The worker process, for the operator's eyes.
        claim_token: A random string, new for each intention to claim: a claim with a lost reply is repeated with the
            same token, and recognised.
        lease_seconds: The claim holds so long without a heartbeat.
        place: The devices, as `next_places` found them; None for a claim without a device.

    Returns:
        The claim, or None if the job is not queued (any more) or overdue, a device is taken, the tenant runs as many
        jobs as it may, or there are several tenants whom the worker does not keep apart.
    """
    if not is_id(job_id):
        return None
    with contextlib.suppress(_PlaceTaken), writing(engine) as connection:
        taken = take(connection, job_id, owner[:200], claim_token, lease_seconds)
        if taken is not None:
            leased = None
            if place is not None:
                leased = lease(connection, taken, place)
                if leased is None or not may_take(connection, place.worker_id):
                    raise _PlaceTaken
            connection.execute(_SERVED, {"served": taken.tenant_id})  # locks the tenant's row
            if place is not None and place.most_running and not is_within_cap(connection, taken, place.most_running):
                raise _PlaceTaken
            return _claim(connection, taken, leased)
        row = connection.execute(
            _RECOGNISE, {"job": job_id, "token": claim_token, "seconds": float(lease_seconds)}
        ).one_or_none()
        return None if row is None else _claim(connection, row, lease_of(connection, row))
    return None


@by_holder
def heartbeat(engine: Engine, claim: Claim, lease_seconds: float) -> datetime | None:
    """Renew the lease of a claim for so long from now, and return when cancellation was asked for, or None.

    ``LeaseLost`` if the job has another holder by now, or none.
    """
    return last_heartbeat(engine, claim, lease_seconds)


def last_heartbeat(engine: Engine, claim: Claim, lease_seconds: float) -> datetime | None:
    """Renew the lease as `heartbeat` of an attempt that is about to end its job: a refusal is expected, not counted."""
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        follow_clock(connection, drawn, lease_seconds)
        change(connection, drawn, {"lease_expires_at": ledger_now(lease_seconds)})
        asked_at: datetime | None = drawn.cancel_requested_at
        return asked_at


def _claim(connection: Connection, row: Row[Any], leased: DeviceLease | None) -> Claim:
    done: list[tuple[str, int]] = []
    if row.fence > 1:  # nothing is written before the first holder
        query = (
            select(layer_results.c.kind, layer_results.c.ordinal)
            .where(layer_results.c.job_id == row.id)
            .order_by(layer_results.c.kind, layer_results.c.ordinal)
        )
        done = [(kind, ordinal) for kind, ordinal in connection.execute(query)]
    return read_row(
        Claim,
        row,
        job_id=row.id,
        kinds=tuple(row.kind.split(",")),
        completed=tuple(done),
        lease=leased,
        percent=percent_after_pieces(row.progress),
        kept=kept_stages(row.progress),
        user_number=user_number(connection, row),
    )
