"""Jobs as their tenants handle them: submit, read, list, cancel, delete.

Every statement names the tenant, so another tenant's id and a random one get the same answer.
"""

import hashlib
import re
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Row, delete, false, literal, select
from sqlalchemy.dialects import postgresql, sqlite

from catalog.estimate import ESTIMATE
from catalog.job import JobDocument
from catalog.memory_requirements import factories_of
from catalog.record import record
from catalog.schedule import Schedule
from jobs.codec import document_json, sha256_of
from jobs.errors import (
    IdempotencyConflict,
    IdempotencyKeyRefused,
    JobEnded,
    JobNotFound,
    JobStillActive,
    PageRefused,
)
from jobs.lifecycle import TERMINAL, State
from jobs.queue.fence import append_event, change, draw, move, post_wakeup
from jobs.records import Artifact, Claim, Job, JobPage, Submitted
from jobs.scheduling.deadlines import deadline_of, require_in_time, stored_schedule
from jobs.scheduling.fair_share import AHEAD
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.identifiers import is_id, new_id
from jobs.schema.tables import artifacts, jobs

MAX_PAGE = 100
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")


def submit(
    engine: Engine,
    tenant_id: str,
    document: JobDocument,
    idempotency_key: str | None = None,
    *,
    estimate: bool = False,
    needs_bytes: int | None = None,
) -> Submitted:
    """Store a job and its wake-up in one transaction, or return the job that this key stored earlier.

    An estimate is a job that is only planned: `read_estimate` finds it, and no function that looks for jobs. Its
    idempotency keys are apart from those of jobs, and it precedes all jobs instead of following the document's
    schedule.

    Args:
        engine: The ledger's database.
        tenant_id: The tenant who asks.
        document: The valid document.
        idempotency_key: The caller's name for this submission; None for a new job in any case.
        estimate: Whether the job is only to be planned.
        needs_bytes: Device memory that the document alone shows to be needed; None if unknown.

    Returns:
        The job, and whether it is new.

    Raises:
        DocumentRefused: If the deadline has passed already.
        IdempotencyConflict: If the key stored another document, or the same on another schedule.
        IdempotencyKeyRefused: If the key is not 1 to 255 visible ASCII characters.
    """
    if idempotency_key is not None and not _IDEMPOTENCY_KEY.fullmatch(idempotency_key):
        raise IdempotencyKeyRefused("an idempotency key is 1 to 255 visible ASCII characters, such as a UUID")
    idempotency_key = _stored_key(idempotency_key, estimate=estimate)
    body = document_json(document)
    digest = sha256_of(body)
    schedule = Schedule() if estimate else document.schedule
    asked = stored_schedule(schedule)
    model_factory, data_factory = factories_of(document)
    with writing(engine) as connection:
        job_id = _insert_job(
            connection,
            {
                "id": new_id(),
                "tenant_id": tenant_id,
                "kind": ESTIMATE if estimate else ",".join(document.kinds),
                "document": body,
                "document_sha256": digest,
                "idempotency_key": idempotency_key,
                "state": "queued",
                "schedule": asked,
                "priority": AHEAD if estimate else schedule.priority,
                "deadline_at": deadline_of(schedule),
                "needs_bytes": needs_bytes,
                "model_factory": model_factory,
                "data_factory": data_factory,
                "created_at": ledger_now(),
                "queued_at": ledger_now(),
            },
        )
        if job_id is None:
            earlier = _earlier(connection, tenant_id, idempotency_key, digest, asked)
            if earlier is None:
                raise JobNotFound(idempotency_key or "")
            return earlier
        drawn = draw(connection, jobs.c.id == job_id)
        if drawn is None:
            raise JobNotFound(job_id)
        require_in_time(drawn.deadline_at, drawn.now)
        append_event(connection, drawn, "state", {"state": "queued", "attempt": 0})
        post_wakeup(connection, job_id, tenant_id)
        return Submitted(job=_job(drawn), created=True)


def submitted_earlier(
    engine: Engine, tenant_id: str, document: JobDocument, idempotency_key: str, *, estimate: bool = False
) -> Submitted | None:
    """Return the job that an idempotency key stored earlier, so that a replay is answered before any other check.

    Args:
        engine: The ledger's database.
        tenant_id: The tenant who asks.
        document: The document of this submission.
        idempotency_key: The caller's name for it.
        estimate: Whether the job is only to be planned.

    Returns:
        The earlier job, or None.

    Raises:
        IdempotencyConflict: If the key stored another document.
    """
    asked = None if estimate else stored_schedule(document.schedule)
    with reading(engine) as connection:
        stored = _stored_key(idempotency_key, estimate=estimate)
        return _earlier(connection, tenant_id, stored, sha256_of(document_json(document)), asked)


def read_job(engine: Engine, tenant_id: str, job_id: str) -> Job | None:
    """Return a job.

    Args:
        engine: The ledger's database.
        tenant_id: The tenant who asks.
        job_id: Its id.

    Returns:
        The job, or None if this tenant has none of that id.
    """
    return _read(engine, *_owned(tenant_id, job_id))


def read_estimate(engine: Engine, tenant_id: str, estimate_id: str) -> Job | None:
    """Return a job that is only planned.

    Args:
        engine: The ledger's database.
        tenant_id: The tenant who asks.
        estimate_id: Its id.

    Returns:
        The estimate, or None if this tenant has none of that id.
    """
    return _read(engine, *_owned(tenant_id, estimate_id, estimate=True))


def read_claimed(engine: Engine, claim: Claim) -> Job | None:
    """Return the job or estimate of a claim.

    Args:
        engine: The ledger's database.
        claim: The claim; it may be lost by now.

    Returns:
        The job, or None if it was deleted.
    """
    return _read(engine, jobs.c.tenant_id == claim.tenant_id, jobs.c.id == claim.job_id)


@record
class JobQuery:
    """A selection of jobs and a page of them."""

    state: State | None = None
    kind: str | None = None
    """An analysis that the job asks for, among others or alone."""
    label: tuple[str, str] | None = None
    """A label's name and its value."""
    before: str | None = None
    """The cursor of the page before."""
    limit: int = 20


NEWEST_JOBS = JobQuery()
"""The first page of all jobs."""


def list_jobs(
    engine: Engine,
    tenant_id: str,
    asked: JobQuery = NEWEST_JOBS,
) -> JobPage:
    """Return a page of a tenant's jobs, newest first, without estimates.

    Args:
        engine: The ledger.
        tenant_id: The tenant.
        asked: Which of the tenant's jobs, and from where on.

    Returns:
        The jobs, and the cursor of the next page, or None on the last one.

    Raises:
        PageRefused: If the limit is not 1 to 100, or `before` is not a cursor.
    """
    check_limit(asked.limit)
    query = select(jobs).where(jobs.c.tenant_id == tenant_id, jobs.c.kind != ESTIMATE)
    query = query.order_by(jobs.c.id.desc()).limit(asked.limit + 1)
    if asked.state is not None:
        query = query.where(jobs.c.state == asked.state)
    if asked.kind is not None:
        query = query.where(
            (literal(",") + jobs.c.kind + literal(",")).contains(f",{asked.kind.replace(chr(0), '')},", autoescape=True)
        )
    if asked.label is not None:
        query = query.where(_labelled(*asked.label))
    if asked.before is not None:
        if not is_id(asked.before):
            raise PageRefused("before", "is not a cursor; take `next` of the page before")
        query = query.where(jobs.c.id < asked.before)
    with reading(engine) as connection:
        rows = connection.execute(query).all()
    items = tuple(_job(row) for row in rows[: asked.limit])
    return JobPage(items=items, next=items[-1].id if len(rows) > asked.limit else None)


def request_cancel(engine: Engine, tenant_id: str, job_id: str) -> Job:
    """Cancel a queued job, or ask the holder of a running one to stop; an ended job stays as it is.

    Args:
        engine: The ledger's database.
        tenant_id: The tenant who asks.
        job_id: The job's id.

    Returns:
        The job afterwards.

    Raises:
        JobNotFound: If this tenant has no such job.
    """
    with writing(engine) as connection:
        drawn = draw(connection, *_owned(tenant_id, job_id), jobs.c.state.in_(("queued", "running")))
        if drawn is not None:
            change(connection, drawn, {"cancel_requested_at": ledger_now()})
            move(connection, drawn, "cancelled" if drawn.state == "queued" else "cancelling", reason="requested")
        row = connection.execute(select(jobs).where(*_owned(tenant_id, job_id))).one_or_none()
        if row is None:
            raise JobNotFound(job_id)
        return _job(row)


def reschedule(engine: Engine, tenant_id: str, job_id: str, schedule: Schedule) -> Job:
    """Replace the whole schedule of a job that has not ended.

    Args:
        engine: The ledger's database.
        tenant_id: The tenant who asks.
        job_id: The job's id.
        schedule: The new schedule; `within` counts from now.

    Returns:
        The job afterwards.

    Raises:
        DocumentRefused: If the deadline has passed already.
        JobNotFound: If this tenant has no such job.
        JobEnded: If the job has ended.
    """
    with writing(engine) as connection:
        drawn = draw(connection, *_owned(tenant_id, job_id))
        if drawn is None:
            raise JobNotFound(job_id)
        if drawn.state in TERMINAL:
            raise JobEnded(job_id, drawn.state)
        change(connection, drawn, {"priority": schedule.priority, "deadline_at": deadline_of(schedule)})
        row = connection.execute(select(jobs).where(jobs.c.id == job_id)).one()
        require_in_time(row.deadline_at, drawn.now, "/deadline")
        until = None if row.deadline_at is None else row.deadline_at.isoformat()
        append_event(connection, drawn, "schedule", {"priority": row.priority, "deadline_at": until})
        return _job(row)


def delete_job(engine: Engine, tenant_id: str, job_id: str, *, estimate: bool = False) -> tuple[Artifact, ...]:
    """Delete an ended job with all its rows.

    The caller then deletes the files (`ArtifactFolder.remove`, `object_sweep.delete_unlisted`): a crash in between
    leaves files without a row, for the clean-up, never a row without its file.

    Args:
        engine: The ledger's database.
        tenant_id: The tenant who asks.
        job_id: The job's id.
        estimate: Whether an estimate is meant.

    Returns:
        The rows of its artifacts.

    Raises:
        JobNotFound: If this tenant has no such job.
        JobStillActive: If it has not ended.
    """
    with writing(engine) as connection:
        drawn = draw(connection, *_owned(tenant_id, job_id, estimate=estimate))
        if drawn is None:
            raise JobNotFound(job_id)
        if drawn.state not in TERMINAL:
            raise JobStillActive(job_id, drawn.state)
        rows = connection.execute(select(artifacts).where(artifacts.c.job_id == job_id)).all()
        connection.execute(delete(jobs).where(jobs.c.id == job_id))
    return tuple(artifact_record(row) for row in rows)


def check_limit(limit: int) -> None:
    """Refuse a page that is empty or too large.

    Args:
        limit: The size that was asked for.

    Raises:
        PageRefused: If it is not 1 to 100.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise PageRefused("limit", f"is {limit}; take 1 to {MAX_PAGE}")


def artifact_record(row: Row[Any]) -> Artifact:
    """Return the record of a row of `artifacts`.

    Args:
        row: The row.

    Returns:
        The record.
    """
    return Artifact(
        job_id=row.job_id,
        name=row.name,
        sha256=row.sha256,
        size_bytes=row.size_bytes,
        media_type=row.media_type,
        uri=row.uri,
    )


def _earlier(
    connection: Connection, tenant_id: str, idempotency_key: str | None, digest: str, asked: dict[str, Any] | None
) -> Submitted | None:
    row = connection.execute(
        select(jobs).where(jobs.c.tenant_id == tenant_id, jobs.c.idempotency_key == idempotency_key)
    ).one_or_none()
    if row is None:
        return None
    if row.document_sha256 != digest or row.schedule != asked:
        raise IdempotencyConflict(row.id)
    return Submitted(job=_job(row), created=False)


def _insert_job(connection: Connection, values: dict[str, Any]) -> str | None:
    """Insert a job and return its id, or None where the idempotency key is taken (a concurrent insert is awaited)."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = (
        dialect.insert(jobs)
        .values(values)
        .on_conflict_do_nothing(index_elements=[jobs.c.tenant_id, jobs.c.idempotency_key])
        .returning(jobs.c.id)
    )
    return connection.execute(statement).scalar_one_or_none()


def _stored_key(idempotency_key: str | None, *, estimate: bool) -> str | None:
    """The key as its column holds it: no job's key has a space, so an estimate's is never one of theirs."""
    if idempotency_key is None or not estimate:
        return idempotency_key
    return f"{ESTIMATE} {hashlib.sha256(idempotency_key.encode()).hexdigest()}"


def _read(engine: Engine, *conditions: ColumnElement[bool]) -> Job | None:
    with reading(engine) as connection:
        row = connection.execute(select(jobs).where(*conditions)).one_or_none()
    return None if row is None else _job(row)


def _owned(tenant_id: str, job_id: str, *, estimate: bool = False) -> tuple[ColumnElement[bool], ...]:
    kind = jobs.c.kind == ESTIMATE if estimate else jobs.c.kind != ESTIMATE
    return (jobs.c.tenant_id == tenant_id, jobs.c.id == job_id if is_id(job_id) else false(), kind)


def _labelled(name: str, value: str) -> ColumnElement[bool]:
    if not _LABEL_NAME.fullmatch(name) or not value.isprintable():
        return false()  # no stored job carries such a label
    stored: ColumnElement[str] = jobs.c.document["labels", name].as_string()
    return stored == value


def _job(row: Row[Any]) -> Job:
    failure = row.failure
    if failure is not None:
        failure = {name: value for name, value in failure.items() if name != "detail"}
    return Job(
        id=row.id,
        tenant_id=row.tenant_id,
        kinds=tuple(row.kind.split(",")),
        document=row.document,
        document_sha256=row.document_sha256,
        idempotency_key=row.idempotency_key,
        state=row.state,
        priority=row.priority,
        world_size=row.world_size,
        needs_bytes=row.needs_bytes,
        attempt=row.attempt,
        failures=row.failures,
        max_failures=row.max_failures,
        fence=row.fence,
        event_seq=row.event_seq,
        cancel_requested_at=row.cancel_requested_at,
        deadline_at=row.deadline_at,
        progress=row.progress,
        failure=failure,
        plan=row.plan,
        manifest=row.manifest,
        summary=row.summary,
        created_at=row.created_at,
        queued_at=row.queued_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        archived_at=row.archived_at,
    )
