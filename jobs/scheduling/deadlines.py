"""A schedule in the ledger: what its columns hold, and that a deadline leaves time, by the database's clock."""

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement

from catalog.field_errors import Complaint
from catalog.record import plain
from catalog.schedule import Schedule
from jobs.errors import DocumentRefused
from jobs.schema.clock import ledger_now


def asked_for(schedule: Schedule) -> dict[str, Any] | None:
    """The schedule as a submission's column keeps it; null where the document gave none."""
    return None if schedule == Schedule() else dict(plain(schedule))


def deadline_of(schedule: Schedule) -> datetime | ColumnElement[datetime] | None:
    """When a job that gets the schedule now must have ended, as a value for its column."""
    seconds = schedule.within_seconds
    return schedule.deadline_at if seconds is None else ledger_now(seconds)


def require_in_time(deadline_at: datetime | None, now: datetime, pointer: str = "/schedule/deadline") -> None:
    """Return quietly where there is no deadline, or time until it.

    Raises:
        DocumentRefused: If it is not later than ``now``, the database's.
    """
    if deadline_at is not None and deadline_at <= now:
        message = f"has passed: by the service's clock it is {now:%Y-%m-%dT%H:%M:%SZ}; give a later moment, or none"
        raise DocumentRefused((Complaint(pointer=pointer, code="in_the_past", message=message),))
