"""HEAD on every route that takes GET: the same status and header, and nothing of the body is made or sent."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """The middleware that has a HEAD answered as GET, and ends the answer after its header."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
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
