"""The menu of analyses over HTTP, with the schemas of their options, metrics and summaries."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from fastapi import APIRouter
from pydantic import TypeAdapter

from api.problem_details import not_found
from api.requests.auth import Reader
from api.requests.examples import EXAMPLES
from api.requests.openapi import error_responses
from catalog import ANALYSES, DOCUMENT
from catalog.record import record

router = APIRouter(prefix="/v1/analyses", tags=["analyses"])


@record
class AnalysisView:
    """One entry of the menu."""

    kind: str
    """Name of the analysis, as `kind` of a document takes it."""
    title: str
    """A short title."""
    description: str
    """What it measures."""
    options: Mapping[str, Any] | None
    """JSON schema of the block named after the kind; null where there are no options."""
    metrics: Mapping[str, Any]
    """JSON schema of the metrics of one layer."""
    summary: Mapping[str, Any]
    """JSON schema of the summary of the whole job."""


@record
class Example:
    """An example of a job document."""

    title: str
    """What the example does."""
    document: Mapping[str, Any]
    """A job document that can be submitted as it is."""


@record
class MenuView:
    """All analyses, the schema of the job document, and examples."""

    items: tuple[AnalysisView, ...]
    """The analyses."""
    document: Mapping[str, Any]
    """JSON schema of the job document."""
    examples: tuple[Example, ...]
    """Job documents to begin with."""


def _schema(record_type: type) -> Mapping[str, Any]:
    return TypeAdapter(record_type).json_schema()


@cache
def _menu() -> MenuView:
    items = tuple(
        AnalysisView(
            kind=each.kind,
            title=each.title,
            description=each.description,
            options=None if each.params is None else _schema(each.params),
            metrics=_schema(each.metrics),
            summary=_schema(each.summary),
        )
        for each in ANALYSES.values()
    )
    examples = tuple(Example(**example) for example in EXAMPLES)
    return MenuView(items=items, document=_schema(DOCUMENT), examples=examples)


@router.get("", operation_id="list_analyses", summary="The menu", responses=error_responses())
def list_all(_: Reader) -> MenuView:
    """Every analysis, the schema of the job document, and examples of it."""
    return _menu()


@router.get("/{kind}", operation_id="read_analysis", summary="One analysis", responses=error_responses(404))
def read(kind: str, _: Reader) -> AnalysisView:
    """One entry of the menu, with the schemas of its options and results."""
    for item in _menu().items:
        if item.kind == kind:
            return item
    raise not_found(f"there is no analysis of this name; there are {', '.join(ANALYSES)}")
