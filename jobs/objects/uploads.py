"""Uploads of a tenant: files that come in parts, and are objects like those of jobs once their digest is proved.

::

    root/uploads/<id>/<name>          staged by the API; its one writer holds a lock, which ends with its process
    objects/<tenant>/<aa>/<sha256>    a file of which all has come, where all machines of the service find it

The id is a digest of tenant and declaration: the same declaration finds its upload again. A row says that a file is
stored; an object may be gone or damaged since. Then `forget` takes that back, and the file can be sent again.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import ColumnElement, Engine, and_, delete, func, or_, select, update

from catalog import ANALYSES
from catalog.record import plain
from catalog.requests.uploads import UploadDocument, UploadedFile, UploadView
from jobs.codec import sha256_of
from jobs.errors import ArtifactDamaged, QuotaExceeded, UploadRefused
from jobs.lifecycle import TERMINAL
from jobs.objects.artifacts import ArtifactFolder, object_key
from jobs.schema.clock import ledger_now
from jobs.schema.database import insert_into, reading, writing
from jobs.schema.tables import jobs, upload_files
from jobs.tenancy.quotas import lock_usage

_NAMED = (
    ("model", "id"),
    ("data", "id"),
    *((kind, "query", "id") for kind, each in ANALYSES.items() if hasattr(each.params, "query")),
)
"""Fields of a document that name uploads."""
_FOLDER = "uploads"
_DAY_SECONDS = 86_400
_MOST_UNFINISHED = 5_000
_FOREVER_DAYS = 36_500.0
_F = upload_files.c


class Uploads:
    """The uploads of one tenant, with what is staged of them on this machine."""

    def __init__(self, engine: Engine, folder: ArtifactFolder, tenant_id: str) -> None:
        self._engine, self._folder, self._tenant_id = engine, folder, tenant_id

    def declare(
        self,
        document: UploadDocument,
        default_bytes: int | None,
        require_room: Callable[[int], None] = lambda _bytes: None,
    ) -> str:
        """List what will be sent, or find what was declared before, and return its id.

        Args:
            document: The declaration.
            default_bytes: The quota of tenants without one of their own; None for no limit.
            require_room: Receives the bytes that the disk needs for what has not come, and for the second copy of the
                largest file while that is stored, and raises what it likes; nothing is listed then.

        Raises:
            QuotaExceeded: If it does not fit; nothing is listed then.
            UploadRefused: If too much was declared and never completed.
        """
        files = sorted(map(plain, document.files), key=lambda each: str(each["name"]))
        upload_id = sha256_of([self._tenant_id, document.kind, files])[:32]
        own = {"upload_id": upload_id, "tenant_id": self._tenant_id, "kind": document.kind, "changed_at": ledger_now()}
        rows = [{**own, **each, "uri": object_key(self._tenant_id, each["sha256"])} for each in files]
        with writing(self._engine, self._tenant_id) as connection:
            before, quota = lock_usage(connection, self._tenant_id, default_bytes)
            again = {"index_elements": [_F.upload_id, _F.name], "set_": {"changed_at": ledger_now()}}
            connection.execute(insert_into(connection, upload_files).values(rows).on_conflict_do_update(**again))
            after, _ = lock_usage(connection, self._tenant_id, default_bytes)
            if quota is not None and after > max(quota, before):
                raise QuotaExceeded(before, quota, after - before)
            unstored = select(_F.name, _F.size_bytes).where(*self._own(upload_id), _F.stored_at.is_(None))
            if sizes := {row.name: row.size_bytes for row in connection.execute(unstored)}:
                left = sum(size - _size(self._staged(upload_id, name)) for name, size in sizes.items())
                require_room(left + max(sizes.values()))
            unfinished = (_F.tenant_id == self._tenant_id, _F.completed_at.is_(None))
            if connection.execute(select(func.count()).where(*unfinished)).scalar_one() > _MOST_UNFINISHED:
                raise UploadRefused("limit", f"you have {_MOST_UNFINISHED:,} unfinished files; complete or delete some")
        return upload_id

    def find(self, upload_id: str, *, use: bool = False) -> UploadView | None:
        """Return an upload, or None; if it is used, the time for which it is kept begins anew."""
        own = self._own(upload_id)
        with (writing if use else reading)(self._engine, self._tenant_id) as connection:
            if use:
                connection.execute(update(upload_files).where(*own).values(changed_at=ledger_now()))
            rows = connection.execute(select(upload_files).where(*own).order_by(_F.name)).all()
        if not rows:
            return None
        files = []
        for row in rows:
            received = row.size_bytes if row.stored_at is not None else _size(self._staged(upload_id, row.name))
            declared = {"name": row.name, "size_bytes": row.size_bytes, "sha256": row.sha256}
            files.append(UploadedFile(**declared, received_bytes=received))
        complete = all(row.completed_at is not None for row in rows)
        return UploadView(id=upload_id, kind=rows[0].kind, complete=complete, files=tuple(files))

    def recheck(self, upload_id: str, name: str | None = None) -> None:
        """Forget the stored files that the store has no longer: a ledger put back may list what was swept since.

        Args:
            name: Only this file; None for all.
        """
        asked = (*self._own(upload_id), _F.stored_at.is_not(None), *(() if name is None else (_F.name == name,)))
        with reading(self._engine, self._tenant_id) as connection:
            rows = connection.execute(select(_F.name, _F.uri, _F.size_bytes).where(*asked)).all()
        for row in rows:
            if not self._folder.store.has(row.uri, row.size_bytes):
                self.forget(upload_id, row.name)

    def forget(self, upload_id: str, name: str) -> None:
        """Take back that a file is stored, and that its upload is complete: none of it has come then."""
        own = self._own(upload_id)
        with writing(self._engine, self._tenant_id) as connection:
            connection.execute(update(upload_files).where(*own, _F.name == name).values(stored_at=None))
            # all of its files, or the next sweep takes the others: those of no complete upload stay for a day
            connection.execute(update(upload_files).where(*own).values(completed_at=None, changed_at=ledger_now()))

    @contextlib.contextmanager
    def writer(self, upload_id: str, name: str) -> Iterator[BinaryIO]:
        """Open what has come of a file, to write on at its end; ``UploadRefused`` if another one writes to it."""
        path = self._staged(upload_id, name)
        (self._folder.root / _FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as part:
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_named = os.path.samestat(os.fstat(part.fileno()), path.stat())
            except OSError:
                is_named = False
            if not is_named:
                raise UploadRefused("busy", f"another request sends {name} now; go on once it has ended")
            try:
                yield part
            finally:
                if not os.fstat(part.fileno()).st_size:
                    path.unlink(missing_ok=True)

    def store(self, upload_id: str, file: UploadedFile) -> None:
        """Make an object of a file of which all has come, as its writer.

        Raises:
            UploadRefused: If its digest is another; what has come is dropped.
            OSError: If a disk is full; what has come stays.
        """
        path = self._staged(upload_id, file.name)
        try:
            key = object_key(self._tenant_id, file.sha256)
            self._folder.store.put(key, path, sha256=file.sha256, size_bytes=file.size_bytes)
        except ArtifactDamaged as error:
            path.unlink(missing_ok=True)
            message = f"{file.name} has another SHA-256 than was declared, and was dropped; send it from its beginning"
            raise UploadRefused("digest", message) from error
        stored = update(upload_files).where(*self._own(upload_id), _F.name == file.name)
        with writing(self._engine, self._tenant_id) as connection:
            connection.execute(stored.values(stored_at=ledger_now()))
        path.unlink(missing_ok=True)

    def complete(self, upload: UploadView, require_room: Callable[[int], None] = lambda _bytes: None) -> None:
        """Let jobs name an upload.

        Args:
            require_room: Receives the bytes of each file that is still to be stored, and raises what it likes.

        Raises:
            UploadRefused: If a part is missing.
            OSError: If a disk is full; what has come stays.
        """
        for file in upload.files:
            if file.received_bytes < file.size_bytes:
                come = f"{file.received_bytes:,} of the {file.size_bytes:,} bytes of {file.name} have come"
                raise UploadRefused("incomplete", f"{come}; send the others")
            if self._staged(upload.id, file.name).exists():  # its sender was cut before it was stored
                require_room(file.size_bytes)
                with self.writer(upload.id, file.name) as part:
                    if os.fstat(part.fileno()).st_size:  # else another one has stored it meanwhile
                        self.store(upload.id, file)
        completed = update(upload_files).where(*self._own(upload.id), _F.completed_at.is_(None))
        unstored = select(_F.name).where(*self._own(upload.id), _F.stored_at.is_(None)).limit(1)
        with writing(self._engine, self._tenant_id) as connection:
            if (name := connection.execute(unstored).scalar_one_or_none()) is not None:
                raise UploadRefused("incomplete", f"what had come of {name} is gone; send it again")
            connection.execute(completed.values(completed_at=ledger_now()))

    def remove(self, upload_id: str) -> None:
        """Delete an upload, which frees its bytes; its objects follow with the next sweep."""
        with writing(self._engine, self._tenant_id) as connection:
            connection.execute(delete(upload_files).where(*self._own(upload_id)))
        shutil.rmtree(self._staged(upload_id, ""), ignore_errors=True)

    def _own(self, upload_id: str) -> tuple[ColumnElement[bool], ...]:
        return _F.tenant_id == self._tenant_id, _F.upload_id == upload_id

    def _staged(self, upload_id: str, name: str) -> Path:
        return self._folder.root / _FOLDER / upload_id / name


def sweep_uploads(engine: Engine, folder: ArtifactFolder, days: float | None) -> int:
    """Delete uploads that were not finished within a day, and complete ones after days without use by any job.

    Args:
        engine: The ledger's database, of all tenants.
        folder: The artifacts of this machine; what is staged there of no unfinished upload is deleted.
        days: The days of ended jobs; None keeps complete uploads.

    Returns:
        The number of deleted files.
    """
    kept_seconds = (_FOREVER_DAYS if days is None else days) * _DAY_SECONDS
    unfinished = _F.completed_at.is_(None)
    old = or_(and_(unfinished, _F.changed_at < ledger_now(-_DAY_SECONDS)), _F.changed_at < ledger_now(-kept_seconds))
    named = [func.coalesce(jobs.c.document[path].as_string(), "") for path in _NAMED]
    # those that are not over, and all that these extend
    needed = select(jobs.c.id, jobs.c.document).where(jobs.c.state.not_in(TERMINAL)).cte("needed", recursive=True)
    extended = needed.c.document["extends", "job"].as_string()
    needed = needed.union_all(select(jobs.c.id, jobs.c.document).join(needed, jobs.c.id == extended))
    unused = [_F.upload_id.not_in(select(each).where(jobs.c.id.in_(select(needed.c.id)))) for each in named]
    with writing(engine) as connection:
        # SQLite counts no rows of a statement that begins with WITH
        deleted = len(connection.execute(delete(upload_files).where(old, *unused).returning(_F.name)).all())
        staged = set(connection.execute(select(_F.upload_id).where(unfinished)).scalars())
    for each in (folder.root / _FOLDER).glob("*"):
        if each.name not in staged:
            shutil.rmtree(each, ignore_errors=True)
    return deleted


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
