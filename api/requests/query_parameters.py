"""The guard of query parameters: one that an address does not have is refused, as an unknown field of a document is.

An address has the parameters that the OpenAPI document lists.
"""

from fastapi import Request
from fastapi.routing import APIRoute

from api.problem_details import Fault, Refusal
from api.requests.openapi import openapi_document
from catalog.field_errors import suggestion

_MAX_FAULTS = 20


def refuse_unknown_parameters(request: Request) -> None:
    """Refuse a request to the API that names a query parameter which its route does not have.

    Probes and the page's files take any: load balancers and browsers add parameters of their own.

    Raises:
        Refusal: 422, with one fault for each unknown parameter.
    """
    if not request.query_params:
        return
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or not route.path.startswith("/v1/"):
        return
    operation = openapi_document(request.app)["paths"].get(route.path_format, {}).get(request.method.lower(), {})
    known = sorted(each["name"] for each in operation.get("parameters", ()) if each["in"] == "query")
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
    if not unknown:
        return
    faults = [
        Fault(pointer=None, parameter=name[:64], code="unknown_parameter", message=_message(name, known))
        for name in unknown[:_MAX_FAULTS]
    ]
    detail = f"`{unknown[0][:64]}` {faults[0].message}"
    raise Refusal(422, "invalid-parameter", "A parameter is not accepted", detail, errors=faults)


def _message(name: str, known: list[str]) -> str:
    near = suggestion(name, known)
    there = f"there are {', '.join(known)}" if known else "it takes none"
    return f"is not a parameter of this address{near or f'; {there}'}"
