"""Extended documents: of a job that extends another, joined with what it has of the job that began the collection."""

from sqlalchemy import Engine

from catalog.record import FieldError, canonical_json
from catalog.requests.extending import completed
from catalog.requests.job import JobDocument
from jobs.codec import parse_document
from jobs.errors import DocumentRefused
from jobs.records import Job
from jobs.repository.store import read_job


def first_extended(engine: Engine, tenant_id: str, job: Job) -> Job | None:
    """Return the job that began a chain of extensions, by one of the chain; None if one before it is deleted."""
    first: Job | None = job
    while first is not None and (before := (first.document.get("extends") or {}).get("job")) is not None:
        first = read_job(engine, tenant_id, before)
    return first


def effective_document(engine: Engine, tenant_id: str, document: JobDocument) -> JobDocument:
    """Return a document with the model, task and options that its job will run by.

    It is the document itself where it extends no job, and where the two cannot be joined: the worker says why.
    """
    named = None if document.extends is None else document.extends.job
    job = None if named is None else read_job(engine, tenant_id, named)
    first = None if job is None else first_extended(engine, tenant_id, job)
    if first is None:
        return document
    try:
        return completed(document, parse_document(canonical_json(first.document).encode()))
    except (DocumentRefused, FieldError):
        return document
