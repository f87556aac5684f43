"""The relay rings the doorbells that stand in the outbox, and again those nobody answered.

A queued job has exactly one outbox row, written with the move that queued it and deleted with
the claim. So whatever a broker loses is rung again, and a doorbell too many is harmless: the
claim decides.

Where no worker runs they would pile up at the broker, each rung again and again. A doorbell says no more
than "look", so a few that lie there wake whoever comes, and no more are added to them.
"""

from collections.abc import Callable

from sqlalchemy import Engine, func, or_, select, update

from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import outbox

MAX_OUTSTANDING = 64
"""Doorbells under way at once: ten thousand queued jobs must not fill the broker's memory."""


def relay(
    engine: Engine,
    ring: Callable[[str], object],
    unclaimed_seconds: float,
    lying: Callable[[], int] = lambda: 0,
) -> int:
    """Ring for queued jobs that were never rung for, or not answered for ``unclaimed_seconds``.

    Rows are marked before the doorbell rings, so that no lock is held while a broker is slow; where
    ``ring`` raises they are unmarked, and a process that dies in between only delays the next ring.

    Args:
        engine: The ledger.
        ring: Sends one doorbell.
        unclaimed_seconds: A doorbell that nobody answered for so long is rung again.
        lying: How many doorbells lie at the broker untaken; together with those there are never more than
            `MAX_OUTSTANDING` (times the processes that relay in the same moment).

    Returns:
        How many doorbells rang.

    Raises:
        Exception: Whatever ``ring`` or ``lying`` raised, after the doorbells it did not ring are due again.
    """
    room = MAX_OUTSTANDING - lying()
    if room <= 0:
        return 0
    due = _take_due(engine, unclaimed_seconds, room)
    for position, (row_id, job_id) in enumerate(due):
        try:
            ring(job_id)
        except Exception:
            _unmark(engine, [row_id, *(later for later, _ in due[position + 1 :])])
            raise
    return len(due)


def oldest_unanswered_seconds(engine: Engine) -> float | None:
    """Age of the oldest outbox row: how long some job has been waiting for a worker."""
    with reading(engine) as connection:
        oldest, now = connection.execute(select(func.min(outbox.c.created_at), ledger_now())).one()
    return None if oldest is None else float((now - oldest).total_seconds())


def _take_due(engine: Engine, unclaimed_seconds: float, room: int) -> list[tuple[str, str]]:
    answered_by = ledger_now(-unclaimed_seconds)
    with writing(engine) as connection:
        outstanding = connection.execute(
            select(func.count()).select_from(outbox).where(outbox.c.sent_at >= answered_by)
        ).scalar_one()
        rows = connection.execute(
            select(outbox.c.id, outbox.c.job_id)
            .where(or_(outbox.c.sent_at.is_(None), outbox.c.sent_at < answered_by))
            .order_by(outbox.c.sent_at.asc().nulls_first(), outbox.c.id)
            .limit(max(0, min(MAX_OUTSTANDING - outstanding, room)))
            .with_for_update(skip_locked=True)  # SQLite drops this: BEGIN IMMEDIATE has the whole file already
        ).all()
        if rows:
            connection.execute(
                update(outbox).where(outbox.c.id.in_([row.id for row in rows])).values(sent_at=ledger_now())
            )
    return [(row.id, row.job_id) for row in rows]


def _unmark(engine: Engine, row_ids: list[str]) -> None:
    with writing(engine) as connection:
        connection.execute(update(outbox).where(outbox.c.id.in_(row_ids)).values(sent_at=None))
