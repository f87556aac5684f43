"""Limits of one process: one table of the caps on requests of a key, of a client's address, and of all together.

::

    requests     of a key a second, with bursts of two seconds         429 with the seconds until the next may come
    at_a_time    of a key that are worked on; 32 times as many wait    429
    refused      of a client a minute without a valid key              429 in place of 401
    long_polls   of a key, and of all                                  429; answered at once
    streams      of a key, and of all                                  429; 503

The first two hold for the header `Authorization` as it was sent, before the key is looked up: a request beyond them
takes neither a thread nor a connection to the database, and a client without the key cannot use up its limits.
Requests without the header have no limit here; they are answered without the database. Probes have none with it either.
Of refused keys only the refusal is limited. A key is verified whatever its address has sent before, since many clients
may share one address, and a guess must not keep their keys out.
"""

import asyncio
import contextlib
import hashlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from api.connections.client_addresses import ClientAddresses
from api.problem_details import Refusal
from api.requests.middleware import HttpMiddleware, refusal_response
from api.settings import Settings

REFUSED_KEYS = "too-many-refused-keys"
"""The kind of the problem."""
_PROBES = ("/livez", "/readyz", "/metrics")
_SLOT = "kronoscope.slot"
_KNOWN_KEYS = 10_000
_BURST_SECONDS = 2
_MINUTE = 60.0
_WAITING_PER_SLOT = 32
_WAIT_SECONDS = 10.0


class RequestRate:
    """A token bucket for each key, which holds the requests of some seconds."""

    def __init__(self, per_second: float, burst_seconds: float = _BURST_SECONDS) -> None:
        """Begin with full buckets of ``burst_seconds`` of one key's requests; 0 requests a second set no limit."""
        self.per_second = per_second
        self._most = per_second * burst_seconds
        self._buckets: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def take(self, key: bytes, now: float) -> float:
        """Take a token for one request: return 0 where there was one, else the seconds until there is.

        ``now`` is in seconds of a monotonic clock.
        """
        if not self.per_second:
            return 0.0
        tokens, at = self._buckets.pop(key, (self._most, now))
        tokens = min(self._most, tokens + (now - at) * self.per_second)
        missing = max(0.0, 1 - tokens)
        self._buckets[key] = (tokens if missing else tokens - 1, now)
        if len(self._buckets) > _KNOWN_KEYS:
            self._buckets.popitem(last=False)
        return missing / self.per_second


class Slots:
    """The requests of one key that are worked on, and those that wait for one of them to end."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._most = most * (1 + _WAITING_PER_SLOT)
        self.requests = 0

    async def enter(self) -> contextlib.ExitStack | None:
        """Wait for a slot, which is left with the stack; None where too many wait, or none is free in time."""
        if self.requests >= self._most:
            return None
        with contextlib.ExitStack() as stack:
            self.requests += 1
            stack.callback(self._leave)
            try:
                async with asyncio.timeout(_WAIT_SECONDS):
                    await self._free.acquire()
            except TimeoutError:
                return None
            stack.callback(self._free.release)
            return stack.pop_all()

    def _leave(self) -> None:
        self.requests -= 1


class Waiting:
    """The requests that only wait: so many at a time in this process, and so many of each key."""

    def __init__(self, most: int, most_per_key: int) -> None:
        self.most = most
        self.most_per_key = most_per_key
        self._open: Counter[str | None] = Counter()

    @property
    def open(self) -> int:
        """The number of those that wait now."""
        return self._open.total()

    def is_used_up(self, key: str | None) -> bool:
        """Return whether a key has as many as it may; requests without a key, in embedded mode, have no share."""
        return key is not None and self._open[key] >= self.most_per_key

    @contextlib.contextmanager
    def hold(self, key: str | None) -> Iterator[None]:
        """Count one request while the context lasts."""
        self._open[key] += 1
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]


class Limits:
    """The table of one process; caps on waiting requests leave connections for others, all from one address or not."""

    def __init__(self, settings: Settings) -> None:
        self.requests = RequestRate(settings.requests_per_second)
        self.at_a_time = settings.requests_per_key
        self.connections = settings.connections
        self.refused = RequestRate(settings.refused_per_minute / _MINUTE, burst_seconds=_MINUTE)
        self.long_polls = Waiting(min(settings.long_polls, settings.connections // 4), settings.long_polls_per_key)
        self.streams = Waiting(min(settings.streams, settings.connections // 2), settings.streams_per_key)


class KeyLimitsMiddleware(HttpMiddleware):
    """The middleware that has the requests of one key wait for each other, or refuses them."""

    def __init__(self, app: ASGIApp, *, limits: Limits) -> None:
        super().__init__(app)
        self.limits = limits
        self._slots: dict[bytes, Slots] = {}

    @override
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _PROBES:
            await self.app(scope, receive, send)
            return
        if len(scope["app"].state.connections) > self.limits.connections:
            detail = f"{self.limits.connections} connections are open, and no more are served; try again in a moment"
            headers = {"retry-after": "1", "connection": "close"}
            refusal = Refusal(503, "too-many-connections", "Too many connections", detail, headers=headers)
            await refusal_response(refusal, scope)(scope, receive, send)
            return
        header = Headers(scope=scope).get("authorization")
        if header is None:
            await self.app(scope, receive, send)
            return
        key = hashlib.sha256(header.encode("utf-8", "replace")).digest()
        rate, most = self.limits.requests, self.limits.at_a_time
        seconds = rate.take(key, time.monotonic())
        if seconds:
            detail = (
                f"this key may ask {rate.per_second:g} times a second and asks more often; wait between requests, "
                "ask for news of a job with `wait`, or ask the operator of this service for more"
            )
            refusal = limited("too-many-requests", "Too many requests", detail, seconds)
            await refusal_response(refusal, scope)(scope, receive, send)
            return
        slots = self._slots.setdefault(key, Slots(most))
        try:
            slot = await slots.enter()
            if slot is None:
                detail = f"{most} requests of this key are being answered, and others wait; end some of them"
                refusal = limited("too-many-at-a-time", "Too many requests", detail, 1)
                await refusal_response(refusal, scope)(scope, receive, send)
                return
            scope[_SLOT] = slot
            with slot:
                await self.app(scope, receive, send)
        finally:
            if not slots.requests:
                self._slots.pop(key, None)


class RefusedKeysMiddleware(HttpMiddleware):
    """The middleware that turns an answer 401 into 429 where the client has had its share of them."""

    def __init__(self, app: ASGIApp, *, addresses: ClientAddresses, limits: Limits) -> None:
        super().__init__(app)
        self.addresses = addresses
        self.limits = limits

    @override
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        replaced = False

        async def send_limited(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start" and message["status"] == 401:
                seconds = self.limits.refused.take(self.addresses.client_of(scope).encode(), time.monotonic())
                if seconds:
                    replaced = True
                    title = "Too many requests without a valid key"
                    detail = (
                        "many requests of your address had no valid key, and neither has this one; one with a valid "
                        "key is answered"
                    )
                    refusal = limited(REFUSED_KEYS, title, detail, seconds)
                    await refusal_response(refusal, scope)(scope, receive, send)
            if not replaced:
                await send(message)

        await self.app(scope, receive, send_limited)


def release_slot(scope: Scope) -> None:
    """Let another request of the same key begin, as this one only waits from now on."""
    slot = scope.get(_SLOT)
    if isinstance(slot, contextlib.ExitStack):
        slot.close()


def limited(kind: str, title: str, detail: str, seconds: float, *, status: int = 429) -> Refusal:
    """Return the refusal of a request beyond a limit, which may be asked again after so many seconds."""
    return Refusal(status, kind, title, detail, headers={"retry-after": str(math.ceil(seconds))})
