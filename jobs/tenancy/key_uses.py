"""Key uses: the last use of each API key, noted in memory, written to the ledger at most once a minute for each.

A request waits for none of it, and a use may be written up to a minute late; what a killed process had noted since its
last writing is lost.
"""

import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, Select, bindparam, or_, select, update

from catalog.record import record
from jobs.repository.row_records import read_row
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import api_keys, tenants

_SECONDS = 60.0
_MAX_CLIENT = 64
"""The column's length; an address, or a network of addresses, has at most 43 characters."""


@record
class KeyRecord:
    """A key as its operator sees it: all but the key."""

    key: str
    """Its public part, by which it is revoked."""
    tenant: str
    scopes: tuple[str, ...]
    state: str
    """`valid`, `expired` or `revoked`."""
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    """To the minute; null where it was never used, or by earlier versions alone."""
    last_used_from: str | None
    """The address of the client, of IPv6 its network of 64 bits."""


class KeyUses:
    """The uses that one process has seen and not written yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without any; the clock returns seconds that never go back."""
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: dict[str, str] = {}
        self._written: dict[str, float] = {}

    def note(self, key: str, client: str) -> None:
        """Note in memory that a key, by its public part, was used from a client's address."""
        with self._lock:
            self._clients[key] = client[:_MAX_CLIENT]

    def write(self, engine: Engine, *, every: bool = False) -> int:
        """Write the uses of keys that were not written within the last minute, by this process or another.

        As the process ends it writes ``every`` one. Return the number of keys whose use was written or found written.
        """
        now = self._clock()
        with self._lock:
            due = [key for key in self._clients if every or now - self._written.get(key, -_SECONDS) >= _SECONDS]
            uses = [{"used": key, "client": self._clients.pop(key)} for key in sorted(due)]
        if not uses:
            return 0
        statement = (
            update(api_keys)
            .where(
                api_keys.c.prefix == bindparam("used"),
                or_(
                    api_keys.c.last_used_at.is_(None), api_keys.c.last_used_at <= ledger_now(0 if every else -_SECONDS)
                ),
            )
            .values(last_used_at=ledger_now(), last_used_from=bindparam("client"))
        )
        try:
            with writing(engine) as connection:
                connection.execute(statement, uses)
        except BaseException:
            with self._lock:  # they are written with the next ones
                self._clients = {each["used"]: each["client"] for each in uses} | self._clients
            raise
        with self._lock:
            self._written.update((each["used"], now) for each in uses)
        return len(uses)


def list_keys(engine: Engine, tenant: str | None = None) -> tuple[KeyRecord, ...]:
    """Return the keys of the service, of all tenants or of one."""
    columns = [each for each in api_keys.c if each.name not in {"id", "tenant_id", "hmac"}]
    query: Select[Any] = (
        select(*columns, tenants.c.name, ledger_now().label("now"))
        .join(tenants, tenants.c.id == api_keys.c.tenant_id)
        .order_by(tenants.c.name, api_keys.c.created_at, api_keys.c.id)
    )
    if tenant is not None:
        query = query.where(tenants.c.name == tenant)
    with reading(engine) as connection:
        rows = connection.execute(query).all()
    return tuple(
        read_row(
            KeyRecord,
            row,
            key=row.prefix,
            tenant=row.name,
            scopes=tuple(row.scopes.split(" ")),
            state=_state(row.revoked_at, row.expires_at, row.now),
        )
        for row in rows
    )


def _state(revoked_at: datetime | None, expires_at: datetime | None, now: datetime) -> str:
    if revoked_at is not None:
        return "revoked"
    return "expired" if expires_at is not None and expires_at <= now else "valid"
