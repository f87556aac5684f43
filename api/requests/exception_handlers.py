"""The handlers of exceptions, which turn each into a problem.

::

    Refusal                    as it is
    jobs.errors.LedgerError    as its class says; of one that we or the operator must mend the sentence is logged
    anything else              500 (by ``api.requests.middleware``); the traceback goes to the log alone
"""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.problem_details import Fault, Refusal, faults, invalid_parameter, invalid_parameters
from api.requests.middleware import refusal_response, request_id
from catalog.field_errors import complaints
from jobs.errors import (
    DocumentRefused,
    FatalError,
    IdempotencyConflict,
    LedgerError,
    ParameterRefused,
    TransientError,
)

_log = logging.getLogger("kronoscope.api")

_HTTP = {
    400: ("bad-request", "Bad request", "the request cannot be read"),
    404: ("not-found", "Not found", "there is nothing at this address"),
    405: ("method-not-allowed", "Method not allowed", "this address does not take this method; see the header Allow"),
    413: ("body-too-large", "Body too large", "the body is larger than this address takes"),
}


def _of_ledger(error: LedgerError) -> Refusal:
    if isinstance(error, ParameterRefused):
        return invalid_parameter(error.parameter, str(error))
    errors: tuple[Fault, ...] = ()
    if isinstance(error, DocumentRefused):
        errors = faults(error.complaints)
    elif isinstance(error, IdempotencyConflict):
        errors = (Fault(pointer=None, parameter="Idempotency-Key", code="idempotency_conflict", message=str(error)),)
    headers = {} if error.retry_seconds is None else {"retry-after": str(error.retry_seconds)}
    return Refusal(error.status, error.kind, error.title, error.answer or str(error), errors=errors, headers=headers)


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
    """Return the refusal of parameters that FastAPI itself checks, with names and rules but no value.

    Bodies are none of these: no route declares one, and `api.requests.body` reads them.
    """
    said = complaints(({**each, "loc": each["loc"][1:]} for each in error.errors()), object)
    wrong = [
        Fault(pointer=None, parameter=each.pointer[1:].replace("/", "."), code=each.code, message=each.message)
        for each in said
    ]
    return invalid_parameters(wrong, "; ".join(f"`{each.parameter}` {each.message}" for each in wrong))


def install(app: FastAPI) -> None:
    """Install handlers that answer every exception with a problem."""

    async def refusal(request: Request, error: Exception) -> Response:
        if isinstance(error, (FatalError, TransientError)):
            _log.error("request %s: %s", request_id(request.scope), error, exc_info=error)
        refused = _of_ledger(error) if isinstance(error, LedgerError) else error
        assert isinstance(refused, Refusal)  # noqa: S101 - registered for these classes
        return refusal_response(refused, request.scope)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class
        status = error.status_code
        said = _HTTP.get(status, (f"http-{status}", "Refused", "the request was refused"))
        refusal = Refusal(status, *said, headers=error.headers)
        if refusal.status == 405:
            refusal.headers = {"allow": ", ".join(_methods(request))}  # Starlette's names those of one route
        return refusal_response(refusal, request.scope)

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this class
        return refusal_response(_of_validation(error), request.scope)

    app.add_exception_handler(Refusal, refusal)
    app.add_exception_handler(LedgerError, refusal)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, validation)
