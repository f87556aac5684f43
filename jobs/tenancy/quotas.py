"""Byte quotas: what the files of one tenant take, and how much they may.

Equal files are kept once and counted once; those of uploads that still come, one by one. The
checkpoint of a job that waits for its next attempt
counts too, within a minute of the last one: it is not a file of the tenant's, but fills the same disks.
Every file is counted in before it is kept, so that a tenant is over its quota by one file of each job
running at once at the most.
"""

from typing import Any

from sqlalchemy import Connection, Engine, Text, cast, func, null, select, union, update

from catalog.record import record
from jobs.errors import QueueFull, QuotaExceeded
from jobs.metrics.counters import read_counters
from jobs.objects.artifacts import object_key
from jobs.schema.database import reading, writing
from jobs.schema.tables import artifacts, jobs, tenants, upload_files

_BYTES = "bytes"


@record
class Usage:
    """One tenant's."""

    tenant: str
    used_bytes: int
    quota_bytes: int | None
    """Null where there is no limit."""
    device_seconds: float = 0.0
    """Seconds that its attempts have had devices, each device by itself; attempts that run are not counted yet, nor is
    the time after an attempt's end or the end of its lease."""


def usage(engine: Engine, name: str | None = None, default_bytes: int | None = None) -> tuple[Usage, ...]:
    """Return the bytes in use and the quotas of tenants."""
    query = select(tenants.c.id, tenants.c.name, tenants.c.quotas).order_by(tenants.c.name)
    if name is not None:
        query = query.where(tenants.c.name == name)
    with reading(engine) as connection:
        held = read_counters(connection).get("device_milliseconds", {})
        return tuple(
            Usage(
                tenant=row.name,
                used_bytes=_used(connection, row.id),
                quota_bytes=_quota(row.quotas, default_bytes),
                device_seconds=held.get(row.id, 0) / 1000,
            )
            for row in connection.execute(query).all()
        )


def set_quota(engine: Engine, name: str, quota_bytes: int | None) -> bool:
    """Set or remove a tenant's quota."""
    with writing(engine) as connection:
        # one that changes nothing first: two operators at once take turns
        row = connection.execute(
            update(tenants).where(tenants.c.name == name).values(name=name).returning(tenants.c.quotas)
        ).one_or_none()
        if row is None:
            return False
        quotas = {key: value for key, value in (row.quotas or {}).items() if key != _BYTES}
        if quota_bytes is not None:
            quotas[_BYTES] = quota_bytes
        connection.execute(update(tenants).where(tenants.c.name == name).values(quotas=quotas or None))
    return True


def require_room(engine: Engine, tenant_id: str, default_bytes: int | None = None) -> None:
    """Refuse a submission of a tenant that has used up its quota.

    Args:
        default_bytes: The quota of tenants without one of their own; None for no limit.

    Raises:
        QuotaExceeded: If its files take all of its quota.
    """
    with reading(engine, tenant_id) as connection:
        quota = _quota_of(connection, tenant_id, default_bytes)
        if quota is not None and (used := _used(connection, tenant_id)) >= quota:
            raise QuotaExceeded(used, quota, 0)


def require_room_for(
    engine: Engine, tenant_id: str, sha256: str, size_bytes: int, default_bytes: int | None = None
) -> None:
    """Refuse a file that exceeds its tenant's quota; one that the tenant has already always fits.

    Args:
        sha256: The file's digest.
        default_bytes: The quota of tenants without one of their own; None for no limit.

    Raises:
        QuotaExceeded: If it does not fit.
    """
    with reading(engine, tenant_id) as connection:
        quota = _quota_of(connection, tenant_id, default_bytes)
        if quota is None:
            return
        kept = select(artifacts.c.uri).where(
            artifacts.c.tenant_id == tenant_id, artifacts.c.uri == object_key(tenant_id, sha256)
        )
        if connection.execute(kept.limit(1)).one_or_none() is not None:
            return
        used = _used(connection, tenant_id)
        if used + size_bytes > quota:
            raise QuotaExceeded(used, quota, size_bytes)


def lock_usage(connection: Connection, tenant_id: str, default_bytes: int | None) -> tuple[int, int | None]:
    """Return a tenant's bytes and its quota; until the transaction ends, others wait here with theirs."""
    _lock(connection, tenant_id)
    return _used(connection, tenant_id), _quota_of(connection, tenant_id, default_bytes)


def require_place(
    connection: Connection,
    tenant_id: str,
    most: tuple[int, int],
    more: tuple[int, int] = (1, 1),
    job_id: str | None = None,
) -> None:
    """Refuse a submission of a tenant whose queued jobs are as many, or as long, as they may be.

    A divided job counts as one of them while it waits for its pieces, which do not count: they are never refused. The
    jobs of a series count, and it too.

    Args:
        most: The caps on its queued jobs, estimates among them, and on the text of their documents.
        more: Jobs that are submitted together, and the least bytes of their documents.
        job_id: The job that the transaction has inserted for it: until it ends, others wait here with theirs. Without
            one, several submissions at once may each find the last place free.

    Raises:
        QueueFull: If there is no place.
    """
    most_jobs, most_bytes = most
    if job_id is not None:
        _lock(connection, tenant_id)
    size = func.coalesce(func.sum(func.length(cast(jobs.c.document, Text))), 0)
    open_jobs = (jobs.c.tenant_id == tenant_id, jobs.c.state.in_(("queued", "waiting")), jobs.c.piece.is_(null()))
    queued = select(func.count(), size).where(*open_jobs, jobs.c.id.is_distinct_from(job_id))
    count, characters = connection.execute(queued).one()
    if count + more[0] > most_jobs:
        these = "" if more[0] == 1 else f", and these are {more[0]:,} jobs"
        raise QueueFull(
            f"{count:,} of your jobs wait, of {most_jobs:,} that may{these}; cancel some, or wait until they run"
        )
    if characters + more[1] > most_bytes:
        raise QueueFull(
            f"the documents of your waiting jobs have {characters:,} bytes, of {most_bytes:,} that they may have; "
            "cancel some, or wait until they run"
        )


def _lock(connection: Connection, tenant_id: str) -> None:
    # with `key_share`, rows that refer to the tenant are inserted meanwhile
    connection.execute(select(tenants.c.id).where(tenants.c.id == tenant_id).with_for_update(key_share=True))


def _used(connection: Connection, tenant_id: str) -> int:
    """The bytes of a tenant's files, and of the checkpoints of its jobs between two attempts."""
    of_uploads = select(upload_files.c.uri, upload_files.c.size_bytes).where(upload_files.c.tenant_id == tenant_id)
    of_jobs = select(artifacts.c.uri, artifacts.c.size_bytes).where(artifacts.c.tenant_id == tenant_id)
    kept = union(of_jobs, of_uploads.where(upload_files.c.stored_at.is_not(None)))
    # each is staged by its own name, equal or not
    coming = of_uploads.where(upload_files.c.stored_at.is_(None))
    left = select(jobs.c.checkpoint_bytes).where(
        jobs.c.tenant_id == tenant_id, jobs.c.state == "queued", jobs.c.checkpoint_bytes > 0
    )
    sums = [select(func.coalesce(func.sum(each.subquery().c.size_bytes), 0)) for each in (kept, coming)]
    files = sum(int(connection.execute(each).scalar_one()) for each in sums)
    return files + sum(map(int, connection.execute(left).scalars()))


def _quota_of(connection: Connection, tenant_id: str, default_bytes: int | None) -> int | None:
    query = select(tenants.c.quotas).where(tenants.c.id == tenant_id)
    return _quota(connection.execute(query).scalar_one_or_none(), default_bytes)


def _quota(quotas: Any, default_bytes: int | None) -> int | None:  # noqa: ANN401 - whatever JSON the column holds
    found = quotas.get(_BYTES) if isinstance(quotas, dict) else None
    return found if type(found) is int else default_bytes
