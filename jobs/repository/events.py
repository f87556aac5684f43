"""Events, a job's history: in order, a page at a time, or the newest of many jobs in one query.

Events of one job become visible in the order of their numbers, because each is numbered under the
lock on its job's row. So a reader that has read up to a number has missed nothing below it.
"""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import JSON, BigInteger, Engine, Row, TableValuedAlias, Text, func, literal, select
from sqlalchemy import cast as sql_cast

from catalog.record import record
from catalog.requests.estimate import ESTIMATE
from jobs.lifecycle import TERMINAL
from jobs.records import Event
from jobs.repository.store import MAX_PAGE, check_limit
from jobs.schema.database import reading
from jobs.schema.identifiers import is_id
from jobs.schema.tables import job_events, jobs

MAX_NUMBER = 2**63 - 1
_AT_ONCE = 2_000
"""Events of one look: what is beyond comes with the next."""


@record
class History:
    """A part of a job's events."""

    events: tuple[Event, ...]
    through: int
    """Every event up to this number stands in ``events`` or before them."""
    more: bool
    """Whether there are more events already."""
    ended: bool
    """Whether the job has ended and no event follows."""


def read_history(engine: Engine, tenant_id: str, job_id: str, after: int, limit: int = MAX_PAGE) -> History | None:
    """Return a page of a job's events above a number, in order, or None if this tenant has no such job.

    ``PageRefused`` if the limit is not 1 to 100.
    """
    check_limit(limit)
    if not is_id(job_id):
        return None
    after = max(0, min(after, MAX_NUMBER))
    owned = (jobs.c.tenant_id == tenant_id, jobs.c.id == job_id, jobs.c.kind != ESTIMATE)
    following = (
        select(job_events)
        .where(job_events.c.tenant_id == tenant_id, job_events.c.job_id == job_id, job_events.c.seq > after)
        .order_by(job_events.c.seq)
        .limit(limit + 1)
    )
    with reading(engine, tenant_id) as connection:
        # first how far the job is, then its events: what the row counts is there to be read
        job = connection.execute(select(jobs.c.event_seq, jobs.c.state).where(*owned)).one_or_none()
        if job is None:
            return None
        rows = connection.execute(following).all()
    events = tuple(_event(row) for row in rows[:limit])
    more = len(rows) > limit
    last = events[-1].seq if events else after
    return History(
        events=events,
        through=last if more else max(last, job.event_seq),
        more=more,
        ended=job.state in TERMINAL and not more,
    )


def read_new_events(engine: Engine, positions: Mapping[str, int | None]) -> dict[str, History]:
    """Return the position of several jobs and their new events, in two statements for all of them.

    A position is the number of the last event known; None asks for the job's position without events. At most 2,000
    events are returned; a job that does not exist any more is absent. No tenant is checked: the caller has made sure
    that each job belongs to its reader.
    """
    with reading(engine) as connection:
        dialect = connection.dialect.name
        named = _pairs(dialect, positions)
        heads = connection.execute(
            select(jobs.c.id, jobs.c.event_seq, jobs.c.state).select_from(named.join(jobs, jobs.c.id == named.c.key))
        ).all()
        behind = {row.id: at for row in heads if (at := positions[row.id]) is not None and at < row.event_seq}
        rows: list[Row[Any]] = []
        if behind:
            wanted = _pairs(dialect, behind)
            above = (job_events.c.job_id == wanted.c.key) & (job_events.c.seq > sql_cast(wanted.c.value, BigInteger))
            rows += connection.execute(
                select(job_events)
                .select_from(wanted.join(job_events, above))
                .order_by(job_events.c.job_id, job_events.c.seq)
                .limit(_AT_ONCE + 1)
            ).all()
    found: dict[str, list[Event]] = {}
    for row in rows[:_AT_ONCE]:
        found.setdefault(row.job_id, []).append(_event(row))
    # the rows end somewhere within the first job that they no longer hold whole
    cut = rows[_AT_ONCE].job_id if len(rows) > _AT_ONCE else None
    seen = {}
    for head in heads:
        events = tuple(found.get(head.id, ()))
        position = positions[head.id]
        more = cut is not None and position is not None and head.id >= cut and position < head.event_seq
        last = events[-1].seq if events else position or 0
        seen[head.id] = History(
            events=events,
            through=last if more else max(last, head.event_seq),
            more=more,
            ended=head.state in TERMINAL and not more,
        )
    return seen


def _pairs(dialect: str, pairs: Mapping[str, int | None]) -> TableValuedAlias:
    """The pairs as a table of `key` and `value`, in one parameter: the statement is the same for any number."""
    text = literal(json.dumps(dict(pairs)), Text)
    if dialect == "postgresql":
        return func.json_each_text(sql_cast(text, JSON)).table_valued("key", "value", name="pairs")
    return func.json_each(text).table_valued("key", "value", name="pairs")


def _event(row: Row[Any]) -> Event:
    return Event(seq=row.seq, at=row.at, type=row.type, data=row.data)
