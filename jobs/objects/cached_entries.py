"""Cached entries: the ledger's rows of cached factors, with the digests that each use of an entry is held against.

Files of an entry are in a folder of one machine, or of those that share it (`place`): another machine's are not there,
and collects for itself.
"""

import contextlib
import os
import re
import uuid
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Row, delete, select, update

from catalog.record import plain
from catalog.requests.cached_factors import CachedEntry, CachedFile
from jobs.schema.clock import ledger_now
from jobs.schema.database import insert_into, reading, writing
from jobs.schema.tables import cached_factors, tenants

_PLACE = ".place"
_ID = re.compile(r"[0-9a-f-]{36}")
_UNUSED_SECONDS = 30 * 86_400.0
"""Age at which the rows of a place that is no longer swept are removed: its machine is gone."""


def place_of(folder: Path) -> str:
    """Return the id of a folder of all tenants' caches, the same for all that share it; make folder and id if missing.

    ``OSError`` if the id can be neither read nor made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / _PLACE
    part = folder / f".part-{uuid.uuid4().hex}"
    if not path.exists():
        try:
            part.write_text(str(uuid.uuid4()))
            with contextlib.suppress(FileExistsError):
                os.link(part, path)
        finally:
            part.unlink(missing_ok=True)
    text = path.read_text()
    if not _ID.fullmatch(text):
        path.unlink(missing_ok=True)
        raise OSError(f"{path} did not hold an id; it is made anew")
    return text


class CachedEntries:
    """The rows of one tenant's entries in one place; ``LedgerUnavailable`` if the database does not answer."""

    def __init__(self, engine: Engine, tenant_id: str, place: str) -> None:
        """Set up the rows of one folder of caches, by `place_of`."""
        self._engine = engine
        self._tenant_id = tenant_id
        self._place = place
        self._own = (cached_factors.c.tenant_id == tenant_id, cached_factors.c.place == place)

    def find(self, key: str) -> CachedEntry | None:
        """Return the entry of a key, and note its use; None without one."""
        used = update(cached_factors).where(*self._own, cached_factors.c.key == key).values(used_at=ledger_now())
        with writing(self._engine) as connection:
            row = connection.execute(used.returning(*cached_factors.c)).one_or_none()
        return None if row is None else _entry(row)

    def add(self, entry: CachedEntry, *, replace: bool) -> bool:
        """Make an entry, with its files in its folder, that of its key, and return whether it is.

        One that is there gives way only to ``replace``; of two that are added at once the first is.
        """
        files = plain(entry.files)
        row: dict[str, Any] = {"id": entry.id, "tenant_id": self._tenant_id, "place": self._place, "key": entry.key}
        row |= {"job_id": entry.job, "files": files, "size_bytes": sum(each.size_bytes for each in entry.files)}
        with writing(self._engine) as connection:
            if replace:
                connection.execute(delete(cached_factors).where(*self._own, cached_factors.c.key == entry.key))
            return _insert_once(connection, row)

    def remove(self, key: str, entry_id: str | None) -> None:
        """Remove the row of a key: only if it is of this entry; None: of any."""
        which = () if entry_id is None else (cached_factors.c.id == entry_id,)
        with writing(self._engine) as connection:
            connection.execute(delete(cached_factors).where(*self._own, cached_factors.c.key == key, *which))

    def all(self) -> list[CachedEntry]:
        """Return all entries, the longest unused last."""
        with reading(self._engine) as connection:
            rows = connection.execute(
                select(cached_factors).where(*self._own).order_by(cached_factors.c.used_at.desc())
            ).all()
        return [_entry(row) for row in rows]


def list_tenants(engine: Engine, place: str | None = None) -> list[str]:
    """Return the ids of tenants with entries in a folder of caches, by `place_of`; None: all, with entries or not."""
    found = select(tenants.c.id)
    if place is not None:
        found = select(cached_factors.c.tenant_id).where(cached_factors.c.place == place).distinct()
    with reading(engine) as connection:
        return list(connection.execute(found).scalars())


def forget_unused(engine: Engine) -> int:
    """Remove the rows not used for a month, and return their number.

    Where their place is still swept, the files follow.
    """
    unused = cached_factors.c.used_at < ledger_now(-_UNUSED_SECONDS)
    with writing(engine) as connection:
        return connection.execute(delete(cached_factors).where(unused)).rowcount


def _insert_once(connection: Connection, row: dict[str, Any]) -> bool:
    statement = insert_into(connection, cached_factors).values(**row, left_at=ledger_now(), used_at=ledger_now())
    done = connection.execute(statement.on_conflict_do_nothing().returning(cached_factors.c.id))
    return done.scalar_one_or_none() is not None


def _entry(row: Row[Any]) -> CachedEntry:
    files = tuple(CachedFile(**each) for each in row.files)
    return CachedEntry(id=row.id, key=row.key, job=row.job_id, files=files)
