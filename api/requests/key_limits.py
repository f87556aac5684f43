"""Limits of one key: so many requests a second, and so many that are worked on at a time.

The limits hold for the header `Authorization` as it was sent, before the key is looked up: a request beyond them takes
neither a thread nor a connection to the database, and a client without the key cannot use up its limits.
Requests without the header have no limit here; they are answered without the database. Probes have none with it either.
"""

import asyncio
import hashlib
import math
import time
from collections import OrderedDict

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.problem_details import Refusal, problem_response
from api.requests.middleware import LIMIT, request_id

_PROBES = ("/livez", "/readyz", "/metrics")
_SLOT = "kronoscope.slot"
_KNOWN_KEYS = 10_000
_BURST_SECONDS = 2
_WAITING_PER_SLOT = 32
_WAIT_SECONDS = 10.0


class RequestRate:
    """A token bucket for each key, which holds the requests of some seconds."""

    def __init__(self, per_second: float, burst_seconds: float = _BURST_SECONDS) -> None:
        """Begin with full buckets.

        Args:
            per_second: Requests of one key a second; 0 sets no limit.
            burst_seconds: The seconds of which a bucket holds the requests.
        """
        self.per_second = per_second
        self._most = per_second * burst_seconds
        self._buckets: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def take(self, key: bytes, now: float) -> float:
        """Take a token for one request.

        Args:
            now: Seconds of a monotonic clock.

        Returns:
            0 where there was one; else the seconds until there is.
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

    async def enter(self) -> "Slot | None":
        """Wait for a slot; None where too many wait, or none is free in time."""
        if self.requests >= self._most:
            return None
        self.requests += 1
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            self.requests -= 1
            return None
        except BaseException:
            self.requests -= 1
            raise
        return Slot(self)

    def leave(self) -> None:
        """Free a slot."""
        self.requests -= 1
        self._free.release()


class Slot:
    """The place of one request, left once."""

    def __init__(self, slots: Slots) -> None:
        self._slots: Slots | None = slots

    def release(self) -> None:
        """Leave the place, if it was not left before."""
        if self._slots is not None:
            self._slots.leave()
            self._slots = None


class KeyLimitsMiddleware:
    """The middleware that has the requests of one key wait for each other, or refuses them."""

    def __init__(self, app: ASGIApp, *, per_second: float, at_a_time: int) -> None:
        self.app = app
        self.rate = RequestRate(per_second)
        self.at_a_time = at_a_time
        self._slots: dict[bytes, Slots] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        header = Headers(scope=scope).get("authorization") if scope["type"] == "http" else None
        if header is None or scope["path"] in _PROBES:
            await self.app(scope, receive, send)
            return
        key = hashlib.sha256(header.encode("utf-8", "replace")).digest()
        seconds = self.rate.take(key, time.monotonic())
        if seconds:
            detail = (
                f"this key may ask {self.rate.per_second:g} times a second and asks more often; wait between requests, "
                "ask for news of a job with `wait`, or ask the operator of this service for more"
            )
            await _refuse("too-many-requests", detail, seconds)(scope, receive, send)
            return
        slots = self._slots.setdefault(key, Slots(self.at_a_time))
        try:
            slot = await slots.enter()
            if slot is None:
                detail = f"{self.at_a_time} requests of this key are being answered, and others wait; end some of them"
                await _refuse("too-many-at-a-time", detail, 1)(scope, receive, send)
                return
            scope[_SLOT] = slot
            try:
                await self.app(scope, receive, send)
            finally:
                slot.release()
        finally:
            if not slots.requests:
                self._slots.pop(key, None)


def release_slot(scope: Scope) -> None:
    """Let another request of the same key begin, as this one only waits from now on.

    Args:
        scope: Its ASGI scope.
    """
    slot = scope.get(_SLOT)
    if isinstance(slot, Slot):
        slot.release()


def _refuse(kind: str, detail: str, seconds: float) -> ASGIApp:
    headers = {"retry-after": str(math.ceil(seconds))}
    refusal = Refusal(429, kind, "Too many requests", detail, headers=headers)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope[LIMIT] = kind
        await problem_response(refusal, request_id(scope))(scope, receive, send)

    return answer
