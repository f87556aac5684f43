"""Children of a job: inserted, cancelled and looked at under the lock on their parent's row."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, insert, select

from catalog.requests.job import MAX_NAME
from jobs.errors import LedgerUnavailable
from jobs.lifecycle import TERMINAL, State
from jobs.queue.fence import cancel_queued, change, draw, move
from jobs.schema.clock import ledger_now
from jobs.schema.database import note_queued
from jobs.schema.identifiers import new_id
from jobs.schema.tables import job_events, jobs

_log = logging.getLogger("kronoscope.jobs")

LEFT_TO_CHILDREN = ("waiting", "cancelling")
"""States of a parent in which its children decide what becomes of it."""
_INHERITED = (
    *("tenant_id", "kind", "document", "document_sha256", "priority", "deadline_at", "world_size", "needs_bytes"),
    *("device_class", "model_factory", "data_factory", "max_failures", "plan"),
    "labels",
    "queued_at",  # pieces take their parent's place in the queue: what was submitted later comes after them
)
_AT_ONCE = 500


class ParentBusy(Exception):
    """Another transaction holds the parent's row."""


@contextlib.contextmanager
def alone(job_id: str) -> Iterator[None]:
    """Keep what goes wrong with one job from the others: a busy parent is left, a fault logged, until the next round.

    Raises:
        LedgerUnavailable: If the database does not answer.
    """
    try:
        yield
    except ParentBusy:
        return
    except LedgerUnavailable:
        raise
    except Exception:  # noqa: BLE001 - whatever is wrong with the job, the others go on
        _log.exception("a job could not be moved on; the next round tries again", extra={"job": job_id})


def draw_parent(connection: Connection, parent_id: str | None, *, skip_locked: bool = False) -> Row[Any] | None:
    """Lock the parent of a job that is about to end, before the job itself is locked."""
    if parent_id is None:
        return None
    if skip_locked:
        free = select(jobs.c.id).where(jobs.c.id == parent_id).with_for_update(skip_locked=True, key_share=True)
        if connection.execute(free).one_or_none() is None:
            raise ParentBusy(parent_id)
    return draw(connection, jobs.c.id == parent_id, jobs.c.state.in_(LEFT_TO_CHILDREN))


def insert_children(connection: Connection, drawn: Row[Any], children: Sequence[Mapping[str, Any]]) -> None:
    """Insert children of a locked job with their first events; one statement holds up to 500 of them.

    Each has columns beside what it inherits, or in its place: the same of all.
    """
    inherited = {name: getattr(drawn, name) for name in _INHERITED}
    now, first = drawn.now, {"state": "queued", "attempt": 0}
    made = {"parent_id": drawn.id, "state": "queued", "event_seq": 1, "created_at": now}
    rows = [{**inherited, **made, "id": new_id(), **child} for child in children]
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        connection.execute(insert(jobs), part)
        of_job = [{"job_id": row["id"], "tenant_id": row["tenant_id"]} for row in part]
        connection.execute(
            insert(job_events), [{**row, "seq": 1, "at": now, "type": "state", "data": first} for row in of_job]
        )
    note_queued(connection)


def child_name(parent: str | None, title: str) -> str:
    """Return the name of a child, `digits · piece 3 of 6`; a parent's long name is cut."""
    return title if parent is None else f"{parent[: MAX_NAME - len(title) - 3]} · {title}"


def cancel_pieces(connection: Connection, parent_id: str, reason: str) -> bool:
    """Cancel a locked job's pieces that have not ended: queued ones at once, running ones by asking.

    The reason is for their history. Return whether there are pieces that have yet to stop.
    """
    cancel_queued(connection, jobs.c.parent_id == parent_id, reason)
    running = (jobs.c.parent_id == parent_id, jobs.c.state == "running")
    for piece_id in connection.execute(select(jobs.c.id).where(*running).order_by(jobs.c.id)).scalars().all():
        drawn = draw(connection, jobs.c.id == piece_id, *running)
        if drawn is not None:
            change(connection, drawn, {"cancel_requested_at": ledger_now()})
            move(connection, drawn, "cancelling", reason=reason)
    return any_child(connection, parent_id, jobs.c.state.not_in(TERMINAL))


def move_again(
    connection: Connection, parent: Row[Any], state: State, values: Mapping[str, Any], reason: str | None
) -> None:
    """Move a parent under a number of its own: the one that its row was locked with went to the piece's event."""
    again = draw(connection, jobs.c.id == parent.id, jobs.c.state == parent.state)
    if again is not None:  # it is locked, so that nothing else has become of it
        move(connection, again, state, values, reason=reason)


def any_child(connection: Connection, parent_id: str, condition: ColumnElement[bool]) -> bool:
    """Return whether a child of a job fits a condition."""
    found = select(jobs.c.id).where(jobs.c.parent_id == parent_id, condition).limit(1)
    return connection.execute(found).one_or_none() is not None
