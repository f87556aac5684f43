"""The protocol of one connection: uvicorn's HTTP/1.1 with deadlines, and with problems where it would answer text.

After an answer that came before the end of its request's body the connection closes. What is still under way is read
for a moment and up to the size of a body that would be accepted, since a client that is cut while it sends may never
see the answer.
"""

import asyncio
import logging
import sys
import uuid
from http import HTTPStatus
from typing import Any

import h11
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from api.connections.connection_table import ConnectionTable, Reason
from api.connections.strict_framing import MOST_HEADERS, StrictBuffer
from api.problem_details import Refusal, problem_response
from api.requests.middleware import SECURITY_HEADERS

_log = logging.getLogger("kronoscope.api.connections")

_DRAIN_SECONDS = 1.0
_RETRY_SECONDS = 5
_MALFORMED = {
    400: ("bad-request", "Bad request", "the request is not HTTP/1.1 as RFC 9112 defines it"),
    431: (
        "header-too-large",
        "Header too large",
        f"request line and header have more than 32 KiB or {MOST_HEADERS} lines; send less",
    ),
    501: ("not-implemented", "Not implemented", "the body's transfer coding is not served here; send it `chunked`"),
    505: ("http-version", "HTTP version not supported", "this is an HTTP/1.1 server; a proxy may speak HTTP/2 for it"),
}


class HttpProtocol(H11Protocol):
    """One connection of a client."""

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - as uvicorn passes them
        super().__init__(*arguments, **named)
        application = self.config.app
        assert isinstance(application, FastAPI)  # noqa: S101 - given by the program
        self._table: ConnectionTable = application.state.connections
        self.conn._receive_buffer = StrictBuffer(self._table.body_bytes)  # noqa: SLF001 - there is no door to it
        self._application = self.app
        self.app = self._serve
        self._waits_since: float | None = None
        self._stalled_since: float | None = None
        self._closing_since: float | None = None
        self._received = False
        self.peer = ""

    @property
    def waits_since(self) -> float | None:
        """Since when the client owes bytes of a request; None while its request is complete."""
        return self._waits_since

    def overdue(self, now: float) -> Reason | None:
        """Return the deadline that has passed.

        Args:
            now: The time of the event loop.

        Returns:
            The reason to end the connection; None where there is none.
        """
        if self.transport.is_closing():
            self._closing_since = self._closing_since or now
        stalled = self._stalled_since or self._closing_since
        if stalled is not None:
            return "reader" if now - stalled > self._table.write_seconds else None
        if self._waits_since is None:
            return None
        waited = now - self._waits_since
        if self.conn.their_state is h11.SEND_BODY:
            return "body" if waited > self._table.body_seconds else None
        # between two requests uvicorn's own timer closes it
        idle = self.timeout_keep_alive_task is not None
        return "headers" if not idle and waited > self._table.header_seconds else None

    def cut(self, reason: Reason) -> None:
        """End the connection, with an answer where a part of a request has come.

        Args:
            reason: The deadline that has passed, or the want of room.
        """
        if reason == "reader":
            _log.info("a reader took nothing for %g s; its connection is cut", self._table.write_seconds)
        if reason == "headers" and self._received:
            self._refuse(
                Refusal(
                    408,
                    "header-timeout",
                    "The request did not arrive",
                    f"the header was not complete after {self._table.header_seconds:g} s; send it without pauses",
                )
            )
        else:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Admit the connection, or refuse it."""
        super().connection_made(transport)
        self.peer = self.client[0] if self.client else ""
        self._waits_since = self.loop.time()
        if not self._table.admit(self):
            self._refuse(
                Refusal(
                    429,
                    "too-many-connections",
                    "Too many connections",
                    "all connections that the service has for you are being answered; try again in a moment",
                    headers={"retry-after": str(_RETRY_SECONDS)},
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._table.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, and note whether the request is complete by now."""
        self._received = True
        super().data_received(data)
        if self.conn.their_state is h11.IDLE or self.conn.their_state is h11.SEND_BODY:
            self._waits_since = self._waits_since or self.loop.time()
        else:
            self._waits_since = None

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._waits_since = self.loop.time()
        self._received = False
        super().on_response_complete()
        if self.conn.their_state is h11.DONE:  # the next one had come already
            self._waits_since = None

    def pause_writing(self) -> None:
        """Note since when the reader takes nothing."""
        self._stalled_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the reader goes on."""
        self._stalled_since = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - it is never repeated
        """Answer a request that cannot be parsed; after the answer to its header has begun there is none to give.

        Args:
            msg: The sentence of uvicorn.
        """
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        status = hint if hint in _MALFORMED else 400
        self._refuse(Refusal(status, *_MALFORMED[status]))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer outside of the application, and close; what the application still sends for a request is dropped."""
        cycle: RequestResponseCycle | None = self.cycle  # there is none before the first request
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(_encode(refusal, self.server_state.default_headers))
        self.transport.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] not in ("1.0", "1.1"):
            self._refuse(Refusal(505, *_MALFORMED[505]))
            return
        cycle = self.cycle

        async def send_and_close(message: Message) -> None:
            starts = message["type"] == "http.response.start"
            if starts and cycle.more_body:
                headers = [each for each in message.get("headers", ()) if each[0] != CLOSE_HEADER[0]]
                message = {**message, "headers": [*headers, CLOSE_HEADER]}
            if not starts and cycle.more_body and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await _drain(cycle, receive, self._table.body_bytes)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._application(scope, receive, send_and_close)


async def _drain(cycle: RequestResponseCycle, receive: Receive, most_bytes: int) -> None:
    """Read the rest of an unused body, but neither much of it nor for long."""
    left = most_bytes
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            while cycle.more_body and left > 0:
                message = await receive()
                if message["type"] != "http.request":
                    return
                left -= len(message["body"])
    except TimeoutError:
        return


def _encode(refusal: Refusal, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    identity = str(uuid.uuid4())
    response = problem_response(refusal, identity)
    response.headers.update({**SECURITY_HEADERS, "x-request-id": identity, "connection": "close"})
    lines = [f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in (*default_headers, *response.raw_headers)]
    return b"\r\n".join([*lines, b"", bytes(response.body)])
