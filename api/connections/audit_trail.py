"""The audit trail: one line of the log for each change, and for each request that was refused for its key.

Estimates are changes: each is a row that waits for a worker, takes a place of its tenant's and can be deleted.

Lines are of the logger ``kronoscope.audit`` and hold identifiers alone: the public part of a key that was verified,
the client's address (behind a trusted proxy the forwarded one), the template of the route, the job. Nothing that a
caller writes freely is in them: no body, no header, no path, no query.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import Message, Scope

from api.connections.client_addresses import ClientAddresses
from api.requests.limits import REFUSED_KEYS
from api.requests.middleware import LIMIT, request_id
from jobs.records import Caller
from jobs.schema.identifiers import is_id
from jobs.service_log import write_audit_line

_SECONDS = 60.0
_LINES = 5
_CLIENTS = 1000
_OTHERS = None
"""Stands for the clients that are not counted by themselves."""
_CHANGES: Mapping[tuple[str, str | None], str] = {
    ("POST", "/v1/jobs"): "submit",
    ("POST", "/v1/jobs/{job_id}:reproduce"): "reproduce",
    ("POST", "/v1/jobs/{job_id}:cancel"): "cancel",
    ("PUT", "/v1/jobs/{job_id}/schedule"): "reschedule",
    ("PATCH", "/v1/jobs/{job_id}"): "annotate",
    ("DELETE", "/v1/jobs/{job_id}"): "delete",
    ("POST", "/v1/jobs/{job_id}/exports/{format}"): "export",
    ("POST", "/v1/estimates"): "estimate",
    ("DELETE", "/v1/estimates/{estimate_id}"): "delete_estimate",
    ("POST", "/v1/uploads"): "create_upload",
    ("PUT", "/v1/uploads/{upload_id}/{name:path}"): "send_file",
    ("POST", "/v1/uploads/{upload_id}:complete"): "complete_upload",
    ("POST", "/v1/uploads/{upload_id}:import"): "import",
    ("DELETE", "/v1/uploads/{upload_id}"): "delete_upload",
    ("POST", "/v1/webhooks"): "create_webhook",
    ("POST", "/v1/webhooks/{webhook_id}:rotate"): "rotate_webhook",
    ("DELETE", "/v1/webhooks/{webhook_id}"): "delete_webhook",
}
_CREATES = ("submit", "reproduce", "import", "export", "estimate")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class AuditTrail:
    """The lines of one process; of requests without a valid key, of which a client can send any number, some together.

    ::

        the first five of a client address in a minute   a line each
        those after them                                 one line with their number, when the minute is over
        clients beyond the thousandth of a minute        one line with their number, for all of them together
    """

    def __init__(self, addresses: ClientAddresses) -> None:
        self._addresses = addresses
        self._requests: Counter[str | None] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def _take_line(self, client: str) -> bool:
        """Count a refused request by its client's address, and return whether it has a line of its own."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SECONDS, self.write)
        counted = client if client in self._requests or len(self._requests) < _CLIENTS else _OTHERS
        self._requests[counted] += 1
        return counted is not _OTHERS and self._requests[counted] <= _LINES

    def write(self) -> None:
        """Write the lines of the minute that are due at its end, and begin another one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        requests, self._requests = self._requests, Counter()
        for client, count in requests.items():
            together = count if client is _OTHERS else count - _LINES
            if together > 0:
                write_audit_line(action="request", outcome="unauthorised", key=None, client=client, requests=together)

    def record(self, scope: Scope, message: Message, _: float) -> None:
        """Write the line of a request when its answer begins."""
        status: int = message["status"]
        route: str | None = getattr(scope.get("route"), "path", None)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        action = _CHANGES.get((method, route))
        created = _created(message)
        client = self._addresses.client_of(scope)
        refused_key = status == 401 or scope.get(LIMIT) == REFUSED_KEYS
        outcome = "unauthorised" if refused_key else _outcome(action, status, created)
        if outcome is None or (refused_key and not self._take_line(client)):
            return
        caller: Caller | None = scope.get("state", {}).get("caller")
        write_audit_line(
            action=action or "request",
            outcome=outcome,
            status=status,
            key=None if caller is None else caller.key,
            tenant=None if caller is None else caller.tenant_id,
            client=client,
            method=method,
            route=route,
            job=created or _named(scope),
            request=request_id(scope),
        )


def _outcome(action: str | None, status: int, created: str | None) -> str | None:
    """Return the outcome of a request that belongs into the trail; None for others."""
    if status == 403:
        return "forbidden"
    if action is None:
        return None
    if action in _CREATES and created is not None:
        return "done"  # an answer that names the row has stored it, also one that says that it cannot be planned
    if status >= 500:
        return "failed"  # the change may have been stored or not
    # what was refused as it was written, or only validated, has changed nothing
    return "done" if status < 400 and action not in _CREATES else None


def _created(message: Message) -> str | None:
    """Return the id of the job or estimate that an answer says to be created."""
    made = Headers(raw=list(message.get("headers", []))).get("location", "").rpartition("/")[2]
    return made if is_id(made) else None


def _named(scope: Scope) -> str | None:
    """Return the id of the job or estimate of the path."""
    parameters = scope.get("path_params", {})
    named = parameters.get("job_id") or parameters.get("estimate_id") or ""
    return named if is_id(named) else None
