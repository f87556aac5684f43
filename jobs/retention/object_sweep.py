"""The object sweep removes what nothing names any more: objects without a row, and files of attempts that are over.

An object is put first and listed afterwards, so one without a row may be about to get it. Another
put begins its age anew; only what is older than the grace *and* unlisted goes, and its
age is looked at again in the same step that removes it. A job whose row comes later than that has
long lost its lease, and its row is refused.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from sqlalchemy import Engine, select, union_all

from jobs.lifecycle import HELD
from jobs.objects import job_folders
from jobs.objects.artifacts import OBJECTS, ArtifactFolder
from jobs.objects.object_store import MARKS
from jobs.records import Artifact
from jobs.schema.database import reading
from jobs.schema.identifiers import is_id
from jobs.schema.tables import artifacts, jobs, upload_files

_AT_ONCE = 200
_MARK_SECONDS = 600.0
"""The least age of a store's mark to be deleted."""


def sweep_objects(engine: Engine, folder: ArtifactFolder, grace_seconds: float) -> int:
    """Delete every object that no row names and that is older than the grace.

    Files under temporary names have no row either, and stay as long.

    Args:
        grace_seconds: The least age, by the store's clock.

    Returns:
        The number of deleted objects.

    Raises:
        LedgerUnavailable: If the database does not answer; nothing is deleted unchecked.
        StoreUnavailable: If the store does not answer.
    """
    now = folder.store.now()
    limit = now - grace_seconds
    _sweep_marks(folder, now - max(grace_seconds, _MARK_SECONDS))
    old = (each.key for each in folder.objects() if each.modified_at < limit)
    return sum(_remove_unlisted(engine, folder, batch, limit) for batch in _batches(old))


def delete_unlisted(engine: Engine, folder: ArtifactFolder, deleted: Iterable[Artifact], grace_seconds: float) -> int:
    """Delete the objects that only a deleted job has listed, without waiting for the next sweep; return their number.

    Those younger than the grace, by the store's clock, are left to the sweep.
    """
    limit = folder.store.now() - grace_seconds
    keys = dict.fromkeys(each.uri for each in deleted if each.uri.startswith(OBJECTS))
    return sum(_remove_unlisted(engine, folder, batch, limit) for batch in _batches(iter(keys)))


def sweep_attempts(engine: Engine, folder: ArtifactFolder, grace_seconds: float) -> int:
    """Delete the staged files of attempts that have lost or ended their job, and return the number of attempts.

    Folders with a change within the grace stay.
    """
    if not folder.root.is_dir():
        return 0
    limit = folder.store.now() - grace_seconds
    found = (each.name for each in folder.root.iterdir() if is_id(each.name))
    return sum(_remove_over(engine, folder, batch, limit) for batch in _batches(found))


def _sweep_marks(folder: ArtifactFolder, limit: float) -> None:
    for each in folder.store.listing(MARKS):
        if each.modified_at < limit:
            folder.store.delete(each.key)


def _remove_unlisted(engine: Engine, folder: ArtifactFolder, keys: list[str], limit: float) -> int:
    tenants = {key.split("/")[1] for key in keys}
    with reading(engine) as connection:
        naming = [
            select(each.c.uri).where(each.c.tenant_id.in_(tenants), each.c.uri.in_(keys))
            for each in (artifacts, upload_files)
        ]
        listed = set(connection.execute(union_all(*naming)).scalars())
    return sum(folder.store.delete(key, older_than=limit) for key in keys if key not in listed)


def _remove_over(engine: Engine, folder: ArtifactFolder, job_ids: list[str], limit: float) -> int:
    with reading(engine) as connection:
        attempts = connection.execute(
            select(jobs.c.id, jobs.c.fence).where(jobs.c.id.in_(job_ids), jobs.c.state.in_(HELD))
        ).all()
        # rows of earlier versions name files where they were written
        listed = set(
            connection.execute(
                select(artifacts.c.uri).where(artifacts.c.job_id.in_(job_ids), ~artifacts.c.uri.startswith(OBJECTS))
            ).scalars()
        )
    held = {row.id: row.fence for row in attempts}
    removed = 0
    for job_id in job_ids:
        place = folder.root / job_id
        for attempt in _attempts(place):
            over = held.get(job_id) != int(attempt.name)
            if over and _touched(attempt) < limit:
                job_folders.clear(folder.view(job_id, int(attempt.name)))
                removed += _remove_unlisted_files(folder.root, attempt, listed)
        if job_id not in held:
            with contextlib.suppress(OSError):
                place.rmdir()
    return removed


def _attempts(place: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [each for each in place.iterdir() if each.name.isdecimal()]
    return []


def _remove_unlisted_files(root: Path, attempt: Path, listed: set[str]) -> int:
    start = f"{attempt.relative_to(root).as_posix()}/"
    if not any(uri.startswith(start) for uri in listed):
        job_folders.clear(attempt)
        return 1
    stray = [
        each for each in attempt.rglob("*") if not each.is_dir() and each.relative_to(root).as_posix() not in listed
    ]
    for each in stray:
        each.unlink(missing_ok=True)
    return 1 if stray else 0


def _touched(attempt: Path) -> float:
    """When something was last written there; never, where it is going away meanwhile."""
    with job_folders.within(attempt):
        return max((each.st_mtime for each in job_folders.statuses(attempt)), default=0.0)


def _batches(keys: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(itertools.islice(keys, _AT_ONCE)):
        yield batch
