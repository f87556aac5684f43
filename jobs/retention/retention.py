"""Retention: what an ended job has left is archived after a time, and its metadata stays in the ledger.

The archive is put and read back, and only then, in one transaction, listed and the rows removed, of
which there must be as many as it holds. A process killed in between leaves an object that nothing
names. Several may archive one job at once: all but one find, in that transaction, that it is done.
"""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Engine, Row, Select, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from catalog.requests.estimate import ESTIMATE
from jobs.errors import ArtifactDamaged
from jobs.lifecycle import OPEN, TERMINAL
from jobs.objects.artifacts import ArtifactFolder
from jobs.records import Artifact, Event
from jobs.repository.lineage import unnamed
from jobs.repository.results import count_events, count_layers, events_after, every_layer_row, list_artifacts
from jobs.retention.archive import MEDIA_TYPE, NAME, Contents, write_archive
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import artifacts, job_events, jobs, layer_results

_AT_ONCE = 20
_MOST_FAULTS = 100
_ESTIMATES_AT_ONCE = 500
_DAY_SECONDS = 86_400
_STAYING = "state"
"""Events of this type stay in the ledger too: they are few, and a reader who resumes finds the job's end."""


class _Changed(Exception):
    """The rows are not those that were archived."""


def archive_ended(
    engine: Engine, folder: ArtifactFolder, days: float, *, drop_files: bool, at_fault: set[str] | None = None
) -> int:
    """Archive ended jobs, the oldest first and at most twenty.

    Where files are dropped, a job waits for all open jobs that name it as the source of their factors.

    Args:
        days: Only jobs that ended so many days ago.
        drop_files: Whether the job's files are deleted with its rows.
        at_fault: Ids of jobs that cannot be archived: they are passed over, and newly found ones are added. Otherwise a
            hundred of them would be read in vain every minute.

    Returns:
        The number of archived jobs.

    Raises:
        ArtifactDamaged: If an archive reads back other than written, or cannot be listed; the other jobs are archived
            all the same.
        LedgerUnavailable: If the database does not answer.
        StoreUnavailable: If the store does not answer.
        OSError: If a disk is full or fails.
    """
    archived = 0
    faults: dict[str, ArtifactDamaged] = {}
    known_before = frozenset(at_fault or ())
    while due := _next(engine, days, _AT_ONCE - archived, besides={*known_before, *faults}, drop_files=drop_files):
        known = len(faults)
        for each in due:
            try:
                archived += _archive(engine, folder, each, drop_files=drop_files)
            except ArtifactDamaged as error:
                faults[each.id] = error
        # those behind jobs at fault have their turn too
        if not known < len(faults) < _MOST_FAULTS or archived >= _AT_ONCE:
            break
    if at_fault is not None:
        at_fault.update(faults)
    if faults:
        raise next(iter(faults.values()))
    return archived


def forget_estimates(engine: Engine, days: float) -> int:
    """Delete at most 500 estimates that ended so many days ago with all their rows, and return their number.

    They have no files, and can be asked for again.
    """
    old = select(jobs.c.id).where(*_ended(days), jobs.c.kind == ESTIMATE).order_by(jobs.c.finished_at)
    with writing(engine) as connection:
        return connection.execute(delete(jobs).where(jobs.c.id.in_(old.limit(_ESTIMATES_AT_ONCE)))).rowcount


def _next(engine: Engine, days: float, limit: int, *, besides: Iterable[str], drop_files: bool) -> Sequence[Row[Any]]:
    columns = (jobs.c.id, jobs.c.tenant_id, jobs.c.attempt, jobs.c.fence, jobs.c.event_seq)
    due = (
        *_ended(days),
        jobs.c.archived_at.is_(None),
        jobs.c.kind != ESTIMATE,
        _is_over(),
        *(unnamed() if drop_files else ()),
    )
    query: Select[Any] = select(*columns).where(*due, jobs.c.id.not_in(tuple(besides)))
    with reading(engine) as connection:
        return connection.execute(query.order_by(jobs.c.finished_at).limit(limit)).all()


def _is_over() -> ColumnElement[bool]:
    """Return the condition that the job is not a piece of one that has yet to end: that one needs its files."""
    divided = jobs.alias("divided")
    waiting = select(divided.c.id).where(divided.c.state.in_(OPEN))
    return or_(jobs.c.parent_id.is_(None), jobs.c.parent_id.not_in(waiting))


def _ended(days: float) -> tuple[ColumnElement[bool], ...]:
    return (
        jobs.c.finished_at < ledger_now(-days * _DAY_SECONDS),
        jobs.c.finished_at.is_not(None),
        jobs.c.state.in_(TERMINAL),
    )


def _archive(engine: Engine, folder: ArtifactFolder, job: Row[Any], *, drop_files: bool) -> bool:
    """Archive one job; whether it was this call that did."""
    files = [each for each in list_artifacts(engine, job.tenant_id, job.id) if each.name != NAME]
    contents = Contents(
        job=job.id,
        layers=count_layers(engine, job.tenant_id, job.id),
        events=count_events(engine, job.tenant_id, job.id),
    )
    archive = _keep(engine, folder, job, contents, files)
    try:
        return _exchange(engine, job, contents, archive, drop_files=drop_files)
    except _Changed:
        return False
    except IntegrityError as error:
        raise ArtifactDamaged(f"job {job.id} cannot be archived: it has a file of its own called {NAME}") from error


def _keep(engine: Engine, folder: ArtifactFolder, job: Row[Any], contents: Contents, files: list[Artifact]) -> Artifact:
    """Put the archive, and read it back."""
    # staged where attempts stage, so that what a killed process leaves there is swept as theirs is
    staged = f"archive-{uuid.uuid4().hex}"
    path = folder.attempt_dir(job.id, job.fence) / staged
    try:
        layers = every_layer_row(engine, job.tenant_id, job.id)
        written = write_archive(path, contents, layers, _events(engine, job), files)
        uri = folder.publish(
            job.tenant_id, job.id, job.fence, staged, sha256=written.sha256, size_bytes=written.size_bytes
        )
    finally:
        path.unlink(missing_ok=True)
    archive = Artifact(
        job_id=job.id,
        name=NAME,
        sha256=written.sha256,
        size_bytes=written.size_bytes,
        media_type=MEDIA_TYPE,
        uri=uri,
    )
    folder.verify(archive)
    return archive


def _exchange(engine: Engine, job: Row[Any], contents: Contents, archive: Artifact, *, drop_files: bool) -> bool:
    """List the archive and remove what it holds, all at once or nothing."""
    with writing(engine) as connection:
        taken = connection.execute(
            update(jobs)
            .where(
                jobs.c.id == job.id,
                jobs.c.event_seq == job.event_seq,
                jobs.c.archived_at.is_(None),
                _is_over(),
                *(unnamed() if drop_files else ()),
            )
            .values(archived_at=ledger_now())
        )
        if not taken.rowcount:
            return False
        layers = connection.execute(delete(layer_results).where(layer_results.c.job_id == job.id)).rowcount
        gone = connection.execute(
            delete(job_events).where(job_events.c.job_id == job.id, job_events.c.type != _STAYING)
        ).rowcount
        stay = connection.execute(
            select(func.count()).select_from(job_events).where(job_events.c.job_id == job.id)
        ).scalar_one()
        if (layers, gone + stay) != (contents.layers, contents.events):
            raise _Changed
        if drop_files:
            connection.execute(delete(artifacts).where(artifacts.c.job_id == job.id))
        connection.execute(
            insert(artifacts).values(
                job_id=job.id,
                name=archive.name,
                tenant_id=job.tenant_id,
                attempt=job.attempt,
                fence=job.fence,
                sha256=archive.sha256,
                size_bytes=archive.size_bytes,
                media_type=archive.media_type,
                uri=archive.uri,
            )
        )
        return True


def _events(engine: Engine, job: Row[Any]) -> Iterator[Event]:
    seq = 0
    while page := events_after(engine, job.tenant_id, job.id, seq):
        yield from page
        seq = page[-1].seq
