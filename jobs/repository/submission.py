"""The submission of a job: one transaction stores it with its first event, once per idempotency key.

Every statement names the tenant, so that a key of another tenant is never found.
"""

import hashlib
import json
import re
from typing import Any

from sqlalchemy import Connection, Engine, select

from catalog.requests.estimate import ESTIMATE
from catalog.requests.job import JobDocument
from catalog.requests.memory_requirements import factories_of
from catalog.requests.schedule import Schedule
from catalog.requests.series import checkpoint_documents
from jobs.codec import document_json, sha256_of
from jobs.errors import (
    IdempotencyConflict,
    JobNotFound,
    ParameterRefused,
)
from jobs.queue.fence import announce, append_event, draw
from jobs.queue.series import start_series
from jobs.records import Job, Submitted
from jobs.repository.extended_documents import effective_document
from jobs.repository.row_records import job_record
from jobs.scheduling.deadlines import deadline_of, require_in_time, stored_schedule
from jobs.scheduling.fair_share import AHEAD
from jobs.schema.clock import ledger_now
from jobs.schema.database import insert_into, note_queued, reading, writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import jobs
from jobs.tenancy.quotas import require_place

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_MOST_THREADS = 1024


def check_idempotency_key(key: str | None) -> None:
    """Refuse a key that could not be stored, of a job or of a document that is only validated; None is none.

    Raises:
        ParameterRefused: If it is not 1 to 255 visible ASCII characters.
    """
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise ParameterRefused(
            "Idempotency-Key",
            f"must be 1 to 255 visible ASCII characters without blanks (got {len(key):,} characters); take a UUID, or "
            "leave the header out",
        )


def submit(
    engine: Engine,
    tenant_id: str,
    document: JobDocument,
    idempotency_key: str | None = None,
    *,
    estimate: bool = False,
    needs_bytes: int | None = None,
    most: tuple[int, int] | None = None,
) -> Submitted:
    """Store a job, or return the job that this key stored earlier.

    A series is stored with the jobs of its checkpoints.

    An estimate is a job that is only planned: `read_estimate` finds it, and no function that looks for jobs. Its
    idempotency keys are apart from those of jobs, and it precedes all jobs instead of following the document's
    schedule.

    Args:
        document: The valid document.
        idempotency_key: The caller's name for this submission; None for a new job in any case.
        estimate: Whether the job is only to be planned.
        needs_bytes: Device memory that the document alone shows to be needed; None if unknown.
        most: The caps on the tenant's queued jobs and on the bytes of their documents; None for none.

    Returns:
        The job, and whether it is new.

    Raises:
        DocumentRefused: If the deadline has passed already.
        IdempotencyConflict: If the key stored another document, or the same by another name or on another schedule.
        ParameterRefused: If the key is not 1 to 255 visible ASCII characters.
        QueueFull: If there is no place for all its jobs.
    """
    check_idempotency_key(idempotency_key)
    idempotency_key = _stored_key(idempotency_key, estimate=estimate)
    body = document_json(document)
    digest = sha256_of(body)
    schedule = Schedule() if estimate else document.schedule
    asked = stored_schedule(schedule)
    model_factory, data_factory = factories_of(effective_document(engine, tenant_id, document))
    checkpoints = () if estimate else checkpoint_documents(document)
    with writing(engine, tenant_id) as connection:
        job_id = insert_job(
            connection,
            {
                "id": new_id(),
                "tenant_id": tenant_id,
                "kind": ESTIMATE if estimate else ",".join(document.kinds),
                "name": document.name,
                "labels": body["labels"],
                "document": body,
                "document_sha256": digest,
                "idempotency_key": idempotency_key,
                "state": "waiting" if checkpoints else "queued",
                "schedule": asked,
                "priority": AHEAD if estimate else schedule.priority,
                "deadline_at": deadline_of(schedule),
                # a plan is made by one process, however many will follow it
                "world_size": 1 if estimate else document.world_size,
                "needs_bytes": needs_bytes,
                "model_factory": model_factory,
                "data_factory": data_factory,
                "created_at": ledger_now(),
                "queued_at": ledger_now(),
                **(
                    {}
                    if estimate or document.reproduces is None
                    else _replayed(connection, tenant_id, document.reproduces)
                ),
            },
        )
        if job_id is None:
            earlier = _earlier(connection, tenant_id, idempotency_key, digest, (document.name, asked))
            if earlier is None:
                raise JobNotFound
            return earlier
        if most is not None:
            require_place(connection, tenant_id, most, (1, 1) if estimate else places_of(document), job_id)
        drawn = draw(connection, jobs.c.id == job_id)
        if drawn is None:
            raise JobNotFound
        require_in_time(drawn.deadline_at, drawn.now)
        append_event(connection, drawn, "state", {"state": drawn.state, "attempt": 0})
        announce(connection, drawn, None, drawn.state)
        if checkpoints:
            start_series(connection, drawn, checkpoints)
        else:
            note_queued(connection)
        return Submitted(job=job_record(drawn), created=True)


def places_of(document: JobDocument) -> tuple[int, int]:
    """Return how many jobs a document is stored as, and the least bytes of their documents."""
    count = 1 + (0 if document.series is None else len(document.series.model))
    return (1, 1) if count == 1 else (count, count * len(json.dumps(document_json(document))))


def submitted_earlier(
    engine: Engine, tenant_id: str, document: JobDocument, idempotency_key: str, *, estimate: bool = False
) -> Submitted | None:
    """Return the job that an idempotency key stored earlier, so that a replay is answered before any other check.

    Args:
        document: The document of this submission.
        idempotency_key: The caller's name for it.
        estimate: Whether the job is only to be planned.

    Returns:
        The earlier job, or None.

    Raises:
        IdempotencyConflict: If the key stored another document.
    """
    asked = None if estimate else stored_schedule(document.schedule)
    with reading(engine, tenant_id) as connection:
        stored = _stored_key(idempotency_key, estimate=estimate)
        return _earlier(connection, tenant_id, stored, sha256_of(document_json(document)), (document.name, asked))


def _replayed(connection: Connection, tenant_id: str, original_id: str) -> dict[str, Any]:
    """Return the fields of a reproduced job that the new one has from the start: its numbers are promised for them."""
    query = select(jobs).where(jobs.c.tenant_id == tenant_id, jobs.c.id == original_id)
    row = connection.execute(query).one_or_none()
    if row is None:
        return {}
    # a job over stored factors has no plan; an imported one's threads are a stranger's claim
    manifest = row.manifest or {}
    known = row.document.get("factors") is not None and not manifest.get("imported")
    threads = (manifest.get("environment") or {}).get("threads") if known else None
    alone = {"threads": threads} if isinstance(threads, int) and 1 <= threads <= _MOST_THREADS else None
    return {"plan": row.plan or alone, "device_class": row.device_class, "needs_bytes": row.needs_bytes}


def submitted_under(engine: Engine, tenant_id: str, document: JobDocument, prefix: str) -> tuple[Job, ...]:
    """Return the jobs of a document, the oldest first, whose idempotency keys begin with the prefix."""
    with reading(engine, tenant_id) as connection:
        rows = connection.execute(
            select(jobs)
            .where(
                jobs.c.tenant_id == tenant_id,
                jobs.c.document_sha256 == sha256_of(document_json(document)),
                jobs.c.idempotency_key.startswith(prefix, autoescape=True),
            )
            .order_by(jobs.c.created_at, jobs.c.id)
        )
        return tuple(job_record(row) for row in rows)


def _earlier(
    connection: Connection,
    tenant_id: str,
    idempotency_key: str | None,
    digest: str,
    apart: tuple[str | None, dict[str, Any] | None],
) -> Submitted | None:
    """Return the job of a key; ``apart`` is what its document has beside the digest: name and schedule."""
    row = connection.execute(
        select(jobs).where(jobs.c.tenant_id == tenant_id, jobs.c.idempotency_key == idempotency_key)
    ).one_or_none()
    if row is None:
        return None
    if row.document_sha256 != digest or (row.name, row.schedule) != apart:
        raise IdempotencyConflict(row.id)
    return Submitted(job=job_record(row), created=False)


def insert_job(connection: Connection, values: dict[str, Any]) -> str | None:
    """Insert a job and return its id, or None where the idempotency key is taken (a concurrent insert is awaited)."""
    statement = (
        insert_into(connection, jobs)
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
