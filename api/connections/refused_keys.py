"""Refused keys: of each client address some requests a minute without a valid key are answered 401, others 429.

Only the refusal is limited. A key is verified whatever its address has sent before, since many clients may share one
address, and a guess must not keep their keys out.
"""

import math
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.connections.client_addresses import ClientAddresses
from api.problem_details import Refusal, problem_response
from api.requests.key_limits import RequestRate
from api.requests.middleware import LIMIT, request_id

REFUSED_KEYS = "too-many-refused-keys"
"""The kind of the problem."""
_MINUTE = 60.0


class RefusedKeysMiddleware:
    """The middleware that turns an answer 401 into 429 where the client has had its share of them."""

    def __init__(self, app: ASGIApp, *, addresses: ClientAddresses, per_minute: int) -> None:
        self.app = app
        self.addresses = addresses
        self.rate = RequestRate(per_minute / _MINUTE, burst_seconds=_MINUTE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        replaced = False

        async def send_limited(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start" and message["status"] == 401:
                seconds = self.rate.take(self.addresses.client_of(scope).encode(), time.monotonic())
                if seconds:
                    replaced = True
                    scope[LIMIT] = REFUSED_KEYS
                    await problem_response(_refusal(seconds), request_id(scope))(scope, receive, send)
            if not replaced:
                await send(message)

        await self.app(scope, receive, send_limited)


def _refusal(seconds: float) -> Refusal:
    return Refusal(
        429,
        REFUSED_KEYS,
        "Too many requests without a valid key",
        "many requests of your address had no valid key, and neither has this one; one with a valid key is answered",
        headers={"retry-after": str(math.ceil(seconds))},
    )
