"""Records of the ledger's rows: a job and an artifact as the rest of the service reads them."""

from types import SimpleNamespace
from typing import Any

from sqlalchemy import Row

from jobs.records import Artifact, Job


def artifact_record(row: Row[Any]) -> Artifact:
    """Return the record of a row of `artifacts`."""
    return Artifact(
        job_id=row.job_id,
        name=row.name,
        sha256=row.sha256,
        size_bytes=row.size_bytes,
        media_type=row.media_type,
        uri=row.uri,
    )


def job_record(row: Row[Any] | SimpleNamespace) -> Job:
    """Return the record of a row of `jobs`; the failure's detail, meant for operators, is left out."""
    failure = row.failure
    if failure is not None:
        failure = {name: value for name, value in failure.items() if name != "detail"}
    return Job(
        id=row.id,
        tenant_id=row.tenant_id,
        name=row.name,
        labels=row.labels or {},
        note=row.note,
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
        cancel_requested_by=row.cancel_requested_by,
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
        parent_id=row.parent_id,
        piece=row.piece,
    )
