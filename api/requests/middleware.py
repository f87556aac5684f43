"""The middleware around every route: an id for the request, the Host check of embedded mode, security headers.

An exception that no handler takes is answered here too, with a problem like all others; its traceback goes to the log
with the request's id.

Embedded mode asks for no key, so a web page elsewhere must not be able to act through the
visitor's browser: the Host must be a loopback name (DNS rebinding) and an Origin must be our own.
"""

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars
from typing_extensions import override

from api.problem_details import Refusal, internal_error, problem_response
from catalog.public_address import is_loopback
from jobs.schema.query_limits import limit_queries

_log = logging.getLogger("kronoscope.api")

_ID = "kronoscope.request_id"
LIMIT = "kronoscope.limit"
"""The key under which a request's scope names the limit that refused it: the kind of its problem."""
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

_SINGLE = (
    "authorization", "content-type", "content-encoding", "content-range", "idempotency-key", "last-event-id", "range",
    "if-range",
)  # fmt: skip
"""Headers that may be sent once."""
_MOST_HEADERS = 101
"""A hundred of the client's, and the one that the proxy adds."""


def request_id(scope: Scope) -> str:
    """Return the id of a request, a UUID; the zero UUID outside of `SecurityMiddleware`."""
    return str(scope.get(_ID, uuid.UUID(int=0)))


def refusal_response(refusal: Refusal, scope: Scope) -> Response:
    """Return the answer to a request that is refused; the scope names the limit that refused it, where one did."""
    if refusal.status == 429:
        scope[LIMIT] = refusal.kind
    return problem_response(refusal, request_id(scope))


class HttpMiddleware:
    """A middleware of requests; what else a server sends, as it starts and ends, passes by."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        await (self.serve if scope["type"] == "http" else self.app)(scope, receive, send)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self.app(scope, receive, send)


class AnswersMiddleware(HttpMiddleware):
    """The middleware around all others, which has every answer noted as it begins: whatever refused it."""

    def __init__(self, app: ASGIApp, *, notes: Sequence[Callable[[Scope, Message, float], None]]) -> None:
        """Take functions of a request's scope, the beginning of its answer, and the seconds until then."""
        super().__init__(app)
        self.notes = notes

    @override
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                for note in self.notes:
                    note(scope, message, time.perf_counter() - began)
            await send(message)

        await self.app(scope, receive, send_noted)


class SecurityMiddleware(HttpMiddleware):
    """The outermost middleware but one: only `AnswersMiddleware` is around it."""

    def __init__(self, app: ASGIApp, *, embedded: bool, database_seconds: float) -> None:
        super().__init__(app)
        self.embedded = embedded
        self.database_seconds = database_seconds

    @override
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        identity = str(uuid.uuid4())
        scope[_ID] = identity

        begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers["x-request-id"] = identity
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                if "cache-control" not in headers:
                    headers["cache-control"] = "no-store"
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal_response(refusal, scope)(scope, receive, send_with_headers)
            return
        # the id stands in every line that is logged for it; the limit holds for all of its queries together
        with bound_contextvars(request=identity), limit_queries(self.database_seconds):
            try:
                await self.app(scope, receive, send_with_headers)
            except Exception:
                if begun:
                    raise  # too late for another answer: the server ends the connection
                _log.exception("request %s failed", identity)
                await refusal_response(internal_error(), scope)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Refusal | None:
        malformed = _malformed(scope)
        if malformed is not None or not self.embedded:
            return malformed
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not is_loopback(_name(host)):
            return Refusal(
                421,
                "foreign-host",
                "Not this host",
                "embedded mode answers to a loopback name only; open it as http://127.0.0.1 with its port",
            )
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope['scheme']}://{host}":
            return Refusal(
                403, "foreign-origin", "Foreign origin", "embedded mode takes requests from its own page and from tools"
            )
        return None


def _malformed(scope: Scope) -> Refusal | None:
    controls = any(code < 0x20 or code == 0x7F for code in scope["path"].encode("utf-8", "replace"))
    if controls or b"%00" in scope["query_string"]:
        return Refusal(400, "bad-request", "Bad request", "the address holds control characters; leave them out")
    if len(scope["headers"]) > _MOST_HEADERS:
        return Refusal(431, "header-too-large", "Header too large", "the header has more than 100 lines; send less")
    headers = Headers(scope=scope)
    if "content-length" in headers and "transfer-encoding" in headers:
        # RFC 9112, section 6.1: a proxy may have read the other one, so nothing after it is a request
        message = "the body has both Content-Length and Transfer-Encoding; send one of them"
        return Refusal(400, "bad-request", "Bad request", message, headers={"connection": "close"})
    repeated = next((name for name in _SINGLE if len(headers.getlist(name)) > 1), None)
    if repeated is not None:
        # a proxy may have looked at the other one
        return Refusal(400, "bad-request", "Bad request", f"the header `{repeated}` is sent twice; send it once")
    return None


def _name(host: str) -> str:
    """Return the host without its port; an IPv6 address is in brackets, and nothing but a port follows it."""
    return re.sub(r":\d{0,5}\Z", "", host)


class HeadMiddleware(HttpMiddleware):
    """The middleware that has a HEAD answered as GET on every route, and ends the answer after its header."""

    @override
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        answered = False

        async def receive_until_answered() -> Message:
            # a stream that would go on sees that its reader has gone
            return {"type": "http.disconnect"} if answered else await receive()

        async def send_header(message: Message) -> None:
            nonlocal answered
            if message["type"] != "http.response.start" or answered:
                return
            answered = True
            scope["method"] = "HEAD"  # for the server, and for who counts requests by their method
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        scope["method"] = "GET"
        await self.app(scope, receive_until_answered, send_header)
