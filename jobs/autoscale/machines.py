"""Machines in the ledger: a row before the launcher is asked, followed until the machine is gone.

::

    starting ──> pending ──> running ──> ending ──> ended
        └──────> failed

A row is written, and committed, before its machine is started. So the next decision, here or in another process,
counts it; and where this process dies in between, the machine is recognised by its id in the launcher's queue, or the
row lapses. Within a transaction of `deciding` no other process decides.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, Row, delete, func, insert, select, text, update

from catalog.record import record
from jobs.autoscale.classes import MachineClass
from jobs.autoscale.decision import ClassState, cooldown_left
from jobs.autoscale.launcher import Lent
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import machine_classes, machines

OUTSTANDING = ("starting", "pending", "running", "ending")

_LOCK = 0x6B726F61
"""Advisory lock of PostgreSQL under which one process at a time decides; SQLite has one writer at a time anyway."""
_UNCONFIRMED_SECONDS = 180.0
"""A start that the launcher does not know of after so long did not happen: no launcher is waited for longer."""
_FORGET_SECONDS = 7 * 86_400.0
_NOTE_CHARACTERS = 500
_LAST_STARTS = 20


@record
class Change:
    """A machine that is in another state than the ledger knew."""

    id: str
    class_name: str
    state: str
    handle: str | None
    joined: bool
    """Whether its worker ever registered."""


@contextmanager
def deciding(engine: Engine, *, keep: bool = True) -> Iterator[Connection]:
    """Open the transaction of a decision: no other process decides before it ends."""
    with writing(engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        yield connection
        if not keep:
            connection.rollback()


def outstanding(engine: Engine, scope: str) -> tuple[datetime, dict[str, str | None]]:
    """Return the machines that have not ended as far as the ledger knows."""
    query = select(machines.c.id, machines.c.handle).where(machines.c.scope == scope, machines.c.state.in_(OUTSTANDING))
    with reading(engine) as connection:
        now: datetime = connection.execute(select(ledger_now())).scalar_one()
        return now, {row.id: row.handle for row in connection.execute(query)}


def follow(connection: Connection, scope: str, lent: Mapping[str, Lent], seen_at: datetime) -> list[Change]:
    """Write down what the launcher says of its machines."""
    changes = []
    rows = connection.execute(
        select(machines, ledger_now(-_UNCONFIRMED_SECONDS).label("long_ago")).where(
            machines.c.scope == scope, machines.c.state.in_(OUTSTANDING), machines.c.changed_at < seen_at
        )
    ).all()
    for row in rows:
        state = _state(row, lent.get(row.id))
        handle = lent[row.id].handle if row.id in lent else row.handle
        if (state, handle) == (row.state, row.handle):
            continue
        values = {"state": state, "handle": handle, "changed_at": ledger_now()}
        connection.execute(update(machines).where(machines.c.id == row.id).values(values))
        if state != row.state:
            joined = row.joined_at is not None
            changes.append(Change(id=row.id, class_name=row.class_name, state=state, handle=handle, joined=joined))
    connection.execute(
        delete(machines).where(
            machines.c.state.in_(("ended", "failed")), machines.c.changed_at < ledger_now(-_FORGET_SECONDS)
        )
    )
    return changes


def offer(connection: Connection, scope: str, classes: Sequence[MachineClass]) -> None:
    """Write down the classes, so that decisions for another launcher know what its machines bring."""
    connection.execute(
        delete(machine_classes).where(
            machine_classes.c.scope == scope, machine_classes.c.name.in_([each.name for each in classes])
        )
    )
    for each in classes:
        connection.execute(
            insert(machine_classes).values(
                scope=scope,
                name=each.name,
                kind=each.kind,
                device_bytes=each.device_bytes,
                devices=each.devices,
                jobs_per_device=each.jobs_per_device,
                ceiling=each.ceiling,
                factories=list(each.factories),
                seen_at=ledger_now(),
            )
        )


def class_states(connection: Connection, scope: str, classes: Sequence[MachineClass]) -> list[ClassState]:
    """Return the classes with their machines, and what is left of their cool-downs."""
    now: datetime = connection.execute(select(ledger_now())).scalar_one()
    states = []
    for each in classes:
        here = (machines.c.scope == scope, machines.c.class_name == each.name)
        number = connection.execute(
            select(func.count()).select_from(machines).where(*here, machines.c.state.in_(OUTSTANDING))
        ).scalar_one()
        last = connection.execute(
            select(machines.c.asked_at, machines.c.state, machines.c.joined_at)
            .where(*here)
            .order_by(machines.c.asked_at.desc())
            .limit(_LAST_STARTS)
        ).all()
        since = (now - last[0].asked_at).total_seconds() if last else None
        wait = cooldown_left(each.cooldown_seconds, _failures_in_a_row(last), since)
        states.append(ClassState(machine_class=each, outstanding=number, wait_seconds=wait))
    return states


def ask_for(connection: Connection, scope: str, machine_id: str, class_name: str, why: str) -> None:
    """Write down a machine that is to be started."""
    connection.execute(
        insert(machines).values(
            id=machine_id,
            scope=scope,
            class_name=class_name,
            state="starting",
            note=why[:_NOTE_CHARACTERS],
            asked_at=ledger_now(),
            changed_at=ledger_now(),
        )
    )


def note_started(engine: Engine, machine_id: str, handle: str) -> None:
    """Write down the launcher's name of a machine that it has started."""
    _note(engine, machine_id, state="pending", handle=handle[:200])


def note_failed(engine: Engine, machine_id: str, why: str) -> None:
    """Write down that a machine was not started."""
    _note(engine, machine_id, state="failed", note=why[:_NOTE_CHARACTERS])


def _note(engine: Engine, machine_id: str, **values: str) -> None:
    starting = update(machines).where(machines.c.id == machine_id, machines.c.state == "starting")
    with writing(engine) as connection:
        connection.execute(starting.values(changed_at=ledger_now(), **values))


def _state(row: Row[Any], lent: Lent | None) -> str:
    if lent is not None:
        return lent.stage
    if row.state == "starting":
        return "starting" if row.changed_at > row.long_ago else "failed"
    return "ended"


def _failures_in_a_row(last: Sequence[Any]) -> int:
    """The starts up to the last that gave no worker; one that is still awaited says nothing."""
    number = 0
    for row in last:
        if row.joined_at is not None:
            break
        if row.state in ("ended", "failed"):
            number += 1
    return number
