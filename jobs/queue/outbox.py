"""The outbox of wake-ups: a relay sends them, and again those of jobs that are not claimed.

A queued job has exactly one outbox row, written with the move that queued it and deleted with
the claim. So a wake-up that a broker loses is sent again, and one too many is harmless: the
claim decides.

Where no worker runs they would pile up at the broker, each sent again and again. A wake-up says no more
than "poll the queue", so a few at the broker are enough for any worker that starts, and no more are added.
"""

from collections.abc import Callable

from sqlalchemy import Engine, func, or_, select, update

from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.tables import outbox

MAX_OUTSTANDING = 64
"""Wake-ups under way at once: ten thousand queued jobs must not fill the broker's memory."""


def relay(
    engine: Engine,
    send_wakeup: Callable[[str], object],
    unclaimed_seconds: float,
    broker_backlog: Callable[[], int] = lambda: 0,
) -> int:
    """Send wake-ups for queued jobs that have had none yet, or were not claimed within ``unclaimed_seconds``.

    Rows are marked before the wake-up is sent, so that no lock is held while a broker is slow; where
    ``send_wakeup`` raises they are unmarked, and a process that dies in between only delays the next one.

    Args:
        engine: The ledger.
        send_wakeup: Sends one wake-up, for the job of that id.
        unclaimed_seconds: A wake-up is sent again if its job is not claimed for so long.
        broker_backlog: Returns how many wake-ups are at the broker, not yet received; together with those there are
            never more than `MAX_OUTSTANDING` (times the processes that relay in the same moment).

    Returns:
        How many wake-ups were sent.

    Raises:
        Exception: Whatever ``send_wakeup`` or ``broker_backlog`` raised, after the wake-ups that were not sent are due
            again.
    """
    room = MAX_OUTSTANDING - broker_backlog()
    if room <= 0:
        return 0
    due = _take_due(engine, unclaimed_seconds, room)
    for position, (row_id, job_id) in enumerate(due):
        try:
            send_wakeup(job_id)
        except Exception:
            _unmark(engine, [row_id, *(later for later, _ in due[position + 1 :])])
            raise
    return len(due)


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
