"""Lists of jobs are slim, and bounded in bytes where they are asked to be whole."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from jobs.codec import parse_document
from jobs.repository.submission import submit
from jobs.schema.database import writing
from jobs.schema.tables import jobs
from jobs.tenancy.api_keys import create_key, verify_key
from kronoscope.client import Client, ClientError
from tests.api.conftest import Keyed
from tests.api.expect import problem
from tests.api.seeding import DOCUMENT, raw
from tests.api.server import KEY_SECRET

LONG = {
    **DOCUMENT,
    "model": {"source": "factory", "factory": "package.models:build", "kwargs": {"text": "x" * 200_000}},
    "labels": {"team": "a"},
}
COUNT = 24


@pytest.fixture(scope="module")
def long_jobs(keyed: Keyed) -> str:
    """The key of a tenant whose documents and plans are as long as they may be."""
    key = create_key(keyed.engine, KEY_SECRET, "long-winded")
    caller = verify_key(keyed.engine, KEY_SECRET, key)
    assert caller is not None
    for _ in range(COUNT):
        submit(keyed.engine, caller.tenant_id, parse_document(raw(LONG)))
    with writing(keyed.engine) as connection:
        plan = {"fits": True, "layers": ["y" * 100] * 1000}
        connection.execute(update(jobs).where(jobs.c.tenant_id == caller.tenant_id).values(plan=plan))
    return key


@pytest.fixture
def client(keyed: Keyed, long_jobs: str) -> Iterator[httpx.Client]:
    with keyed.server.client(long_jobs) as opened:
        yield opened


def test_a_list_is_slim(client: httpx.Client) -> None:
    answer = client.get("/v1/jobs?limit=100")
    assert len(answer.content) < 60_000  # they have seven megabytes
    items = answer.json()["items"]
    assert len(items) == COUNT
    for item in items:
        assert item["plan"] is None
        assert item["document"]["model"] == {"source": "factory", "factory": "package.models:build"}
        assert item["document"]["data"]["source"] == LONG["data"]["source"]
        assert item["labels"] == {"team": "a"}
    assert client.get(items[0]["links"]["self"]).json()["document"]["model"]["kwargs"] == LONG["model"]["kwargs"]


@pytest.mark.parametrize("fields", ["document", "plan", "document,plan"])
def test_a_whole_list_is_read_in_pages_of_bounded_size(client: httpx.Client, fields: str) -> None:
    found: list[dict[str, Any]] = []
    path = f"/v1/jobs?limit=100&fields={fields}"
    while path:
        answer = client.get(path)
        assert len(answer.content) <= 320 * 1024  # a page's, or one job
        assert 1 <= len(answer.json()["items"]) < COUNT
        found += answer.json()["items"]
        path = answer.links.get("next", {}).get("url", "")
    assert len({item["id"] for item in found}) == len(found) == COUNT
    assert [item["id"] for item in found] == sorted((item["id"] for item in found), reverse=True)
    assert all((item["plan"] is not None) == ("plan" in fields) for item in found)
    assert all(("kwargs" in item["document"]["model"]) == ("document" in fields) for item in found)


def test_an_unknown_field_is_refused(client: httpx.Client) -> None:
    for fields in ("secret", "document,", ""):
        problem(client.get("/v1/jobs", params={"fields": fields}), 422)


def test_the_client_asks_for_large_fields(keyed: Keyed, ours: httpx.Client) -> None:
    made = ours.post("/v1/jobs", json=DOCUMENT).json()
    with Client(keyed.server.url, keyed.key) as client:
        slim, whole = (next(iter(client.jobs(fields=each))) for each in ((), ("document", "plan")))
        with pytest.raises(ClientError, match="comma list of document, plan"):
            next(iter(client.jobs(fields=["documents"])))
    assert slim.id == whole.id == made["id"]
    assert "batch_size" not in slim.document["collection"]
    assert whole.document == made["document"]
