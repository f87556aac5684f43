"""Deadlines in the ledger: the columns of a schedule, and the check, by the database's clock, that one leaves time."""

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement

from catalog.field_errors import Complaint
from catalog.record import plain
from catalog.requests.schedule import Schedule
from jobs.errors import DocumentRefused
from jobs.schema.clock import ledger_now


def stored_schedule(schedule: Schedule) -> dict[str, Any] | None:
    """Return a schedule as the column of a submission holds it, None for the default schedule."""
    return None if schedule == Schedule() else dict(plain(schedule))


def deadline_of(schedule: Schedule) -> datetime | ColumnElement[datetime] | None:
    """Return the deadline of a job that gets a schedule now: a moment, an SQL expression for it, or None."""
    seconds = schedule.within_seconds
    return schedule.deadline_at if seconds is None else ledger_now(seconds)


def require_in_time(deadline_at: datetime | None, now: datetime, pointer: str = "/schedule/deadline") -> None:
    """Refuse a deadline that is not later than the database's time with ``DocumentRefused``, which names the field."""
    if deadline_at is not None and deadline_at <= now:
        message = f"has passed: by the service's clock it is {now:%Y-%m-%dT%H:%M:%SZ}; give a later moment, or none"
        raise DocumentRefused((Complaint(pointer=pointer, code="in_the_past", message=message),))
