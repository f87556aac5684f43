"""The job filter: query parameters of a list of jobs, and the ledger's query for them."""

import re
import unicodedata
from datetime import UTC, datetime
from typing import Annotated, Literal, get_args

from fastapi import Query

from api.problem_details import invalid_parameter
from catalog import ANALYSES
from catalog.duration import duration_seconds
from catalog.field_errors import suggestion
from catalog.record import record
from catalog.requests.job import MAX_NAME
from jobs.lifecycle import STATES
from jobs.repository.store import JobQuery, JobSort
from jobs.schema.identifiers import is_id

_COVERAGE: tuple[Literal["partial", "diagonal"], ...] = ("partial", "diagonal")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}=.{0,256}")
_ID_END = re.compile(r"[0-9a-f-]{4,36}")
_MOST_LABELS = 8
_SORTS: tuple[JobSort, ...] = get_args(JobSort)
_LONGEST_MOMENT = 40
_LONGEST_SECONDS = 3650 * 86_400


@record
class JobFilter:
    """The query parameters of a list of jobs."""

    state: Annotated[str | None, Query(description=f"One of {', '.join(STATES)}.")] = None
    kind: Annotated[str | None, Query(description=f"One of {', '.join(ANALYSES)}.")] = None
    label: Annotated[
        list[str] | None,
        Query(
            description=f"`name=value` of a label; given several times (at most {_MOST_LABELS}), jobs have all of them."
        ),
    ] = None
    name: Annotated[str | None, Query(description="A part of the job's name; upper and lower case are the same.")] = (
        None
    )
    coverage: Annotated[
        str | None,
        Query(
            description="Jobs that succeeded: `partial`, those that did not measure all that the loss depends on, or "
            "of which an analysis was refused; `diagonal`, those with a diagonal alone of some parameters. Jobs "
            "that ended under a version without this filter are not found."
        ),
    ] = None
    since: Annotated[
        str | None,
        Query(
            description="Submitted since then: a moment with its offset from UTC, or a time before now such as `2d`."
        ),
    ] = None
    until: Annotated[str | None, Query(description="Submitted before then: a moment or a time, as `since`.")] = None
    id: Annotated[str | None, Query(description="The last 4 or more characters of the id, or all of it.")] = None
    parent: Annotated[str | None, Query(description="The id of a divided job, or a series: its jobs.")] = None
    sort: Annotated[str, Query(description=f"One of {', '.join(_SORTS)}: which jobs come first.")] = "newest"
    before: Annotated[str | None, Query(description="`next` of the page before.")] = None
    limit: Annotated[int, Query(description="1 to 100.")] = 20

    def query(self) -> JobQuery:
        """Return the selection for the ledger, which checks cursor and limit.

        Raises:
            Refusal: 422 if a filter is not valid.
        """
        _require_choice("kind", self.kind, tuple(ANALYSES))
        _require_choice("state", self.state, STATES)
        _require_choice("coverage", self.coverage, _COVERAGE)
        _require_choice("sort", self.sort, _SORTS)
        labels = self.label or []
        if len(labels) > _MOST_LABELS or not all(map(_LABEL.fullmatch, labels)):
            raise invalid_parameter("label", f"must be `name=value`, at most {_MOST_LABELS} times")
        if self.name is not None and not 0 < len(self.name) <= MAX_NAME:
            raise invalid_parameter("name", f"must be 1 to {MAX_NAME} characters")
        if self.id is not None and not _ID_END.fullmatch(self.id):
            raise invalid_parameter("id", "must be the last 4 to 36 characters of an id")
        if self.parent is not None and not is_id(self.parent):
            raise invalid_parameter("parent", "must be the id of a job")
        return JobQuery(
            state=next((each for each in STATES if each == self.state), None),
            kind=self.kind,
            labels=tuple((name, value) for name, _, value in (label.partition("=") for label in labels)),
            name=None if self.name is None else unicodedata.normalize("NFC", self.name),
            coverage=next((each for each in _COVERAGE if each == self.coverage), None),
            since=_moment("since", self.since),
            until=_moment("until", self.until),
            id_end=self.id,
            parent=self.parent,
            sort=next(each for each in _SORTS if each == self.sort),
            before=self.before,
            limit=self.limit,
        )


def _require_choice(parameter: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise invalid_parameter(parameter, f"must be one of {', '.join(choices)}{suggestion(value, choices)}")


def _moment(parameter: str, text: str | None) -> datetime | float | None:
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
            parameter,
            'must be a moment with its offset from UTC, such as "2026-12-01T12:00Z", or a time of at most ten years '
            'before now, such as "2d"',
        )
    return when
