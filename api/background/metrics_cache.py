"""A cache of the counts that a scrape needs from ledger and disk: one reading serves all scrapes of a few seconds."""

import asyncio
import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

from api.settings import Settings
from catalog.record import record
from jobs.metrics.snapshot import LedgerSnapshot, take_snapshot
from jobs.schema.database import open_database

_READ_SECONDS = 3.0

_log = logging.getLogger("kronoscope.api.metrics_cache")


@record
class LedgerReading:
    """The counts of one reading; None for a part that could not be read."""

    snapshot: LedgerSnapshot | None
    disk_free_bytes: int | None


class MetricsCache:
    """The last reading, renewed on request once it is old.

    It has a thread and a connection of its own: while the API's are all busy, its scrapes must not report that the
    database is down. Later scrapes wait for a reading that hangs, and no second one is started. One that ends after
    its scrapes gave up is dropped, since its counts may be long out of date.
    """

    def __init__(self, settings: Settings) -> None:
        """Set up the cache without reading."""
        self._settings = settings
        self._engine = open_database(settings.ledger.database_url)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics-cache")
        self._lock = asyncio.Lock()
        self._pending: asyncio.Future[LedgerReading] | None = None
        self._last = LedgerReading(snapshot=None, disk_free_bytes=None)
        self._read_at = -1e9
        self._failing = False

    async def read(self) -> LedgerReading:
        """Return the last reading where it is fresh, else a new one, within three seconds."""
        async with self._lock:
            if time.monotonic() - self._read_at < self._settings.metrics_seconds:
                return self._last
            if self._pending is None or self._pending.done():
                self._pending = asyncio.get_running_loop().run_in_executor(self._thread, self._read)
            done, _ = await asyncio.wait([self._pending], timeout=_READ_SECONDS)
            if not done:
                return LedgerReading(snapshot=None, disk_free_bytes=self._last.disk_free_bytes)
            self._last, self._read_at, self._pending = self._pending.result(), time.monotonic(), None
            return self._last

    def close(self) -> None:
        """Close the thread and the database connection."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._engine.dispose()

    def _read(self) -> LedgerReading:
        return LedgerReading(disk_free_bytes=self._free_bytes(), snapshot=self._snapshot())

    def _free_bytes(self) -> int | None:
        try:
            return shutil.disk_usage(self._settings.ledger.artifact_root).free
        except OSError:
            return None

    def _snapshot(self) -> LedgerSnapshot | None:
        try:
            snapshot = take_snapshot(self._engine)
        except Exception as error:  # noqa: BLE001 - whatever the driver raises, the scrape is answered
            if not self._failing:
                _log.warning("the ledger cannot be counted (%s)", type(error).__name__, exc_info=error)
            self._failing = True
            return None
        self._failing = False
        return snapshot
