"""The fence, first in every write: one UPDATE locks the job, checks the token, and draws the next event number.

``UPDATE jobs SET event_seq = event_seq + 1 WHERE id = … AND fence = … AND state IN (…) RETURNING …``
means the same on PostgreSQL and on SQLite (which silently drops FOR UPDATE and FOR SHARE). An
attempt that lost its lease matches no row, so nothing of what follows in its transaction happens.
"""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Engine,
    Row,
    and_,
    bindparam,
    func,
    insert,
    literal,
    select,
    update,
)

from catalog.requests.estimate import ESTIMATE
from catalog.responses.views import timestamp
from jobs.devices.leases import drain
from jobs.errors import LeaseLost
from jobs.lifecycle import HELD, LEGAL_MOVES, TERMINAL, State
from jobs.metrics.counters import add, note_refused
from jobs.records import Claim
from jobs.scheduling.fair_share import is_due
from jobs.schema.clock import ledger_now, ledger_now_after
from jobs.schema.database import note_queued
from jobs.schema.identifiers import new_id
from jobs.schema.tables import job_events, jobs
from jobs.schema.webhook_tables import webhook_deliveries, webhooks

P = ParamSpec("P")
T = TypeVar("T")


_AT_ONCE = 500

# built once: building a statement takes longer than the database takes to do it
_DRAW = update(jobs).values(event_seq=jobs.c.event_seq + 1).returning(*jobs.c, ledger_now().label("now"))
_TAKE = _DRAW.where(
    jobs.c.id == bindparam("job"), jobs.c.state == literal("queued", literal_execute=True), is_due()
).values(
    state="running",
    attempt=jobs.c.attempt + 1,
    fence=jobs.c.fence + 1,
    claim_token=bindparam("token"),
    lease_owner=bindparam("owner"),
    lease_expires_at=ledger_now(bindparam("seconds", type_=Double())),
    started_at=func.coalesce(jobs.c.started_at, ledger_now_after(jobs.c.created_at)),
    checkpoint_bytes=None,
)
_FINISHED_AT = ledger_now_after(func.coalesce(jobs.c.started_at, jobs.c.created_at))
"""Not before it began, whatever the clock was set to meanwhile: no job shows a negative time."""
_EVENT = insert(job_events).values(at=ledger_now())
_HOOKS = select(webhooks.c.id).where(webhooks.c.tenant_id == bindparam("tenant"))
_DELIVERY = insert(webhook_deliveries).values(created_at=ledger_now(), due_at=ledger_now())


def draw(connection: Connection, *conditions: ColumnElement[bool]) -> Row[Any] | None:
    """Lock the one job that fits all conditions, and draw the number of its next event.

    The row has that number as `event_seq` and the database's time as `now`; None if no job fits.
    """
    return connection.execute(_DRAW.where(*conditions)).one_or_none()


def take(
    connection: Connection,
    job_id: str,
    owner: str,
    claim_token: str,
    lease_seconds: float,
) -> Row[Any] | None:
    """Move a queued job that is due to its next holder, as `draw` and `move` in one statement."""
    drawn = connection.execute(
        _TAKE,
        {"job": job_id, "owner": owner, "token": claim_token, "seconds": float(lease_seconds)},
    ).one_or_none()
    if drawn is not None:
        _follow(connection, drawn, "queued", "running", {"attempt": drawn.attempt})
    return drawn


def draw_fenced(connection: Connection, claim: Claim) -> Row[Any]:
    """Lock the job of a claim, and draw the number of its next event."""
    row = draw(
        connection,
        jobs.c.id == claim.job_id,
        jobs.c.fence == claim.fence,
        jobs.c.claim_token == claim.claim_token,
        jobs.c.state.in_(HELD),
    )
    if row is None:
        raise LeaseLost(claim.job_id, claim.fence)
    return row


def by_holder(
    write: Callable[Concatenate[Engine, Claim, P], T],
) -> Callable[Concatenate[Engine, Claim, P], T]:
    """Decorate a write of an attempt so that a refusal is counted, after the rollback of its transaction."""

    @functools.wraps(write)
    def counted(engine: Engine, claim: Claim, /, *given: P.args, **named: P.kwargs) -> T:
        try:
            return write(engine, claim, *given, **named)
        except LeaseLost:
            note_refused(engine)
            raise

    return counted


def own_failure(category: str, code: str, message: str) -> dict[str, Any]:
    """Return the failure of a job that the ledger itself ends, as the frame of an attempt would say it."""
    return {"category": category, "code": code, "message": message, "pointer": None, "layer": None, "detail": None}


def change(connection: Connection, drawn: Row[Any], values: Mapping[str, Any]) -> None:
    """Set columns of a locked job."""
    connection.execute(update(jobs).where(jobs.c.id == drawn.id).values(dict(values)))


def append_event(connection: Connection, drawn: Row[Any], event_type: str, data: Mapping[str, Any]) -> None:
    """Insert an event under the number that `draw` drew; one `draw` allows one event."""
    connection.execute(
        _EVENT,
        {
            "job_id": drawn.id,
            "tenant_id": drawn.tenant_id,
            "seq": drawn.event_seq,
            "type": event_type,
            "data": dict(data),
        },
    )


def move(
    connection: Connection,
    drawn: Row[Any],
    state: State,
    values: Mapping[str, Any] | None = None,
    reason: str | None = None,
) -> None:
    """Move a job that `draw` locked to a state, and write what goes with it: more columns, timestamps, lease, event.

    The reason is for the job's history. ``ValueError`` if the move is not in the table of legal moves.
    """
    if state not in LEGAL_MOVES[drawn.state]:
        raise ValueError(f"no job goes from {drawn.state} to {state}; the legal moves are in jobs.lifecycle")
    changes = {"state": state, **(values or {})}
    if state not in HELD:
        changes |= {"lease_owner": None, "lease_expires_at": None, "claim_token": None}
    if state in TERMINAL:
        changes["finished_at"] = _FINISHED_AT
    change(connection, drawn, changes)
    data = {"attempt": changes.get("attempt", drawn.attempt)} | ({"reason": reason} if reason else {})
    _follow(connection, drawn, drawn.state, state, data)


def change_all(
    connection: Connection,
    which: ColumnElement[bool],
    values: Mapping[str, Any],
    event: tuple[str, Callable[[Row[Any]], Mapping[str, Any]]],
) -> list[str]:
    """Set columns of all jobs that fit a condition, each with an event, in a few statements, and return their ids.

    No other transaction may be able to lock several of these jobs. The event is its type, and its content from a row
    with the job's `id`, `state` and `attempt`.
    """
    kind, content = event
    columns = (jobs.c.id, jobs.c.tenant_id, jobs.c.event_seq, jobs.c.state, jobs.c.attempt)
    changed = update(jobs).where(which).values({**values, "event_seq": jobs.c.event_seq + 1}).returning(*columns)
    rows = connection.execute(changed).all()
    for start in range(0, len(rows), _AT_ONCE):
        told = [
            {"job_id": row.id, "tenant_id": row.tenant_id, "seq": row.event_seq, "type": kind, "data": content(row)}
            for row in rows[start : start + _AT_ONCE]
        ]
        connection.execute(_EVENT, told)
    return [row.id for row in rows]


def cancel_queued(connection: Connection, which: ColumnElement[bool], reason: str) -> None:
    """Cancel all queued jobs that fit a condition, as `move` cancels one."""
    values = {"state": "cancelled", "finished_at": _FINISHED_AT, "cancel_requested_at": ledger_now()}
    event = "state", lambda row: {"state": row.state, "attempt": row.attempt, "reason": reason}
    ids = change_all(connection, and_(which, jobs.c.state == "queued"), values, event)
    if ids:
        add(connection, "moves", "cancelled", len(ids))


def _follow(connection: Connection, drawn: Row[Any], before: State, after: State, data: Mapping[str, Any]) -> None:
    """Do all that goes with a move beside the job's own row."""
    add(connection, "moves", after)
    if before in HELD and after not in HELD:
        drain(connection, drawn)
    if after == "queued":
        note_queued(connection)
    append_event(connection, drawn, "state", {"state": after, **data})
    announce(connection, drawn, before, after)


def announce(connection: Connection, drawn: Row[Any], before: State | None, after: State) -> None:
    """Insert a delivery of a locked job's change for each webhook of its tenant; pieces and estimates have none."""
    if drawn.parent_id is not None or drawn.kind == ESTIMATE:
        return
    if hooks := connection.execute(_HOOKS, {"tenant": drawn.tenant_id}).scalars().all():
        links = {"self": f"/v1/jobs/{drawn.id}", "results": f"/v1/jobs/{drawn.id}/results"}
        named = {"job": drawn.id, "name": drawn.name, "labels": drawn.labels or {}, "links": links}
        data = named | {"tenant": drawn.tenant_id, "before": before, "after": after, "seq": drawn.event_seq}
        payload = json.dumps({"type": f"job.{after}", "timestamp": timestamp(drawn.now), "data": data})
        row = {"tenant_id": drawn.tenant_id, "job_id": drawn.id, "payload": payload}
        connection.execute(_DELIVERY, [{"id": new_id(), "webhook_id": hook, **row} for hook in hooks])
