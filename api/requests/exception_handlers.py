"""The handlers of exceptions: one table from exceptions to problems.

::

    Refusal                    as it is
    jobs.errors.UsageError     4xx: the caller corrects the request
    jobs.errors.TransientError 503 with Retry-After
    jobs.errors.FatalError     500 or 503; its sentence goes to the log alone
    anything else              500 (by ``api.requests.middleware``); the traceback goes to the log alone
"""

import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.problem_details import Fault, Refusal, faults, internal_error, invalid_parameter, not_found, problem_response
from api.requests.middleware import LIMIT, request_id
from jobs.errors import (
    ArtifactDamaged,
    DocumentRefused,
    FatalError,
    IdempotencyConflict,
    IdempotencyKeyRefused,
    JobEnded,
    JobNotFound,
    JobStillActive,
    LedgerError,
    LedgerUnavailable,
    PageRefused,
    PieceRefused,
    QueueFull,
    QuotaExceeded,
    TransientError,
    UploadRefused,
)

_log = logging.getLogger("kronoscope.api")

_HTTP = {
    400: ("bad-request", "Bad request", "the request cannot be read"),
    404: ("not-found", "Not found", "there is nothing at this address"),
    405: ("method-not-allowed", "Method not allowed", "this address does not take this method; see the header Allow"),
    413: ("body-too-large", "Body too large", "the body is larger than this address takes"),
}
_RETRY_SECONDS = 5
_QUOTA_SECONDS = 300
_QUEUE_SECONDS = 60


def _document(error: DocumentRefused) -> Refusal:
    many = len(error.complaints)
    detail = f"the job document has {many} fault{'' if many == 1 else 's'}; nothing was stored"
    status = 413 if any(each.code == "body_too_large" for each in error.complaints) else 422
    return Refusal(
        status, "invalid-document", "The job document is not accepted", detail, errors=faults(error.complaints)
    )


def _conflict(error: IdempotencyConflict) -> Refusal:
    fault = Fault(pointer=None, parameter="Idempotency-Key", code="idempotency_conflict", message=str(error))
    return Refusal(422, "idempotency-conflict", "Idempotency key used before", str(error), errors=[fault])


def _unavailable(error: Exception) -> Refusal:
    return Refusal(
        503,
        "unavailable",
        "The service cannot answer now",
        str(error) if isinstance(error, LedgerUnavailable) else "a part of the service does not answer; try again",
        headers={"retry-after": str(_RETRY_SECONDS)},
    )


def _over_quota(error: QuotaExceeded) -> Refusal:
    # deleting jobs frees bytes at once, but that is the caller's to do
    headers = {"retry-after": str(_QUOTA_SECONDS)}
    return Refusal(429, "quota-exceeded", "No bytes are left", str(error), headers=headers)


def _queue_full(error: QueueFull) -> Refusal:
    headers = {"retry-after": str(_QUEUE_SECONDS)}
    return Refusal(429, "queue-full", "Too many jobs wait", str(error), headers=headers)


def _upload(error: UploadRefused) -> Refusal:
    return Refusal(
        422 if error.code in ("digest", "claim") else 409, f"upload-{error.code}", "Upload not accepted", str(error)
    )


def _damaged(_: ArtifactDamaged) -> Refusal:
    return Refusal(
        500, "artifact-damaged", "The file is damaged", "the stored file is not what was recorded, so it is not served"
    )


_LEDGER: tuple[tuple[type[LedgerError], Callable[[Any], Refusal]], ...] = (
    (DocumentRefused, _document),
    (IdempotencyConflict, _conflict),
    (IdempotencyKeyRefused, lambda error: invalid_parameter("Idempotency-Key", str(error))),
    (JobNotFound, lambda _: not_found("there is no such job")),
    (JobEnded, lambda error: Refusal(409, "job-ended", "The job has ended", str(error))),
    (JobStillActive, lambda error: Refusal(409, "job-still-active", "The job has not ended", str(error))),
    (PieceRefused, lambda error: Refusal(409, "piece-of-a-job", "The job is a piece of another", str(error))),
    (PageRefused, lambda error: invalid_parameter(error.parameter, str(error))),
    (QuotaExceeded, _over_quota),
    (QueueFull, _queue_full),
    (UploadRefused, _upload),
    (TransientError, _unavailable),
    (ArtifactDamaged, _damaged),
)


def _of_ledger(error: LedgerError) -> Refusal:
    for kind, build in _LEDGER:
        if isinstance(error, kind):
            return build(error)
    return internal_error()


def _of_http(error: HTTPException) -> Refusal:
    kind, title, detail = _HTTP.get(
        error.status_code, (f"http-{error.status_code}", "Refused", "the request was refused")
    )
    return Refusal(error.status_code, kind, title, detail, headers=error.headers)


def _methods(request: Request) -> list[str]:
    """Return the methods that the request's address takes, over all of its routes."""
    methods: set[str] = set()
    for route in iter_route_contexts(request.app.routes):
        matched = route.path_regex.match(request.scope["path"])
        # no id holds a colon: what follows one is another address (`/v1/jobs/{job_id}:cancel`)
        if matched and not any(":" in value for name, value in matched.groupdict().items() if name.endswith("_id")):
            methods |= route.methods or set()
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


def _of_validation(error: RequestValidationError) -> Refusal:
    """Return the refusal of parameters that FastAPI itself checks, with names and rules but no value."""
    parameter_faults = []
    for each in error.errors()[:20]:
        place, name = str(each["loc"][0]), ".".join(str(step) for step in each["loc"][1:])
        in_body = place == "body"
        parameter_faults.append(
            Fault(
                pointer=f"/{name}" if in_body else None,
                parameter=None if in_body else name,
                code=str(each["type"]),
                message=str(each["msg"]),
            )
        )
    return Refusal(
        422,
        "invalid-parameter",
        "A parameter is not accepted",
        "correct the parameters that `errors` names",
        errors=parameter_faults,
    )


def install(app: FastAPI) -> None:
    """Install handlers that answer every exception with a problem.

    Args:
        app: The application, before it serves.
    """

    async def refusal(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)  # noqa: S101 - registered for this class
        if error.status == 429:
            request.scope[LIMIT] = error.kind
        return problem_response(error, request_id(request.scope))

    async def ledger(request: Request, error: Exception) -> Response:
        assert isinstance(error, LedgerError)  # noqa: S101 - registered for this class
        if isinstance(error, (FatalError, TransientError)):
            _log.error("request %s: %s", request_id(request.scope), error, exc_info=error)
        refusal = _of_ledger(error)
        if refusal.status == 429:
            request.scope[LIMIT] = refusal.kind
        return problem_response(refusal, request_id(request.scope))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class
        refusal = _of_http(error)
        if refusal.status == 405:
            refusal.headers = {"allow": ", ".join(_methods(request))}  # Starlette's names those of one route
        return problem_response(refusal, request_id(request.scope))

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this class
        return problem_response(_of_validation(error), request_id(request.scope))

    app.add_exception_handler(Refusal, refusal)
    app.add_exception_handler(LedgerError, ledger)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, validation)
