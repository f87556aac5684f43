"""Forwarded clients: the cap on simultaneous requests of each client behind a trusted proxy."""

from collections import Counter
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.connections.connection_table import ConnectionTable, Reason
from api.problem_details import Refusal, problem_response
from api.requests.middleware import request_id

_RETRY_SECONDS = 5
_HEADER = "x-forwarded-for"


class ForwardedClientsMiddleware:
    """Count the requests under way by the address that a trusted proxy names."""

    def __init__(self, app: ASGIApp, *, table: ConnectionTable, most: int, count: Callable[[Reason], None]) -> None:
        self.app = app
        self.table = table
        self.most = most
        self.count = count
        self._requests: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        client = self._client(scope) if scope["type"] == "http" else None
        if client is None:
            await self.app(scope, receive, send)
            return
        if self._requests[client] >= self.most:
            self.count("refused")
            refusal = Refusal(
                429,
                "too-many-connections",
                "Too many requests at a time",
                f"{self.most} requests of your address are being answered; try again in a moment",
                headers={"retry-after": str(_RETRY_SECONDS)},
            )
            await problem_response(refusal, request_id(scope))(scope, receive, send)
            return
        self._requests[client] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._requests[client] -= 1
            if not self._requests[client]:
                del self._requests[client]

    def _client(self, scope: Scope) -> str | None:
        peer = (scope.get("client") or ("",))[0]
        forwarded = Headers(scope=scope).getlist(_HEADER)
        return self.table.addresses.forwarded_client(peer, ",".join(forwarded)) if forwarded else None
