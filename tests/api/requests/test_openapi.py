"""The contract itself: complete OpenAPI, problems everywhere, and no torch behind the door."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.main import create_app
from api.requests.examples import EXAMPLES
from api.settings import Settings
from catalog import ANALYSES
from jobs.codec import parse_document
from jobs.records import LOCAL_TENANT
from jobs.settings import LedgerSettings
from tests.api import seeding
from tests.api.conftest import Embedded
from tests.api.expect import problem
from tests.conftest import Databases


@pytest.fixture
def client(embedded: Embedded) -> Iterator[httpx.Client]:
    with embedded.server.client() as opened:
        yield opened


@pytest.fixture
def contract(client: httpx.Client) -> dict[str, Any]:
    answer = client.get("/openapi.json")
    assert answer.status_code == 200
    return dict(answer.json())


@pytest.mark.nightly(
    covered_by="tests/test_architecture.py::test_a_process_that_does_not_compute_imports_no_torch[api.main]"
)
def test_importing_the_api_leaves_torch_out() -> None:
    script = (
        "import sys, api.main, api.__main__\n"
        "heavy = {'torch', 'engine', 'worker', 'transformers', 'safetensors', 'numpy', 'sklearn'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each["title"])
def test_examples_are_sound(client: httpx.Client, example: dict[str, Any]) -> None:
    parse_document(json.dumps(example["document"]).encode())
    answer = client.post("/v1/jobs?validate_only=true", json=example["document"])
    assert answer.status_code == 200, answer.text


def without_descriptions(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            name: without_descriptions(each)
            for name, each in node.items()
            if not (name in ("description", "summary") and isinstance(each, str))
        }
    return [without_descriptions(each) for each in node] if isinstance(node, list) else node


def test_the_contract_is_the_stored_one_but_for_its_descriptions(contract: dict[str, Any]) -> None:
    """A change that is meant is stored anew by ``json.dumps(…, sort_keys=True, indent=0)``, one value a line."""
    stored = Path(__file__).with_name("openapi.json")
    assert without_descriptions(contract) == json.loads(stored.read_text())


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_openapi_is_complete(contract: dict[str, Any]) -> None:
    assert contract["openapi"] == "3.1.0"
    schemas = contract["components"]["schemas"]
    for reference in references(contract):
        assert reference.removeprefix("#/components/schemas/") in schemas, reference
    identifiers = []
    for path, operations in contract["paths"].items():
        for method, operation in operations.items():
            identifiers.append(operation["operationId"])
            assert operation["summary"], path
            assert operation["description"], path
            declared = {each["name"] for each in operation.get("parameters", []) if each["in"] == "path"}
            assert declared == set(re.findall(r"{(\w+)}", path)), path
            answers = operation["responses"]
            assert any(status.startswith("2") for status in answers), path
            for status, answer in answers.items():
                assert answer["description"], (path, status)
                if status[0] in "45":
                    schema = answer["content"]["application/problem+json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ProblemDocument"}, (path, status)
            if path.startswith("/v1"):
                assert {"401", "403", "500", "503"} <= set(answers), path
                assert operation["security"] == [{"key": []}], (path, method)
    assert len(identifiers) == len(set(identifiers))


def test_a_generator_of_clients_finds_one_class_a_name_a_server_and_all_tags(contract: dict[str, Any]) -> None:
    """Classes are named after titles: where two schemas share one, a generator drops what refers to the second."""
    schemas = contract["components"]["schemas"]
    titles = [schema.get("title", name) for name, schema in schemas.items()]
    assert len(titles) == len(set(titles))
    assert contract["servers"] == [{"url": "/", "description": "The service that this document is read from."}]
    assert contract["security"] == [{"key": []}]
    assert set(contract["components"]["securitySchemes"]) == {"key", "scraper"}
    used = {tag for methods in contract["paths"].values() for each in methods.values() for tag in each["tags"]}
    assert used == {tag["name"] for tag in contract["tags"] if tag["description"]}


def test_openapi_carries_the_document(contract: dict[str, Any]) -> None:
    body = contract["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    assert len(body["examples"]) == len(EXAMPLES)
    document = contract["components"]["schemas"]["JobDocument"]
    assert {"kind", "model", "data", "task", "collection", "stabilisation", "capacity"} <= set(document["properties"])
    assert document["additionalProperties"] is False
    collection = contract["components"]["schemas"]["Collection"]["properties"]
    assert "Every Nth batch" in collection["update_freq"]["description"]
    model = document["properties"]["model"]
    assert "builtin" in json.dumps(model)


def test_the_menu(client: httpx.Client) -> None:
    menu = client.get("/v1/analyses").json()
    assert [each["kind"] for each in menu["items"]] == list(ANALYSES)
    capacity = client.get("/v1/analyses/capacity").json()
    assert capacity in menu["items"]
    assert "rank_tolerance" in capacity["options"]["properties"]
    assert "effective_rank" in capacity["metrics"]["properties"]
    problem(client.get("/v1/analyses/canary"), 404)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/jobs/", 404),
        ("GET", "/dashboard/../main.py", 404),
        ("GET", "/dashboard/%2e%2e%2fmain.py", 404),
        ("GET", "/dashboard/scripts/%2e%2e/%2e%2e/main.py", 404),
        ("GET", "/dashboard/scripts", 404),
        ("PUT", "/v1/jobs", 405),
        ("POST", "/livez", 405),
        ("GET", "/v1/jobs/x", 404),
        ("GET", "/v1/jobs?limit=canary", 422),
        ("GET", "/v1/jobs?kind=%00", 400),
        ("GET", "/redoc", 404),
    ],
)
def test_every_error_is_a_problem(client: httpx.Client, method: str, path: str, status: int) -> None:
    answer = client.request(method, path)
    problem(answer, status)
    assert "canary" not in answer.text


def test_what_nobody_foresaw_is_a_problem_too(databases: Databases, tmp_path: Path) -> None:
    ledger = LedgerSettings(database_url=databases.migrated("sqlite"), artifact_root=tmp_path)
    app = create_app(Settings(ledger=ledger, embedded=True))

    @app.get("/boom")
    def boom() -> str:
        raise ZeroDivisionError("canary")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as client:
            return await client.get("http://127.0.0.1/boom")

    answer = asyncio.run(ask())
    problem(answer, 500)
    assert "canary" not in answer.text
    assert "content-security-policy" in answer.headers


def test_security_headers_are_everywhere(client: httpx.Client) -> None:
    for path in ("/", "/dashboard/scripts/app.js", "/livez", "/v1/jobs", "/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith(
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
        )
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers


def test_operations_have_names_for_a_client_generator(contract: dict[str, Any]) -> None:
    names = [each["operationId"] for methods in contract["paths"].values() for each in methods.values()]
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)+", name) for name in names), names
    assert len(names) == len(set(names))
    assert {"submit_job", "list_jobs", "read_job", "cancel_job", "read_results", "download_artifact"} <= set(names)


def test_every_parameter_and_every_field_of_the_document_is_described(contract: dict[str, Any]) -> None:
    for path, methods in contract["paths"].items():
        for operation in methods.values():
            for parameter in operation.get("parameters", []):
                assert parameter.get("description") or parameter["schema"].get("description"), (path, parameter["name"])
    schemas = contract["components"]["schemas"]
    reached, waiting = set(), ["JobDocument"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [reference.rpartition("/")[2] for reference in references(schemas[name])]
    assert {"JobDocument", "Collection", "HuggingFaceModel", "Schedule"} <= reached
    missing = [
        f"{name}.{field}"
        for name in sorted(reached)
        for field, schema in schemas[name].get("properties", {}).items()
        if not schema.get("description")
    ]
    assert missing == []


def test_what_needs_no_key_or_another_one_is_declared_so(contract: dict[str, Any]) -> None:
    schemes = contract["components"]["securitySchemes"]
    declared = {
        operation["operationId"]: [name for each in operation["security"] for name in each]
        for operations in contract["paths"].values()
        for operation in operations.values()
    }
    assert {name: keys for name, keys in declared.items() if keys != ["key"]} == {
        "read_liveness": [],
        "read_readiness": [],
        "read_metrics": ["scraper"],
    }
    assert schemes.keys() == {"key", "scraper"}


def test_the_type_of_every_body_is_declared(embedded: Embedded, contract: dict[str, Any], client: httpx.Client) -> None:
    job_id = seeding.finished(embedded.engine, embedded.artifacts, LOCAL_TENANT)
    for path, name, as_sent in (
        ("/metrics", "", "text/plain"),
        ("/v1/jobs/{job_id}/artifacts/{name}", "memory_curve.json", "*/*"),
        ("/v1/jobs/{job_id}/events", "", "text/event-stream"),
    ):
        declared = contract["paths"][path]["get"]["responses"]["200"]["content"]
        answer = client.get(path.format(job_id=job_id, name=name))
        assert answer.status_code == 200
        assert as_sent in declared
        assert answer.headers["content-type"].partition(";")[0] == as_sent or as_sent == "*/*"


def test_the_schema_of_a_stream_is_that_of_its_events(contract: dict[str, Any]) -> None:
    content = contract["paths"]["/v1/jobs/{job_id}/events"]["get"]["responses"]["200"]["content"]
    schema = content["text/event-stream"]["schema"]
    lines = content["text/event-stream"]["examples"]["stream"]["value"].splitlines()
    fields = {line.partition(": ")[0] for line in lines if line and not line.startswith(":")}
    assert fields == schema["properties"].keys()
    assert schema["properties"]["data"]["contentSchema"]["$ref"].rpartition("/")[2] in contract["components"]["schemas"]
