"""The OpenAPI document beyond what FastAPI derives: the body's schema, examples, every error.

The job document's schema comes from ``catalog.DOCUMENT``; it is attached here, since the route reads raw bytes.
Errors are one schema, listed at each route with the statuses that it can answer.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import TypeAdapter

from api.problem_details import MEDIA_TYPE, Fault, ProblemDocument, invalid_parameters
from api.requests.auth import is_open, is_scraper_only
from api.requests.examples import EXAMPLES
from api.stored_records import describe_stored_values, stored_template
from catalog import DOCUMENT
from catalog.field_errors import suggestion
from catalog.requests.job import Annotations, JobDocument
from catalog.requests.uploads import UploadDocument
from catalog.webhooks import WebhookRequest

_SCHEMAS = "#/components/schemas/"
_TEMPLATE = _SCHEMAS + "{model}"
_MAKING = threading.Lock()

_PATH_PARAMETERS = {
    "job_id": "The job's id.",
    "estimate_id": "The estimate's id.",
    "upload_id": "The upload's id.",
    "kind": "The analysis, as in the menu.",
    "name": "The name, as the list gives it; it may hold slashes.",
    "format": "The tool that reads the file.",
    "webhook_id": "The webhook's id.",
}

_ERRORS = {
    400: "The request cannot be read",
    401: "An API key is missing, mistyped, revoked or expired",
    403: "The key lacks the scope",
    404: "Not found, or it belongs to another tenant",
    405: "The address does not take this method",
    408: "The body did not arrive in time",
    409: "The job's state does not allow it",
    411: "The body has no Content-Length",
    412: "The job is no longer the version that `If-Match` names",
    413: "The body is too large",
    415: "The body is not JSON, or is compressed",
    416: "The range is outside the file",
    422: "A field or parameter is not accepted; `errors` names each",
    429: "The key, the address (without a valid key) or the tenant asks too often or too much; see Retry-After",
    500: "The service failed; its operator finds the request by `instance`",
    503: "A part of the service does not answer, or has no room; see Retry-After",
    507: "The disk of the service is full",
}
_SCRAPER = {
    "type": "http",
    "scheme": "bearer",
    "description": "`Authorization: Bearer TOKEN`, where TOKEN is the operator's `KRONOSCOPE_METRICS_TOKEN`.",
}
_TAGS = {
    "jobs": "Submit, read, list, reschedule, cancel and delete jobs, and follow their events.",
    "results": "Summaries, rows of layers and the reproducibility log of a job.",
    "artifacts": "Files of a job.",
    "uploads": "Models and data that jobs name by an id.",
    "estimates": "Memory and seconds of a job that does not run.",
    "webhooks": "Addresses that hear of changes of jobs, and what came of each delivery.",
    "analyses": "The menu: every analysis with its options, metrics and summary.",
    "devices": "Devices of the workers.",
    "health": "Probes and metrics.",
}
_ALWAYS = (400, 401, 403, 405, 422, 429, 500, 503)


def error_responses(*statuses: int, key: bool = True) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of a route's own errors and of those of any route with a key, by status in order."""
    return {status: _entry(status) for status in sorted({*(_ALWAYS if key else ()), *statuses})}


def _entry(status: int) -> dict[str, Any]:
    schema = {"$ref": _SCHEMAS + "ProblemDocument"}
    return {"description": _ERRORS[status], "content": {MEDIA_TYPE: {"schema": schema}}}


def document_body() -> dict[str, Any]:
    """Return the OpenAPI entry of a request body that is a job document."""
    examples = {
        f"example_{number}": {"summary": each["title"], "value": each["document"]}
        for number, each in enumerate(EXAMPLES, start=1)
    }
    return record_body("JobDocument", "A job document: JSON of at most 256 KiB, not compressed.", examples)


def schedule_body() -> dict[str, Any]:
    """Return the OpenAPI entry of a request body that is a schedule."""
    examples = {
        "later": {"summary": "Until another moment", "value": {"deadline": "2099-12-01T12:00Z"}},
        "first": {"summary": "First of mine, and within four hours", "value": {"priority": 10, "within": "4h"}},
        "none": {"summary": "No deadline, and the usual priority", "value": {}},
    }
    said = "The whole schedule: what is left out is as in a document that gives none."
    return record_body("Schedule", said, examples)


def webhook_body() -> dict[str, Any]:
    """Return the OpenAPI entry of a request body that asks for a webhook."""
    examples = {"https": {"summary": "An address of yours", "value": {"url": "https://example.com/kronoscope"}}}
    return _body("The webhook.", TypeAdapter(WebhookRequest).json_schema(), examples)


def _body(description: str, schema: dict[str, Any], examples: dict[str, Any]) -> dict[str, Any]:
    content = {"schema": schema, **({"examples": examples} if examples else {})}
    return {"requestBody": {"required": True, "description": description, "content": {"application/json": content}}}


_UPLOAD = {"application/json": {"schema": {"$ref": _SCHEMAS + "UploadDocument"}}}
UPLOAD_BODY = {"requestBody": {"required": True, "content": _UPLOAD}}
"""The OpenAPI entry of a request body that declares an upload."""


def record_body(name: str, described: str, examples: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the OpenAPI entry of a request body that is a record of one schema."""
    return _body(described, {"$ref": _SCHEMAS + name}, examples or {})


def document_schema(ref_template: str = "#/$defs/{model}") -> dict[str, Any]:
    """Return the JSON schema of the job document, with a description of every field."""
    schema = TypeAdapter(DOCUMENT).json_schema(ref_template=ref_template)
    # the class with every analysis is made while the program runs: the texts stand in the source of its base
    base = TypeAdapter(JobDocument).json_schema()["properties"]
    for name, field in schema["properties"].items():
        described = base[name]["description"] if name in base else f"Options of the analysis `{name}`."
        field.setdefault("description", described)
    return schema


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document 3.1.0, which is made once and kept by ``app``; callers must not change it."""
    if app.openapi_schema:
        return app.openapi_schema
    # one at a time: it reads the sources of classes, which Python's parser cannot do in several threads at once
    with _MAKING:
        if not app.openapi_schema:
            app.openapi_schema = _make_document(app)
        return app.openapi_schema


def _make_document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        openapi_version="3.1.0",
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        servers=[{"url": "/", "description": "The service that this document is read from."}],
        tags=[{"name": name, "description": text} for name, text in _TAGS.items()],
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in (
        ("JobDocument", document_schema(_TEMPLATE)),
        ("UploadDocument", TypeAdapter(UploadDocument).json_schema(ref_template=_TEMPLATE)),
        ("Annotations", TypeAdapter(Annotations).json_schema(ref_template=_TEMPLATE)),
        ("ProblemDocument", TypeAdapter(ProblemDocument).json_schema(ref_template=_TEMPLATE)),
    ):
        schemas.update(schema.pop("$defs", {}))
        schemas[name] = schema
    describe_stored_values(schemas, document_schema(stored_template()))
    # FastAPI documents its own shape of 422, which no route here answers
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    document["security"] = [{"key": []}]
    _declare_other_security(app, document)
    for operations in document["paths"].values():
        for operation in operations.values():
            _drop_foreign_validation(operation)
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "path":
                    parameter.setdefault("description", _PATH_PARAMETERS[parameter["name"]])
    return document


def _declare_other_security(app: FastAPI, document: dict[str, Any]) -> None:
    """Declare the routes that need no key, and those that need another token, as such."""
    document["components"]["securitySchemes"]["scraper"] = _SCRAPER
    for route in iter_route_contexts(app.routes):
        operations = document["paths"].get(route.path_format, {})
        for method in route.methods or ():
            operation = operations.get(method.lower())
            if operation is not None and is_open(route.endpoint):
                operation["security"] = []
            elif operation is not None and is_scraper_only(route.endpoint):
                operation["security"] = [{"scraper": []}]


def _drop_foreign_validation(operation: dict[str, Any]) -> None:
    answer = operation.get("responses", {}).get("422", {})
    if "application/json" in answer.get("content", {}):
        operation["responses"]["422"] = _entry(422)


def check_parameters(request: Request) -> None:
    """Refuse query parameters that a route does not have in the OpenAPI document, or that are given twice.

    A parameter whose schema there is a list may be given several times.

    Probes and the page's files take any: load balancers and browsers add parameters of their own.

    Raises:
        Refusal: 422, with one fault for each such parameter.
    """
    if not request.query_params:
        return
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or not route.path.startswith("/v1/"):
        return
    operation = openapi_document(request.app)["paths"].get(route.path_format, {}).get(request.method.lower(), {})
    parameters = {each["name"]: each["schema"] for each in operation.get("parameters", ()) if each["in"] == "query"}
    faults = []
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in parameters:
            faults.append(_fault(name, "unknown_parameter", _unknown(name, sorted(parameters))))
        elif count > 1 and not _is_list(parameters[name]):
            faults.append(_fault(name, "repeated_parameter", f"is given {count} times, and takes one value; give one"))
    if faults:
        detail = f"`{faults[0].parameter}` {faults[0].message}"
        raise invalid_parameters(faults, detail)


def _fault(name: str, code: str, message: str) -> Fault:
    return Fault(pointer=None, parameter=name[:64], code=code, message=message)


def _is_list(schema: Mapping[str, Any]) -> bool:
    return any(each.get("type") == "array" for each in (schema, *schema.get("anyOf", ())))


def _unknown(name: str, known: list[str]) -> str:
    near = suggestion(name, known)
    there = f"there are {', '.join(known)}" if known else "it takes none"
    return f"is not a parameter of this address{near or f'; {there}'}"
