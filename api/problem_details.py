"""A *problem*: the one format of every error, ``application/problem+json`` of RFC 9457.

``type`` is a name for machines, ``detail`` a sentence for people, ``errors`` points at fields.
``instance`` is the request's own id, which the operator finds in the log. The
request's own values are never repeated.
"""

import json
from collections.abc import Mapping, Sequence

from starlette.responses import Response

from catalog.field_errors import Complaint
from catalog.record import plain, record

MEDIA_TYPE = "application/problem+json"
PREFIX = "urn:kronoscope:problem:"


@record
class Fault:
    """One fault of a request."""

    pointer: str | None
    """JSON pointer (RFC 6901) into the body; null where a parameter or header is at fault."""
    parameter: str | None
    """Query parameter or header at fault."""
    code: str
    """Stable name of the fault."""
    message: str
    """What must hold, and what was got."""


@record
class ProblemDocument:
    """An error, as RFC 9457 describes it."""

    type: str
    """URI reference that identifies the kind of problem."""
    title: str
    """The kind of problem in words."""
    status: int
    """The HTTP status."""
    detail: str
    """What is wrong with this request."""
    instance: str
    """Id of the request, as in the header `X-Request-Id`."""
    errors: tuple[Fault, ...]
    """The fields that are not accepted."""


class Refusal(Exception):
    """A response that is a problem; raised anywhere below a route."""

    def __init__(
        self,
        status: int,
        kind: str,
        title: str,
        detail: str,
        *,
        errors: Sequence[Fault] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.title = title
        self.detail = detail
        self.errors = tuple(errors)
        self.headers = dict(headers or {})


def faults(complaints: Sequence[Complaint]) -> tuple[Fault, ...]:
    """Return the complaints about a document as faults, one for each, in their order."""
    return tuple(
        Fault(pointer=each.pointer, parameter=None, code=each.code, message=each.message) for each in complaints
    )


def invalid_parameter(parameter: str, message: str, *, code: str = "invalid_value") -> Refusal:
    """Return the refusal of a query parameter or header.

    Args:
        parameter: Its name.
        message: The rest of a sentence that begins with the name; the caller's value is not repeated.
        code: The kind of fault, for programs.

    Returns:
        A refusal with status 422.
    """
    fault = Fault(pointer=None, parameter=parameter, code=code, message=message)
    return invalid_parameters([fault], f"`{parameter}` {message}")


def invalid_parameters(errors: Sequence[Fault], detail: str) -> Refusal:
    """Return the refusal of query parameters or headers, of which it names the first twenty."""
    return Refusal(422, "invalid-parameter", "A parameter is not accepted", detail, errors=errors[:20])


def not_found(detail: str = "there is nothing at this address") -> Refusal:
    """Return the refusal, with status 404, of something that does not exist or belongs to another tenant.

    The sentence for the caller is the same in both cases.
    """
    return Refusal(404, "not-found", "Not found", detail)


def internal_error() -> Refusal:
    """Return the refusal for an unexpected error, with status 500."""
    return Refusal(
        500, "internal", "Internal error", "the service failed at this request; its operator finds it by the id below"
    )


def problem_response(refusal: Refusal, request_id: str) -> Response:
    """Return the HTTP response of a refusal, of type `application/problem+json`, which must not be stored.

    The id of the request, a UUID, becomes `instance`.
    """
    document = ProblemDocument(
        type=PREFIX + refusal.kind,
        title=refusal.title,
        status=refusal.status,
        detail=refusal.detail,
        instance=f"urn:uuid:{request_id}",
        errors=refusal.errors,
    )
    body = json.dumps(plain(document), ensure_ascii=False).encode("utf-8", "replace")
    headers = {"cache-control": "no-store", **refusal.headers}
    return Response(body, status_code=refusal.status, media_type=MEDIA_TYPE, headers=headers)
