"""The lookout: what a scrape needs to know of ledger and disk, looked at once for all scrapes of a few seconds."""

import asyncio
import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

from api.settings import Settings
from catalog.record import record
from jobs.metrics.snapshot import Census, take_census
from jobs.schema.database import open_database

_CENSUS_SECONDS = 3.0

_log = logging.getLogger("kronoscope.api.lookout")


@record
class Sight:
    """What one look found; None where it found nothing."""

    census: Census | None
    disk_free_bytes: int | None


class Lookout:
    """Looks when it is asked and its last look is old.

    It has a thread and a connection of its own: while the API's are all busy, its scrapes must not say that the
    database is down. A look that hangs is waited for by later ones, and no second one is begun; but one that has
    ended when nobody waited any more tells nobody anything, since what it counted may be long past.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._engine = open_database(settings.ledger.database_url)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lookout")
        self._lock = asyncio.Lock()
        self._pending: asyncio.Future[Sight] | None = None
        self._seen = Sight(census=None, disk_free_bytes=None)
        self._seen_at = -1e9
        self._failing = False

    async def look(self) -> Sight:
        """The last look, where it is fresh; else a new one, of three seconds at most."""
        async with self._lock:
            if time.monotonic() - self._seen_at < self._settings.metrics_seconds:
                return self._seen
            if self._pending is None or self._pending.done():
                self._pending = asyncio.get_running_loop().run_in_executor(self._thread, self._look)
            done, _ = await asyncio.wait([self._pending], timeout=_CENSUS_SECONDS)
            if not done:
                return Sight(census=None, disk_free_bytes=self._seen.disk_free_bytes)
            self._seen, self._seen_at, self._pending = self._pending.result(), time.monotonic(), None
            return self._seen

    def close(self) -> None:
        """Let go of thread and database."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._engine.dispose()

    def _look(self) -> Sight:
        return Sight(disk_free_bytes=self._free(), census=self._census())

    def _free(self) -> int | None:
        try:
            return shutil.disk_usage(self._settings.ledger.artifact_root).free
        except OSError:
            return None

    def _census(self) -> Census | None:
        try:
            census = take_census(self._engine)
        except Exception as error:  # noqa: BLE001 - whatever the driver raises, the scrape is answered
            if not self._failing:
                _log.warning("the ledger cannot be counted (%s)", type(error).__name__, exc_info=error)
            self._failing = True
            return None
        self._failing = False
        return census
