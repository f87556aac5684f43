"""A stream of one job's events to one reader, whose connection the proxy cuts when it takes nothing for too long.

The stream ends after the job's last event; where it ends earlier, because its time is over or the
process is asked to end, its reader connects again with the number of the last event it has.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.live.job_watcher import EventBatch, Subscription, encode_event, read_in_time
from api.problem_details import Refusal
from api.requests.auth import KeyInUse
from api.requests.limits import limited, release_slot
from api.service import Service
from jobs.errors import LedgerUnavailable
from jobs.repository.events import History

MEDIA_TYPE = "text/event-stream"
_RETRY_MILLISECONDS = 2_000
_DATABASE_RETRY_SECONDS = 1.0
_LATER_SECONDS = 10


class EventStream(Response):
    """The response that goes on until the job has ended."""

    def __init__(
        self, service: Service, job_id: str, key: str | None, first: History, read: Callable[[int], History | None]
    ) -> None:
        """Prepare the response; nothing is counted or sent before it is called.

        Args:
            service: The running API, with its watcher, its caps on streams and its time limits.
            job_id: The job; the caller may read it.
            key: Prefix of the caller's API key; None in embedded mode.
            first: The events that were read already.
            read: Reads the events above a number from the ledger; returns None where the job was deleted.
        """
        super().__init__(
            media_type=MEDIA_TYPE,
            headers={
                "cache-control": "no-store",
                "x-accel-buffering": "no",  # nginx would keep events back until its buffer is full
            },
        )
        del self.headers["content-length"]
        self._service, self._job_id, self._key = service, job_id, key
        self._first, self._read = first, read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the job has ended, the stream's time is over, or the reader has gone."""
        release_slot(scope)
        streams = self._service.limits.streams
        if streams.is_used_up(self._key):
            raise _refusal(
                429, "too-many-streams", f"this key has {streams.most_per_key} streams of events open; end one of them"
            )
        if streams.open >= streams.most:
            raise _refusal(
                503, "streams-full", f"all {streams.most} streams of events are taken; try again in a moment"
            )
        with (
            streams.hold(self._key),
            self._service.job_watcher.subscribe(self._job_id, events=True) as subscription,
        ):
            disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
            disconnected.add_done_callback(lambda _: subscription.wakeup.set())
            try:
                await self._send_all(send, subscription, disconnected)
            finally:
                disconnected.cancel()
                await asyncio.gather(disconnected, return_exceptions=True)

    async def _send_all(self, send: Send, subscription: Subscription, disconnected: asyncio.Future[None]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for text in self._texts(subscription, disconnected):
            await send({"type": "http.response.body", "body": text, "more_body": True})
        if not disconnected.done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _texts(self, subscription: Subscription, disconnected: asyncio.Future[None]) -> AsyncIterator[bytes]:
        """Yield events and keepalives until the stream ends."""
        until = time.monotonic() + self._service.settings.stream_seconds
        batch = _batch(self._first)
        yield format_sse_event(retry=_RETRY_MILLISECONDS) + batch.text
        while not batch.ended:
            now = time.monotonic()
            if disconnected.done():
                return
            if now >= until or self._service.stopping.is_set():
                # readers that were cut off together come back one after the other, not all at once
                pause = random.randint(_RETRY_MILLISECONDS // 4, _RETRY_MILLISECONDS * 2)  # noqa: S311
                yield format_sse_event(retry=pause)
                return
            newer = subscription.events_after(batch.through)
            if newer is None:
                newer = await self._read_after(batch.through)
            valid = await self._key_is_valid()
            if valid is False:
                return
            if valid and newer is not None and (newer.through > batch.through or newer.ended):
                batch = newer
                if batch.text:
                    yield batch.text
                continue
            answered = newer is not None and valid is not None
            seconds = self._service.settings.stream_idle_seconds if answered else _DATABASE_RETRY_SECONDS
            if not await subscription.wait(min(seconds, until - now)):
                yield KEEPALIVE_COMMENT

    async def _key_is_valid(self) -> bool | None:
        """Return whether the key may read on; None where the database does not answer, and no event is sent."""
        try:
            return await run_in_threadpool(KeyInUse(self._service, self._key).is_valid)
        except LedgerUnavailable:
            return None

    async def _read_after(self, position: int) -> EventBatch | None:
        """Read events above ``position`` from the ledger; None where the database does not answer."""
        try:
            history = await run_in_threadpool(read_in_time, self._read, position)
        except LedgerUnavailable:
            return None
        if history is None:
            return EventBatch(text=b"", through=position, ended=True)
        return _batch(history)


def _refusal(status: int, kind: str, detail: str) -> Refusal:
    detail += ", or ask with `Accept: application/json`, or `GET /v1/jobs/{job_id}?wait=30`"
    return limited(kind, "Too many streams of events", detail, _LATER_SECONDS, status=status)


def _batch(history: History) -> EventBatch:
    text = b"".join(encode_event(event) for event in history.events)
    return EventBatch(text=text, through=history.through, ended=history.ended)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
