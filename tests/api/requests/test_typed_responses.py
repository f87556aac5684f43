"""The schemas of responses: every object has fields, every field a description; stored rows are served as they are."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from api.main import create_app
from api.requests.response_bodies import layer_view
from api.settings import Settings
from catalog.responses.views import LayerListView
from jobs.records import LayerRow
from jobs.settings import LedgerSettings

_JSON_SCHEMA = "a JSON schema itself"
_CALLERS_OWN = "arguments of the caller's own function"
BARE = {
    "AnalysisView.options": _JSON_SCHEMA,
    "AnalysisView.metrics": _JSON_SCHEMA,
    "AnalysisView.summary": _JSON_SCHEMA,
    "MenuView.document": _JSON_SCHEMA,
    "StoredDataFactory.kwargs": _CALLERS_OWN,
    "StoredModelFactory.kwargs": _CALLERS_OWN,
}


@pytest.fixture(scope="module")
def contract() -> dict[str, Any]:
    ledger = LedgerSettings(database_url="sqlite://", artifact_root=Path("unused"))
    return dict(create_app(Settings(ledger=ledger, embedded=True)).openapi())


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"].rpartition("/")[2]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def answered(contract: dict[str, Any]) -> dict[str, Any]:
    """The schemas that some response refers to, directly or through others."""
    schemas = contract["components"]["schemas"]
    waiting = [
        name
        for operations in contract["paths"].values()
        for operation in operations.values()
        for name in references(operation["responses"])
    ]
    reached: dict[str, Any] = {}
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached[name] = schemas[name]
            waiting += references(schemas[name])
    return reached


def objects(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a schema, with the field that leads to it."""
    if isinstance(node, list):
        for each in node:
            yield from objects(each, path)
    elif isinstance(node, dict):
        if node.get("type") == "object":
            yield path, node
        for name, value in node.get("properties", {}).items():
            yield from objects(value, f"{path}.{name}")
        for word in ("anyOf", "oneOf", "allOf", "items", "prefixItems", "additionalProperties"):
            yield from objects(node.get(word), path)


def test_no_response_holds_an_object_without_fields(contract: dict[str, Any]) -> None:
    schemas = answered(contract)
    assert {"JobView", "StoredCapacityMetrics", "StoredLayerRecord", "StoredPlanRecord", "StoredManifest"} <= set(
        schemas
    )
    bare = {
        path
        for name, schema in schemas.items()
        for path, each in objects(schema, name)
        # a map whose values have a type is no bare object
        if not each.get("properties") and not isinstance(each.get("additionalProperties"), dict)
    }
    assert bare == set(BARE)


def test_every_field_of_a_response_is_described(contract: dict[str, Any]) -> None:
    missing = {
        f"{path}.{field}"
        for name, schema in answered(contract).items()
        for path, each in objects(schema, name)
        for field, value in each.get("properties", {}).items()
        if not value.get("description")
    }
    assert missing == set()


def test_stored_values_require_nothing_and_may_grow(contract: dict[str, Any]) -> None:
    stored = {name: schema for name, schema in answered(contract).items() if name.startswith("Stored")}
    for name, schema in stored.items():
        for path, each in objects(schema, name):
            assert "required" not in each, path
            assert not each.get("properties") or each["additionalProperties"] is True, path


def test_a_row_of_an_older_version_is_served_as_it_was_stored() -> None:
    metrics = {"trace": 1.5, "a_metric_of_old": {"value": 2}}
    record = {"branch": "a branch of old", "kappa_A": 3.0, "a_fact_of_old": "kept"}
    outcome = {"layer": "head", "metrics": metrics, "record": record}
    row = LayerRow(
        kind="capacity",
        ordinal=0,
        layer="head",
        attempt=1,
        fence=1,
        sha256="0" * 64,
        outcome=outcome,
        observed={"seconds": 1},
    )
    page = TypeAdapter(LayerListView)
    answer = page.dump_json(page.validate_python(LayerListView(items=(layer_view(row),), next=None)))
    (served,) = json.loads(answer)["items"]
    assert (served["metrics"], served["record"], served["observed"]) == (metrics, record, {"seconds": 1})
