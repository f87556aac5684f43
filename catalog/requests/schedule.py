"""The schedule of a job: its priority and deadline. Results do not depend on it.

So they stand in the request, and neither in the stored document nor under its digest: a job with
another deadline is the same computation.
"""

from datetime import UTC, datetime, timedelta

from catalog.duration import duration_seconds
from catalog.record import FieldError, record

LOWEST_PRIORITY, HIGHEST_PRIORITY = -10, 10
_LONGEST_DAYS = 3650
_LONGEST_TEXT = 40


@record
class Schedule:
    """When the job runs; nothing in it changes what comes out."""

    priority: int = 0
    """-10 to 10: which of your own waiting jobs goes first. Between tenants the turns stay as they are."""
    deadline: str | None = None
    """The moment at which the job ends as failed if it has not ended before, with its offset from UTC:
    `"2026-12-01T12:00Z"`. What was done by then stays."""
    within: str | None = None
    """The same as a time from the submission on: `"90m"`, `"4h"`, `"2d"`. Give one of the two."""

    def __post_init__(self) -> None:
        """Refuse what cannot be read, or cannot be meant."""
        if not LOWEST_PRIORITY <= self.priority <= HIGHEST_PRIORITY:
            raise FieldError(
                "priority", f"is {self.priority}; take {LOWEST_PRIORITY} (last) to {HIGHEST_PRIORITY} (first)"
            )
        if self.deadline is not None and self.within is not None:
            raise FieldError("within", "contradicts `deadline`; give one of the two")
        _ = self.deadline_at, self.within_seconds

    @property
    def deadline_at(self) -> datetime | None:
        """The moment that `deadline` names, in UTC.

        Raises:
            FieldError: If it is none.
        """
        if self.deadline is None:
            return None
        remedy = 'write date, time and offset from UTC, such as "2026-12-01T12:00Z"'
        if len(self.deadline) > _LONGEST_TEXT:
            raise FieldError("deadline", f"has {len(self.deadline)} characters; {remedy}")
        try:
            moment = datetime.fromisoformat(self.deadline)
        except ValueError as error:
            raise FieldError("deadline", f"is {self.deadline!r}, which is no moment; {remedy}") from error
        if moment.tzinfo is None:
            raise FieldError("deadline", f"is {self.deadline!r}, without an offset from UTC; {remedy}")
        try:
            return moment.astimezone(UTC)
        except OverflowError as error:
            raise FieldError("deadline", f"is {self.deadline!r}, which is beyond all calendars; {remedy}") from error

    @property
    def within_seconds(self) -> float | None:
        """The seconds that `within` names.

        Raises:
            FieldError: If it is not a duration, or one that cannot be meant.
        """
        if self.within is None:
            return None
        seconds = duration_seconds(self.within)
        if seconds is None:
            raise FieldError(
                "within",
                f"is {self.within[:_LONGEST_TEXT]!r}, which is no duration; write a number with its unit "
                '(s, m, h or d), such as "4h"',
            )
        if not 1 <= seconds <= timedelta(days=_LONGEST_DAYS).total_seconds():
            raise FieldError("within", f"is {self.within!r}; take 1 second to {_LONGEST_DAYS} days")
        return seconds
