"""A stream of one job's events to one reader: bounded in number, in life, and in patience with who reads nothing.

The stream ends after the job's last event; where it ends earlier, because its time is over or the
process is asked to end, its reader connects again with the number of the last event it has.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.live.job_watcher import Portion, Waiter
from api.live.sse_format import MEDIA_TYPE, SIGN_OF_LIFE, come_again, encode
from api.problem_details import Refusal
from jobs.errors import LedgerUnavailable
from jobs.repository.events import History

TRANSPORT = "kronoscope_transport"
"""Under this name the server leaves the connection in the request's state."""
_RETRY_MILLISECONDS = 2_000
_RETRY_SECONDS = 10
_PATIENCE_SECONDS = 1.0
_CUT_SECONDS = 1.0

_log = logging.getLogger("kronoscope.api.streams")


class Streams:
    """Streams under way in this process, against their caps."""

    def __init__(self, most: int, most_per_key: int) -> None:
        self._most = most
        self._most_per_key = most_per_key
        self._under_way: Counter[str | None] = Counter()

    @property
    def under_way(self) -> int:
        """How many there are now."""
        return self._under_way.total()

    @contextlib.contextmanager
    def place(self, key: str | None) -> Iterator[None]:
        """A place for one stream while the context lasts.

        Raises:
            Refusal: 429 where the key has as many as it may, 503 where all places are taken.
        """
        if key is not None and self._under_way[key] >= self._most_per_key:
            raise _full(
                429, "too-many-streams", f"this key has {self._most_per_key} streams of events open; end one of them"
            )
        if self._under_way.total() >= self._most:
            raise _full(503, "streams-full", f"all {self._most} streams of events are taken; try again in a moment")
        self._under_way[key] += 1
        try:
            yield
        finally:
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]


def _full(status: int, kind: str, detail: str) -> Refusal:
    detail += ", or ask with `Accept: application/json`, or `GET /v1/jobs/{job_id}?wait=30`"
    headers = {"retry-after": str(_RETRY_SECONDS)}
    return Refusal(status, kind, "Too many streams of events", detail, headers=headers)


class EventStream(Response):
    """The answer that goes on until the job has ended."""

    def __init__(
        self,
        first: History,
        read: Callable[[int], History | None],
        waiting: Callable[[], contextlib.AbstractContextManager[Waiter]],
        place: Callable[[], contextlib.AbstractContextManager[None]],
        stopping: Callable[[], bool],
        *,
        life_seconds: float,
        write_seconds: float,
        idle_seconds: float,
    ) -> None:
        """Get ready; nothing is counted or sent before the answer is called.

        Args:
            first: What was read already.
            read: Reads the table from a number on; None where the job is gone.
            waiting: Where news of the job arrive.
            place: Takes a place among the streams, or refuses.
            stopping: Whether the process is asked to end.
            life_seconds: When the stream ends though its job has not.
            write_seconds: How long to wait for a reader that takes nothing.
            idle_seconds: Between two signs of life.
        """
        super().__init__(
            media_type=MEDIA_TYPE,
            headers={
                "cache-control": "no-store",
                "x-accel-buffering": "no",  # nginx would keep events back until its buffer is full
            },
        )
        del self.headers["content-length"]
        self._first, self._read, self._waiting, self._place, self._stopping = first, read, waiting, place, stopping
        self._life_seconds, self._write_seconds, self._idle_seconds = life_seconds, write_seconds, idle_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the job has ended, the stream's time is over, or nobody reads."""
        with self._place(), self._waiting() as waiter:
            left = asyncio.ensure_future(_left(receive))
            left.add_done_callback(lambda _: waiter.bell.set())
            try:
                await self._send_all(scope, send, waiter, left)
            finally:
                left.cancel()
                await asyncio.gather(left, return_exceptions=True)

    async def _send_all(self, scope: Scope, send: Send, waiter: Waiter, left: asyncio.Future[None]) -> None:
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for text in self._texts(waiter, left):
                await self._send(send, {"type": "http.response.body", "body": text, "more_body": True})
            if not left.done():
                await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            _log.info("a stream's reader took nothing for %g s; its connection is cut", self._write_seconds)
            transport = scope.get("state", {}).get(TRANSPORT)
            if transport is not None:
                transport.abort()
                await asyncio.wait([left], timeout=_CUT_SECONDS)

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        async with asyncio.timeout(self._write_seconds):
            await send(message)

    async def _texts(self, waiter: Waiter, left: asyncio.Future[None]) -> AsyncIterator[bytes]:
        until = time.monotonic() + self._life_seconds
        portion = _portion(self._first)
        yield come_again(_RETRY_MILLISECONDS) + portion.text
        while not portion.ended:
            now = time.monotonic()
            if left.done():
                return
            if now >= until or self._stopping():
                # not all at once: whoever was cut off together comes back one after the other
                yield come_again(random.randint(_RETRY_MILLISECONDS // 4, _RETRY_MILLISECONDS * 2))  # noqa: S311
                return
            fresh = waiter.since(portion.through)
            if fresh is None:
                fresh = await self._from_table(portion.through)
            if fresh is not None and (fresh.through > portion.through or fresh.ended):
                portion = fresh
                if portion.text:
                    yield portion.text
                continue
            seconds = self._idle_seconds if fresh is not None else _PATIENCE_SECONDS
            if not await waiter.news(min(seconds, until - now)):
                yield SIGN_OF_LIFE

    async def _from_table(self, position: int) -> Portion | None:
        """What the table has above ``position``; None where the database does not answer."""
        try:
            history = await run_in_threadpool(self._read, position)
        except LedgerUnavailable:
            return None
        if history is None:
            return Portion(text=b"", through=position, ended=True)
        return _portion(history)


def _portion(history: History) -> Portion:
    text = b"".join(encode(event) for event in history.events)
    return Portion(text=text, through=history.through, ended=history.ended)


async def _left(receive: Receive) -> None:
    """Return when the reader has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
