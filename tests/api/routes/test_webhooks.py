"""Webhooks over HTTP: made, listed, rotated and deleted by their tenant, with the secret in two answers alone."""

from collections.abc import Iterator

import httpx
import pytest

from jobs.webhooks.registry import MOST_WEBHOOKS
from tests.api.conftest import Embedded, Keyed
from tests.api.expect import problem
from tests.api.seeding import raw

URL = "https://example.com/hooks?of=kronoscope"


@pytest.fixture(autouse=True)
def _cleared(keyed: Keyed, ours: httpx.Client) -> Iterator[None]:
    yield
    for each in ours.get("/v1/webhooks").json()["items"]:
        assert ours.delete(f"/v1/webhooks/{each['id']}").status_code == 204


def test_a_secret_is_in_the_answers_that_make_it_and_nowhere_else(keyed: Keyed, ours: httpx.Client) -> None:
    answer = ours.post("/v1/webhooks", json={"url": URL})
    assert answer.status_code == 201
    assert answer.headers["cache-control"] == "no-store"
    made = answer.json()
    assert (made["url"], made["secret"][:6], len(made["secret"])) == (URL, "whsec_", 50)
    rotated = ours.post(f"/v1/webhooks/{made['id']}:rotate").raise_for_status().json()
    assert {**rotated, "secret": made["secret"]} == made
    assert rotated["secret"] != made["secret"]
    job = ours.post("/v1/jobs", content=raw(), headers={"content-type": "application/json"}).raise_for_status().json()
    listed = ours.get("/v1/webhooks").raise_for_status()
    assert listed.json() == {"items": [{**made, "secret": None}]}
    deliveries = ours.get(f"/v1/webhooks/{made['id']}/deliveries").raise_for_status()
    (delivery,) = deliveries.json()["items"]
    assert (delivery["state"], delivery["attempts"], delivery["outcome"]) == ("pending", 0, None)
    assert (delivery["job"], delivery["before"], delivery["after"]) == (job["id"], None, "queued")
    events = ours.get(f"/v1/jobs/{job['id']}/events", headers={"accept": "application/json"}).text
    for shown in (listed.text, deliveries.text, events, keyed.server.log.read_text()):
        assert made["secret"][6:] not in shown
        assert rotated["secret"][6:] not in shown
    lines = [line for line in keyed.server.log.read_text().splitlines() if "_webhook" in line]
    assert [
        action for action in ("create_webhook", "rotate_webhook") if not any(action in each for each in lines)
    ] == []
    assert not any("example.com" in line for line in lines)


def test_what_a_key_may_by_its_scope_and_its_tenant(keyed: Keyed, ours: httpx.Client, theirs: httpx.Client) -> None:
    made = ours.post("/v1/webhooks", json={"url": URL}).raise_for_status().json()
    here = f"/v1/webhooks/{made['id']}"
    with keyed.server.client(keyed.reading_key) as reading:
        assert [each["id"] for each in reading.get("/v1/webhooks").json()["items"]] == [made["id"]]
        assert reading.get(f"{here}/deliveries").status_code == 200
        problem(reading.post("/v1/webhooks", json={"url": URL}), 403)
        problem(reading.post(f"{here}:rotate"), 403)
        problem(reading.delete(here), 403)
    assert theirs.get("/v1/webhooks").json() == {"items": []}
    job = theirs.post("/v1/jobs", content=raw(), headers={"content-type": "application/json"}).raise_for_status()
    for address in (here, "/v1/webhooks/no-such"):
        for answer in (
            theirs.post(f"{address}:rotate"), theirs.delete(address), theirs.get(f"{address}/deliveries"),
        ):  # fmt: skip
            assert problem(answer, 404)["detail"] == "there is no such webhook"
    assert ours.get(f"{here}/deliveries").json() == {"items": []}
    assert theirs.delete(f"/v1/jobs/{job.json()['id']}").status_code == 409
    assert ours.get("/v1/webhooks").json()["items"] == [{**made, "secret": None}]


@pytest.mark.parametrize(
    "url",
    [
        "", "http://example.com/", "example.com", "https://", "https:///path", "ftp://example.com/", "javascript:x()",
        "https://user@example.com/", "https://user:password@example.com/", "https://example.com/#part",
        "https://example.com:0/", "https://example.com:65536/", "https://example.com:x/", "https://[::1/",
        "https://exa mple.com/", "https://example.com\\@other.example/", "https://ex\u00e4mple.com/",
        "https://example.com/\r\nx: y", f"https://example.com/{'x' * 2000}",
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_by_its_field(ours: httpx.Client, url: str) -> None:
    body = problem(ours.post("/v1/webhooks", json={"url": url}), 422)
    assert [each["pointer"] for each in body["errors"]] == ["/url"]
    assert ours.get("/v1/webhooks").json() == {"items": []}


def test_a_body_is_guarded_as_all_are(ours: httpx.Client) -> None:
    problem(ours.post("/v1/webhooks", json={"url": URL, "secret": "mine"}), 422)
    problem(ours.post("/v1/webhooks", json={}), 422)
    problem(ours.post("/v1/webhooks", content=b"x", headers={"content-type": "text/plain"}), 415)


def test_a_tenant_has_ten_at_most(ours: httpx.Client) -> None:
    for _ in range(MOST_WEBHOOKS):
        ours.post("/v1/webhooks", json={"url": URL}).raise_for_status()
    assert "which is the limit" in problem(ours.post("/v1/webhooks", json={"url": URL}), 409)["detail"]


def test_a_service_without_a_key_says_so(embedded: Embedded) -> None:
    with embedded.server.client() as client:
        detail = problem(client.post("/v1/webhooks", json={"url": URL}), 503)["detail"]
    assert "KRONOSCOPE_WEBHOOK_KEY" in detail
