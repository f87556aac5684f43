"""The store of jobs for their tenants, after submission: read, list, cancel, reschedule, delete.

Every statement names the tenant, so another tenant's id and a random one get the same answer: None where a job is read,
and ``JobNotFound`` from what changes or deletes it.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from itertools import starmap
from typing import Literal

from sqlalchemy import ColumnElement, Connection, Engine, and_, delete, false, literal, or_, select

from catalog.record import record
from catalog.requests.estimate import ESTIMATE
from catalog.requests.job import Annotations
from catalog.requests.schedule import Schedule
from jobs.errors import (
    JobEnded,
    JobNotFound,
    JobStillActive,
    PageRefused,
    PieceRefused,
)
from jobs.lifecycle import TERMINAL, State
from jobs.queue.children import cancel_pieces
from jobs.queue.fence import append_event, change, change_all, draw, move
from jobs.queue.series import drop_factors
from jobs.records import Artifact, Claim, Job, JobPage
from jobs.repository.job_list import read_jobs
from jobs.repository.row_records import artifact_record, job_record
from jobs.scheduling.deadlines import deadline_of, require_in_time
from jobs.schema.clock import ShownMoment, ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.identifiers import is_id
from jobs.schema.tables import artifacts, jobs

MAX_PAGE = 100
_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")


def read_job(engine: Engine, tenant_id: str, job_id: str) -> Job | None:
    """Return a job, or None if this tenant has none of that id."""
    return _read(engine, tenant_id, *_owned(tenant_id, job_id))


def read_estimate(engine: Engine, tenant_id: str, estimate_id: str) -> Job | None:
    """Return a job that is only planned, or None if this tenant has none of that id."""
    return _read(engine, tenant_id, *_owned(tenant_id, estimate_id, estimate=True))


def read_claimed(engine: Engine, claim: Claim) -> Job | None:
    """Return the job or estimate of a claim, which may be lost by now; None if it was deleted."""
    return _read(engine, claim.tenant_id, jobs.c.tenant_id == claim.tenant_id, jobs.c.id == claim.job_id)


JobSort = Literal["newest", "oldest"]


@record
class JobQuery:
    """A selection of jobs and a page of them."""

    state: State | None = None
    kind: str | None = None
    """An analysis that the job asks for, among others or alone."""
    labels: tuple[tuple[str, str], ...] = ()
    """Names and values of labels, all of which the job has."""
    name: str | None = None
    """A part of the job's name, in any case."""
    coverage: Literal["partial", "diagonal"] | None = None
    """Only jobs that have succeeded and were done in part, or of which a part of the model has a diagonal alone."""
    since: datetime | float | None = None
    """Only jobs submitted from this moment on, or in the last seconds by the database's clock."""
    until: datetime | float | None = None
    """Only jobs submitted before this moment, or longer ago than these seconds."""
    id_end: str | None = None
    """The last characters of the id."""
    sort: JobSort = "newest"
    """Which jobs come first."""
    before: str | None = None
    """The cursor of the page before."""
    limit: int = 20
    fields: tuple[str, ...] = ()
    """Fields of `job_list.FIELDS` that the jobs hold."""
    parent: str | None = None
    """Only pieces of this job; without it jobs that were submitted, unless `id_end` asks for some id."""


NEWEST_JOBS = JobQuery()
"""The first page of all jobs."""


def list_jobs(
    engine: Engine,
    tenant_id: str,
    asked: JobQuery = NEWEST_JOBS,
) -> JobPage:
    """Return a page of a tenant's jobs, without estimates.

    Args:
        asked: Which of the tenant's jobs, and from where on.

    Returns:
        The jobs, slim but for the fields that are asked for, and the cursor of the next page, or None on the last one.

    Raises:
        PageRefused: If the limit is not 1 to 100, or `before` is not a cursor.
        JobNotFound: If the tenant has no job `parent`.
    """
    check_limit(asked.limit)
    query = select(jobs).where(jobs.c.tenant_id == tenant_id, jobs.c.kind != ESTIMATE)
    newest = asked.sort == "newest"
    query = query.order_by(jobs.c.id.desc() if newest else jobs.c.id.asc())
    if asked.state is not None:
        query = query.where(jobs.c.state == asked.state)
    if asked.kind is not None:
        query = query.where(
            (literal(",") + jobs.c.kind + literal(",")).contains(f",{asked.kind.replace(chr(0), '')},", autoescape=True)
        )
    if asked.coverage is not None:
        query = query.where(
            jobs.c.state == "succeeded", jobs.c.manifest["coverage", asked.coverage].as_boolean().is_(True)
        )
    query = query.where(*starmap(_labelled, asked.labels), *_called(asked), *_descended(asked))
    if asked.before is not None:
        if not is_id(asked.before):
            raise PageRefused("before", "is not a cursor; take `next` of the page before")
        query = query.where(jobs.c.id < asked.before if newest else jobs.c.id > asked.before)
    with reading(engine, tenant_id) as connection:
        if asked.parent is not None:
            whole = select(jobs.c.id).where(*_owned(tenant_id, asked.parent))
            if connection.execute(whole).one_or_none() is None:
                raise JobNotFound
        items, more = read_jobs(connection, query, asked.limit, asked.fields)
    return JobPage(items=items, next=items[-1].id if more else None)


def request_cancel(engine: Engine, tenant_id: str, job_id: str, by: str | None = None) -> Job:
    """Cancel a queued job, or ask the holder of a running one to stop; an ended job stays as it is.

    Returns the job afterwards. A divided job is cancelled with its pieces, and a piece with its job. ``by`` is the
    prefix of the API key that asks; None in embedded mode.
    """
    with writing(engine, tenant_id) as connection:
        whole = _whole_job(connection, tenant_id, job_id)
        drawn = draw(connection, *_owned(tenant_id, whole), jobs.c.state.in_(("queued", "running", "waiting")))
        if drawn is not None:
            change(connection, drawn, {"cancel_requested_at": ledger_now(), "cancel_requested_by": by})
            stops = drawn.state == "running"
            if drawn.state == "waiting":
                stops = cancel_pieces(connection, whole, "requested")
            move(connection, drawn, "cancelling" if stops else "cancelled", reason="requested")
            if not stops:
                drop_factors(connection, whole)
        row = connection.execute(select(jobs).where(*_owned(tenant_id, job_id))).one_or_none()
        if row is None:
            raise JobNotFound
        return job_record(row)


def reschedule(engine: Engine, tenant_id: str, job_id: str, schedule: Schedule) -> Job:
    """Replace the whole schedule of a job, and of its pieces; that of a piece is its job's. `within` counts from now.

    The same schedule again is not written, and has no event. Returns the job afterwards. ``DocumentRefused`` if the
    deadline has passed, ``JobEnded`` if the job has ended.
    """
    with writing(engine, tenant_id) as connection:
        whole = _whole_job(connection, tenant_id, job_id)
        if schedule.within_seconds is None and _has_schedule(connection, tenant_id, whole, schedule):
            return job_record(connection.execute(select(jobs).where(jobs.c.id == job_id)).one())
        drawn = draw(connection, *_owned(tenant_id, whole))
        if drawn is None:
            raise JobNotFound
        if drawn.state in TERMINAL:
            raise JobEnded(whole, drawn.state)
        change(connection, drawn, {"priority": schedule.priority, "deadline_at": deadline_of(schedule)})
        row = connection.execute(select(jobs).where(jobs.c.id == whole)).one()
        require_in_time(row.deadline_at, drawn.now, "/deadline")
        until = None if row.deadline_at is None else row.deadline_at.isoformat()
        said = {"priority": row.priority, "deadline_at": until}
        append_event(connection, drawn, "schedule", said)
        open_pieces = and_(jobs.c.parent_id == whole, jobs.c.state.not_in(TERMINAL))
        values = {"priority": row.priority, "deadline_at": row.deadline_at}
        change_all(connection, open_pieces, values, ("schedule", lambda _: said))
        return job_record(connection.execute(select(jobs).where(jobs.c.id == job_id)).one())


def _has_schedule(connection: Connection, tenant_id: str, job_id: str, schedule: Schedule) -> bool:
    """Return whether an open job, and so its pieces, has the schedule already, and time until its deadline."""
    until = jobs.c.deadline_at
    same = (jobs.c.priority == schedule.priority, until.is_not_distinct_from(schedule.deadline_at))
    in_time = or_(until.is_(None), until > ledger_now())
    query = select(jobs.c.id).where(*_owned(tenant_id, job_id), jobs.c.state.not_in(TERMINAL), *same, in_time)
    return connection.execute(query).one_or_none() is not None


def annotate(
    engine: Engine, tenant_id: str, job_id: str, given: Annotations, require: Callable[[Job], None] = lambda _: None
) -> Job:
    """Replace labels or note of a job, in whatever state it is, and return it; its document and digest stay.

    ``require`` is given the job as it stands, which no other change can pass meanwhile; what it raises undoes all.
    """
    named = {"labels": given.labels, "note": given.note}
    with writing(engine, tenant_id) as connection:
        drawn = draw(connection, *_owned(tenant_id, job_id))
        if drawn is None:
            raise JobNotFound
        # the number of the next event is drawn already
        require(replace(job_record(drawn), event_seq=drawn.event_seq - 1))
        if changed := {name: value or None for name, value in named.items() if value is not None}:
            change(connection, drawn, changed)
        return job_record(connection.execute(select(jobs).where(jobs.c.id == job_id)).one())


def delete_job(engine: Engine, tenant_id: str, job_id: str, *, estimate: bool = False) -> tuple[Artifact, ...]:
    """Delete an ended job with all its rows, and with its pieces.

    The caller then deletes the files (`ArtifactFolder.remove`, `object_sweep.delete_unlisted`): a crash in between
    leaves files without a row, for the clean-up, never a row without its file. Returns the rows of its artifacts, and
    of its pieces'. ``JobStillActive`` if it has not ended, or a piece of it has yet to stop, ``PieceRefused`` if it is
    a piece.
    """
    with writing(engine, tenant_id) as connection:
        drawn = draw(connection, *_owned(tenant_id, job_id, estimate=estimate))
        if drawn is None:
            raise JobNotFound
        if drawn.state not in TERMINAL:
            raise JobStillActive(job_id, drawn.state)
        if drawn.parent_id is not None:
            raise PieceRefused(job_id, drawn.parent_id)
        of_pieces = select(jobs.c.id).where(jobs.c.parent_id == job_id)
        stopping = connection.execute(of_pieces.where(jobs.c.state.not_in(TERMINAL)).limit(1)).scalar_one_or_none()
        if stopping is not None:
            raise JobStillActive(stopping, "still stopping")
        rows = connection.execute(
            select(artifacts).where(or_(artifacts.c.job_id == job_id, artifacts.c.job_id.in_(of_pieces)))
        ).all()
        connection.execute(delete(jobs).where(jobs.c.id == job_id))
    return tuple(artifact_record(row) for row in rows)


def check_limit(limit: int) -> None:
    """Raise ``PageRefused`` if the size that was asked of a page is not 1 to 100."""
    if not 1 <= limit <= MAX_PAGE:
        raise PageRefused("limit", f"is {limit}; take 1 to {MAX_PAGE}")


def _read(engine: Engine, tenant_id: str, *conditions: ColumnElement[bool]) -> Job | None:
    with reading(engine, tenant_id) as connection:
        row = connection.execute(select(jobs).where(*conditions)).one_or_none()
    return None if row is None else job_record(row)


def _owned(tenant_id: str, job_id: str, *, estimate: bool = False) -> tuple[ColumnElement[bool], ...]:
    kind = jobs.c.kind == ESTIMATE if estimate else jobs.c.kind != ESTIMATE
    return (jobs.c.tenant_id == tenant_id, jobs.c.id == job_id if is_id(job_id) else false(), kind)


def _whole_job(connection: Connection, tenant_id: str, job_id: str) -> str:
    """The job that a piece belongs to; any other id as it is."""
    query = select(jobs.c.parent_id).where(*_owned(tenant_id, job_id))
    return connection.execute(query).scalar_one_or_none() or job_id


def _descended(asked: JobQuery) -> tuple[ColumnElement[bool], ...]:
    """Return the condition on the parent."""
    if asked.parent is not None:
        return (jobs.c.parent_id == asked.parent if is_id(asked.parent) else false(),)
    return () if asked.id_end is not None else (jobs.c.parent_id.is_(None),)


def _called(asked: JobQuery) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions on name, id and time of submission."""
    conditions: list[ColumnElement[bool]] = []
    if asked.name is not None:
        printable = asked.name.isprintable()  # no stored name has other characters
        conditions.append(jobs.c.name.icontains(asked.name, autoescape=True) if printable else false())
    if asked.id_end is not None:
        conditions.append(jobs.c.id.endswith(asked.id_end, autoescape=True))
    if asked.since is not None:
        conditions.append(jobs.c.created_at >= _moment(asked.since))
    if asked.until is not None:
        conditions.append(jobs.c.created_at < _moment(asked.until))
    return tuple(conditions)


def _moment(asked: datetime | float) -> ColumnElement[datetime]:
    """Return a moment, or one so many seconds before now."""
    return literal(asked, ShownMoment()) if isinstance(asked, datetime) else ledger_now(-asked)


def _labelled(name: str, value: str) -> ColumnElement[bool]:
    if not _LABEL_NAME.fullmatch(name) or not value.isprintable():
        return false()  # no stored job carries such a label
    stored: ColumnElement[str] = jobs.c.labels[name].as_string()
    return stored == value
