"""One look per tick at all jobs that anybody waits for: streams of events and long polls ask no database themselves.

A job that is waited for has a *channel*: how far the job is, and its newest events as they go over
the wire, kept once for all readers. Who has fallen behind what the channel keeps reads the table.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from sqlalchemy import Engine
from starlette.concurrency import run_in_threadpool

from api.live.sse_format import encode
from catalog.record import record
from jobs.errors import LedgerUnavailable
from jobs.records import Job
from jobs.repository.events import History, look

_log = logging.getLogger("kronoscope.api.watch")

_TICK_SECONDS = 0.25
_PATIENCE_SECONDS = 1.0
"""Between two looks at a database that does not answer."""
_KEPT_EVENTS = 500
_KEPT_BYTES = 2**20


@record
class Portion:
    """What a channel has for one reader."""

    text: bytes
    """Events as they go over the wire."""
    through: int
    """Every event up to this number has been given."""
    ended: bool
    """Whether nothing follows."""


@dataclass(eq=False)
class Channel:
    """What is known of one job that somebody waits for."""

    version: int | None = None
    """The job's `event_seq`; None before the first look."""
    gone: bool = False
    """The job was deleted."""
    bells: set[asyncio.Event] = field(default_factory=set)
    streams: int = 0
    """How many of those who wait want the events too."""
    floor: int | None = None
    """Events above this number are kept; None where no look was for events."""
    through: int = 0
    ended: bool = False
    kept: deque[tuple[int, bytes]] = field(default_factory=deque)
    kept_bytes: int = 0
    reading: asyncio.Future[Job | None] | None = None
    read_version: int | None = None

    @property
    def position(self) -> int | None:
        """From where the next look reads events."""
        return self.through if self.streams and self.floor is not None else None

    def since(self, position: int) -> Portion | None:
        """What is kept above ``position``; None where the reader has to read the table first."""
        if self.gone:
            return Portion(text=b"", through=position, ended=True)
        if self.floor is None:
            return Portion(text=b"", through=position, ended=False)
        if position < self.floor:
            return None
        text = b"".join(text for number, text in self.kept if number > position)
        return Portion(text=text, through=max(position, self.through), ended=self.ended)

    def take(self, seen: History | None, encoded: list[tuple[int, bytes]]) -> None:
        """Note what a look has found, and wake those who wait where it is news."""
        if seen is None:
            self.gone = True
            self.ring()
            return
        news = seen.through != self.version
        self.version = seen.through
        if self.streams:
            # the last event may be seen before the state that it came with
            news = news or seen.ended != self.ended
            if self.floor is None:  # its readers may go on now, wherever the job is
                self.floor, news = seen.through, True
            self.through, self.ended = seen.through, seen.ended
            self._keep(encoded)
        if news:
            self.ring()

    def ring(self) -> None:
        """Wake everybody who waits."""
        for bell in self.bells:
            bell.set()

    def forget(self) -> None:
        """Keep no events: nobody reads them any more."""
        self.floor, self.ended, self.kept_bytes = None, False, 0
        self.kept.clear()

    def _keep(self, encoded: list[tuple[int, bytes]]) -> None:
        self.kept.extend(encoded)
        self.kept_bytes += sum(len(text) for _, text in encoded)
        while self.kept and (len(self.kept) > _KEPT_EVENTS or self.kept_bytes > _KEPT_BYTES):
            number, text = self.kept.popleft()
            self.floor = number
            self.kept_bytes -= len(text)


class Waiter:
    """Somebody who waits for news of one job."""

    def __init__(self, channel: Channel) -> None:
        self.bell = asyncio.Event()
        self._channel = channel

    async def news(self, seconds: float) -> bool:
        """Wait until the bell rings; False where the seconds were over first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self.bell.wait()
        rang = self.bell.is_set()
        self.bell.clear()
        return rang

    def since(self, position: int) -> Portion | None:
        """What the channel keeps above ``position``; None where the table has to be read."""
        return self._channel.since(position)

    def moved(self, version: int) -> bool:
        """Whether the job is known to be beyond this version."""
        return self._channel.gone or (self._channel.version or 0) > version

    async def read(self, read: Callable[[], Job | None]) -> Job | None:
        """The job as it is now: one read for all who wait for the same version."""
        channel = self._channel
        stale = channel.reading is None or channel.read_version != channel.version
        if stale or (channel.reading is not None and channel.reading.done() and channel.reading.exception()):
            channel.reading = asyncio.ensure_future(run_in_threadpool(read))
            channel.reading.add_done_callback(lambda done: done.cancelled() or done.exception())
            channel.read_version = channel.version
        assert channel.reading is not None  # noqa: S101 - set just above
        return await asyncio.shield(channel.reading)


class Watch:
    """All channels of one process, and the task that looks for them."""

    def __init__(self, engine: Engine, stopping: threading.Event) -> None:
        self._engine = engine
        self._stopping = stopping
        self._channels: dict[str, Channel] = {}
        self._wanted = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="watch")
        self._failing = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look while the context lasts."""
        tasks = [asyncio.ensure_future(self._look_for_ever()), asyncio.ensure_future(self._ring_at_the_end())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._thread.shutdown(wait=False)

    @contextlib.contextmanager
    def waiting(self, job_id: str, *, events: bool = False) -> Iterator[Waiter]:
        """Wait for news of a job, with its ``events`` or without."""
        channel = self._channels.setdefault(job_id, Channel())
        waiter = Waiter(channel)
        channel.bells.add(waiter.bell)
        channel.streams += events
        self._wanted.set()
        try:
            yield waiter
        finally:
            channel.bells.discard(waiter.bell)
            channel.streams -= events
            if not channel.streams:
                channel.forget()
            if not channel.bells and self._channels.get(job_id) is channel:
                del self._channels[job_id]

    async def _look_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wanted.wait()
            if not self._channels:
                self._wanted.clear()
                continue
            begun = loop.time()
            pause = _TICK_SECONDS if await self._look() else _PATIENCE_SECONDS
            await asyncio.sleep(max(pause / 5, pause - (loop.time() - begun)))

    async def _look(self) -> bool:
        """Look once at all channels; whether the database answered."""
        channels = dict(self._channels)
        positions = {job_id: channel.position for job_id, channel in channels.items()}
        try:
            seen, encoded = await asyncio.get_running_loop().run_in_executor(
                self._thread, _look_and_encode, self._engine, positions
            )
        except LedgerUnavailable:
            if not self._failing:
                _log.warning("the database does not answer; waiting requests are told when it does again")
            self._failing = True
            return False
        except Exception:  # noqa: BLE001 - whatever happens, those who wait must not wait for ever
            _log.exception("looking for news failed; it is tried again")
            return False
        self._failing = False
        for job_id, channel in channels.items():
            # a channel that was given up or begun anew meanwhile takes nothing that was looked up for another
            if channel.position == positions[job_id]:
                channel.take(seen.get(job_id), encoded.get(job_id, []))
        return True

    async def _ring_at_the_end(self) -> None:
        while not self._stopping.is_set():  # noqa: ASYNC110 - a signal handler sets it, outside the loop
            await asyncio.sleep(_TICK_SECONDS)
        for channel in self._channels.values():
            channel.ring()


def _look_and_encode(
    engine: Engine, positions: Mapping[str, int | None]
) -> tuple[dict[str, History], dict[str, list[tuple[int, bytes]]]]:
    """In the watcher's own thread: the loop only hands out what is ready."""
    seen = look(engine, positions)
    return seen, {job_id: [(event.seq, encode(event)) for event in each.events] for job_id, each in seen.items()}
