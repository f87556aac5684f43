"""Looks at keys whose holders wait: a key may be revoked, or expire, long after its request was accepted."""

import asyncio
from functools import partial

from sqlalchemy import Engine
from starlette.concurrency import run_in_threadpool

from api.live.job_watcher import read_in_time
from jobs.tenancy.api_keys import still_holds


class KeyLooks:
    """Asks the ledger about keys; those who ask about one key at one moment share an answer that begins afterwards."""

    def __init__(self, engine: Engine) -> None:
        """Set up the looks.

        Args:
            engine: The ledger's database, with the keys of all tenants.
        """
        self._engine = engine
        self._next: dict[str, asyncio.Future[bool]] = {}
        """By key, the look that has not begun."""
        self._locks: dict[str, asyncio.Lock] = {}

    async def holds(self, key: str | None) -> bool:
        """Return whether a key holds still, by a look that begins after this was asked.

        Args:
            key: Prefix of the key; None in embedded mode, which has none.

        Returns:
            False if it was revoked, or has expired.

        Raises:
            LedgerUnavailable: If the database does not answer in time.
        """
        if key is None:
            return True
        due = self._next.get(key)
        if due is None:
            due = self._next[key] = asyncio.ensure_future(self._look(key))
        return await asyncio.shield(due)

    async def _look(self, key: str) -> bool:
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                # whoever asks from here on gets the next one
                self._next.pop(key, None)
                return await run_in_threadpool(read_in_time, partial(still_holds, self._engine, key))
        finally:
            if key not in self._next and not lock.locked():
                self._locks.pop(key, None)
