"""The audit trail: one line of the log for each change, and for each request that was refused for its key.

Lines are of the logger ``kronoscope.audit`` and hold identifiers alone: the public part of a key that was verified,
the client's address (behind a trusted proxy the forwarded one), the template of the route, the job. Nothing that a
caller writes freely is in them: no body, no header, no path, no query.
"""

import logging
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.connections.connection_table import ConnectionTable
from api.requests.middleware import request_id
from jobs.records import Caller
from jobs.schema.identifiers import is_id

_NAME = "kronoscope.audit"
_log = logging.getLogger(_NAME)

_CHANGES: Mapping[tuple[str, str | None], str] = {
    ("POST", "/v1/jobs"): "submit",
    ("POST", "/v1/jobs/{job_id}:cancel"): "cancel",
    ("PUT", "/v1/jobs/{job_id}/schedule"): "reschedule",
    ("DELETE", "/v1/jobs/{job_id}"): "delete",
}
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_REFUSED = {401: "unauthorised", 403: "forbidden"}
_FORWARDED = "x-forwarded-for"


class AuditMiddleware:
    """Write the line of a request when its answer begins; around all that may refuse it."""

    def __init__(self, app: ASGIApp, *, table: ConnectionTable) -> None:
        self.app = app
        self.table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._record(scope, message)
            await send(message)

        await self.app(scope, receive, send_recorded)

    def _record(self, scope: Scope, message: Message) -> None:
        status: int = message["status"]
        route: str | None = getattr(scope.get("route"), "path", None)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        action = _CHANGES.get((method, route))
        outcome = _outcome(action, status)
        if outcome is None:
            return
        caller: Caller | None = scope.get("state", {}).get("caller")
        # a logger's own `extra` becomes the fields of the line
        fields = {
            "logger": _NAME,
            "action": action or "request",
            "outcome": outcome,
            "status": status,
            "key": None if caller is None else caller.key,
            "tenant": None if caller is None else caller.tenant_id,
            "client": self._client(scope),
            "method": method,
            "route": route,
            "job": _job(scope, message),
            "request": request_id(scope),
        }
        _log.info("audit", extra=fields)

    def _client(self, scope: Scope) -> str:
        peer: str = (scope.get("client") or ("",))[0]
        forwarded = Headers(scope=scope).getlist(_FORWARDED)
        return (self.table.addresses.forwarded_client(peer, ",".join(forwarded)) if forwarded else None) or peer


def _outcome(action: str | None, status: int) -> str | None:
    """Return the outcome of a request that belongs into the trail; None for others."""
    if status in _REFUSED:
        return _REFUSED[status]
    if action is None or 400 <= status < 500 or (action, status) == ("submit", 200):
        return None  # read, refused as it was written, or only validated: nothing has changed
    # after an error of the service the change may have been stored or not
    return "done" if status < 400 else "failed"


def _job(scope: Scope, message: Message) -> str | None:
    """Return the id of the job: that of the path, or of the one that was created."""
    named = scope.get("path_params", {}).get("job_id")
    if named is None:
        named = Headers(raw=list(message.get("headers", []))).get("location", "").rpartition("/")[2]
    return named if is_id(named) else None
