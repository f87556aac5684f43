"""The job filter: query parameters of a list of jobs, and the ledger's query for them."""

import re
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Query

from api.problem_details import invalid_parameter
from catalog import ANALYSES
from catalog.duration import duration_seconds
from catalog.field_errors import suggestion
from catalog.record import record
from catalog.requests.job import MAX_NAME
from jobs.lifecycle import STATES
from jobs.repository.store import JobQuery
from jobs.schema.identifiers import is_id

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}=.{0,256}")
_ID_END = re.compile(r"[0-9a-f-]{4,36}")
_LONGEST_MOMENT = 40
_LONGEST_SECONDS = 3650 * 86_400


@record
class JobFilter:
    """The query parameters of a list of jobs."""

    state: Annotated[str | None, Query(description=f"One of {', '.join(STATES)}.")] = None
    kind: Annotated[str | None, Query(description=f"One of {', '.join(ANALYSES)}.")] = None
    label: Annotated[str | None, Query(description="`name=value` of one of your labels.")] = None
    name: Annotated[str | None, Query(description="A part of the job's name; upper and lower case are the same.")] = (
        None
    )
    since: Annotated[
        str | None,
        Query(
            description="Submitted since then: a moment with its offset from UTC, or a time before now such as `2d`."
        ),
    ] = None
    id: Annotated[str | None, Query(description="The last 4 or more characters of the id, or all of it.")] = None
    parent: Annotated[str | None, Query(description="The id of a divided job: its pieces, in place of whole jobs.")] = (
        None
    )
    before: Annotated[str | None, Query(description="`next` of the page before.")] = None
    limit: Annotated[int, Query(description="1 to 100.")] = 20

    def query(self) -> JobQuery:
        """Return the selection for the ledger, which checks cursor and limit.

        Raises:
            Refusal: 422 if a filter is not valid.
        """
        _require_choice("kind", self.kind, tuple(ANALYSES))
        _require_choice("state", self.state, STATES)
        if self.label is not None and not _LABEL.fullmatch(self.label):
            raise invalid_parameter("label", "must be `name=value`")
        if self.name is not None and not 0 < len(self.name) <= MAX_NAME:
            raise invalid_parameter("name", f"must be 1 to {MAX_NAME} characters")
        if self.id is not None and not _ID_END.fullmatch(self.id):
            raise invalid_parameter("id", "must be the last 4 to 36 characters of an id")
        if self.parent is not None and not is_id(self.parent):
            raise invalid_parameter("parent", "must be the id of a job")
        name, _, value = (self.label or "").partition("=")
        return JobQuery(
            state=next((each for each in STATES if each == self.state), None),
            kind=self.kind,
            label=None if self.label is None else (name, value),
            name=self.name,
            since=_since(self.since),
            id_end=self.id,
            parent=self.parent,
            before=self.before,
            limit=self.limit,
        )


def _require_choice(parameter: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise invalid_parameter(parameter, f"must be one of {', '.join(choices)}{suggestion(value, choices)}")


def _since(text: str | None) -> datetime | float | None:
    """Return the moment that a text names, or the seconds before now."""
    if text is None:
        return None
    seconds = duration_seconds(text)
    if seconds is not None and seconds <= _LONGEST_SECONDS:
        return seconds
    try:
        # in an address an unescaped plus stands for a blank
        moment = datetime.fromisoformat(text[:_LONGEST_MOMENT].strip().replace(" ", "+"))
        when = None if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        when = None
    if when is None:
        raise invalid_parameter(
            "since",
            'must be a moment with its offset from UTC, such as "2026-12-01T12:00Z", or a time of at most ten years '
            'before now, such as "2d"',
        )
    return when
