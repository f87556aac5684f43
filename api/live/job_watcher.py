"""The job watcher: one query per tick for all jobs with subscribers, for streams of events and long polls alike.

A job with subscribers has a *channel*: its version, and its newest events as they go over the wire, kept once for all
readers. A reader that has fallen behind what the channel keeps reads the table.
"""

import asyncio
import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi.sse import format_sse_event
from sqlalchemy import Engine
from starlette.concurrency import run_in_threadpool

from api.requests.response_bodies import event_view
from catalog.record import plain, record
from jobs.errors import LedgerUnavailable
from jobs.records import Event, Job
from jobs.repository.events import History, read_new_events
from jobs.schema.query_limits import limit_queries

T = TypeVar("T")

_log = logging.getLogger("kronoscope.api.job_watcher")

_TICK_SECONDS = 0.25
_RETRY_SECONDS = 1.0
"""Between two queries of a database that does not answer."""
_READ_SECONDS = 8.0
"""For one read on behalf of those who wait."""
_KEPT_EVENTS = 500
_KEPT_BYTES = 2**20


@record
class EventBatch:
    """Events for one reader."""

    text: bytes
    """Events as they go over the wire."""
    through: int
    """The number of the last event that the reader has with this batch."""
    ended: bool
    """Whether nothing follows."""


@dataclass(eq=False)
class Channel:
    """The state of one job with subscribers."""

    version: int | None = None
    """The job's `event_seq`; None before the first query."""
    deleted: bool = False
    wakeups: set[asyncio.Event] = field(default_factory=set)
    """One for each subscriber."""
    streams: int = 0
    """The number of subscribers that want the events too."""
    floor: int | None = None
    """Events above this number are kept; None before the first query for events."""
    through: int = 0
    ended: bool = False
    kept: deque[tuple[int, bytes]] = field(default_factory=deque)
    kept_bytes: int = 0
    reading: asyncio.Future[Job | None] | None = None
    read_version: int | None = None

    @property
    def position(self) -> int | None:
        """The number above which the next query reads events; None where no subscriber wants them."""
        return self.through if self.streams and self.floor is not None else None

    def events_after(self, position: int) -> EventBatch | None:
        """Return the kept events above ``position``."""
        if self.deleted:
            return EventBatch(text=b"", through=position, ended=True)
        if self.floor is None:
            return EventBatch(text=b"", through=position, ended=False)
        if position < self.floor:
            return None
        text = b"".join(text for number, text in self.kept if number > position)
        return EventBatch(text=text, through=max(position, self.through), ended=self.ended)

    def update(self, history: History | None, encoded: list[tuple[int, bytes]]) -> None:
        """Store the result of a query, and wake the subscribers if anything has changed."""
        if history is None:
            self.deleted = True
            self.wake_all()
            return
        changed = history.through != self.version
        self.version = history.through
        if self.streams:
            # the last event may be seen before the state that it came with
            changed = changed or history.ended != self.ended
            if self.floor is None:  # its readers may go on now, wherever the job is
                self.floor, changed = history.through, True
            self.through, self.ended = history.through, history.ended
            self._keep(encoded)
        if changed:
            self.wake_all()

    def wake_all(self) -> None:
        """Wake all subscribers."""
        for wakeup in self.wakeups:
            wakeup.set()

    def drop_events(self) -> None:
        """Drop the kept events, as no subscriber reads them any more."""
        self.floor, self.ended, self.kept_bytes = None, False, 0
        self.kept.clear()

    def _keep(self, encoded: list[tuple[int, bytes]]) -> None:
        self.kept.extend(encoded)
        self.kept_bytes += sum(len(text) for _, text in encoded)
        while self.kept and (len(self.kept) > _KEPT_EVENTS or self.kept_bytes > _KEPT_BYTES):
            number, text = self.kept.popleft()
            self.floor = number
            self.kept_bytes -= len(text)


class Subscription:
    """One reader's subscription to a job's channel."""

    def __init__(self, channel: Channel) -> None:
        self.wakeup = asyncio.Event()
        self._channel = channel

    async def wait(self, seconds: float) -> bool:
        """Wait for a change of the job."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self.wakeup.wait()
        woken = self.wakeup.is_set()
        self.wakeup.clear()
        return woken

    def events_after(self, position: int) -> EventBatch | None:
        """Return the channel's events for this subscription's reader."""
        return self._channel.events_after(position)

    def is_newer_than(self, version: int) -> bool:
        """Return whether the job is known to have changed."""
        return self._channel.deleted or (self._channel.version or 0) > version

    async def read(self, read: Callable[[], Job | None]) -> Job | None:
        """Return the job as it is now, with one read for all subscribers that wait for the same version."""
        channel = self._channel
        stale = channel.reading is None or channel.read_version != channel.version
        if stale or (channel.reading is not None and channel.reading.done() and channel.reading.exception()):
            channel.reading = asyncio.ensure_future(run_in_threadpool(read_in_time, read))
            channel.reading.add_done_callback(lambda done: done.cancelled() or done.exception())
            channel.read_version = channel.version
        assert channel.reading is not None  # noqa: S101 - set just above
        return await asyncio.shield(channel.reading)


def read_in_time(read: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401 - passed on
    """Read within a limit of its own: who waits asks again and again, and one read may be for many."""
    with limit_queries(_READ_SECONDS):
        return read(*arguments)


def encode_event(event: Event) -> bytes:
    """Return an event as it goes over the wire, as Server-Sent Events have it."""
    data = json.dumps(plain(event_view(event)), allow_nan=False)
    return format_sse_event(event=event.type, id=str(event.seq), data_str=data)


class JobWatcher:
    """All channels of one process, and the task that queries for them."""

    def __init__(self, engine: Engine, stopping: threading.Event) -> None:
        """Set up the watcher without a channel; all subscribers wake when ``stopping`` is set, as the process ends."""
        self._engine = engine
        self._stopping = stopping
        self._channels: dict[str, Channel] = {}
        self._wanted = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="watch")
        self._failing = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Query while the context lasts."""
        tasks = [asyncio.ensure_future(self._run()), asyncio.ensure_future(self._wake_when_stopping())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._thread.shutdown(wait=False)

    @contextlib.contextmanager
    def subscribe(self, job_id: str, *, events: bool = False) -> Iterator[Subscription]:
        """Subscribe to a job, which the caller may read, while the context lasts; on request to its events too."""
        channel = self._channels.setdefault(job_id, Channel())
        subscription = Subscription(channel)
        channel.wakeups.add(subscription.wakeup)
        channel.streams += events
        self._wanted.set()
        try:
            yield subscription
        finally:
            channel.wakeups.discard(subscription.wakeup)
            channel.streams -= events
            if not channel.streams:
                channel.drop_events()
            if not channel.wakeups and self._channels.get(job_id) is channel:
                del self._channels[job_id]

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wanted.wait()
            if not self._channels:
                self._wanted.clear()
                continue
            begun = loop.time()
            pause = _TICK_SECONDS if await self._update_channels() else _RETRY_SECONDS
            await asyncio.sleep(max(pause / 5, pause - (loop.time() - begun)))

    async def _update_channels(self) -> bool:
        """Query once for all channels; return whether the database answered."""
        channels = dict(self._channels)
        positions = {job_id: channel.position for job_id, channel in channels.items()}
        try:
            histories, encoded = await asyncio.get_running_loop().run_in_executor(
                self._thread, read_in_time, _query_and_encode, self._engine, positions
            )
        except LedgerUnavailable:
            if not self._failing:
                _log.warning("the database does not answer; waiting requests go on when it does again")
            self._failing = True
            return False
        except Exception:  # noqa: BLE001 - whatever happens, subscribers must not wait for ever
            _log.exception("the query for waiting requests failed; it is tried again")
            return False
        self._failing = False
        for job_id, channel in channels.items():
            # a channel that was dropped or replaced meanwhile takes nothing that was read for another
            if channel.position == positions[job_id]:
                channel.update(histories.get(job_id), encoded.get(job_id, []))
        return True

    async def _wake_when_stopping(self) -> None:
        while not self._stopping.is_set():  # noqa: ASYNC110 - a signal handler sets it, outside the loop
            await asyncio.sleep(_TICK_SECONDS)
        for channel in self._channels.values():
            channel.wake_all()


def _query_and_encode(
    engine: Engine, positions: Mapping[str, int | None]
) -> tuple[dict[str, History], dict[str, list[tuple[int, bytes]]]]:
    """Run in the watcher's own thread, so that the event loop only distributes the result."""
    histories = read_new_events(engine, positions)
    encoded = {job: [(event.seq, encode_event(event)) for event in each.events] for job, each in histories.items()}
    return histories, encoded
