"""A job's schedule over HTTP: given with the document, shown with the job, changed afterwards."""

from datetime import datetime
from typing import Any

import httpx
from sqlalchemy import update

from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import jobs
from tests.api.conftest import Keyed
from tests.api.expect import pointers, problem
from tests.api.seeding import DOCUMENT
from tests.machine.stopwatch import until


def scheduled(client: httpx.Client, **schedule: Any) -> httpx.Response:
    return client.post("/v1/jobs", json={**DOCUMENT, "schedule": schedule})


def test_a_job_shows_its_terms_and_its_document_none(ours: httpx.Client) -> None:
    answer = scheduled(ours, priority=4, within="90m")
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert job["priority"] == 4
    left = datetime.fromisoformat(job["deadline_at"]) - datetime.fromisoformat(job["created_at"])
    assert abs(left.total_seconds() - 5400) < 60
    assert "schedule" not in job["document"]
    plain = ours.post("/v1/jobs", json=DOCUMENT).json()
    assert (plain["priority"], plain["deadline_at"]) == (0, None)
    assert plain["document_sha256"] == job["document_sha256"]


def test_a_deadline_in_the_past_is_refused_with_its_field(ours: httpx.Client) -> None:
    body = {**DOCUMENT, "schedule": {"deadline": "2020-01-01T00:00Z"}}
    for query in ("", "?validate_only=true"):
        answer = ours.post(f"/v1/jobs{query}", json=body)
        assert pointers(problem(answer, 422)) == {"/schedule/deadline"}
        assert "give a later moment" in answer.text


def test_a_repeated_request_is_answered_even_after_its_deadline(keyed: Keyed, ours: httpx.Client) -> None:
    headers = {"idempotency-key": f"key-{new_id()}"}
    body = {**DOCUMENT, "schedule": {"within": "1h"}}
    first = ours.post("/v1/jobs", json=body, headers=headers).json()
    with writing(keyed.engine) as connection:  # the hour is over
        connection.execute(update(jobs).where(jobs.c.id == first["id"]).values(deadline_at=ledger_now(-1)))

    def failure() -> dict[str, Any] | None:
        read: dict[str, Any] = ours.get(f"/v1/jobs/{first['id']}", params={"wait": 25}).json()
        return read["failure"] if read["state"] == "failed" else None

    assert (until(failure) or {})["code"] == "deadline_exceeded"
    assert ours.post("/v1/jobs", json=body, headers=headers).json()["id"] == first["id"]
    problem(ours.post("/v1/jobs", json=DOCUMENT, headers=headers), 422)
    problem(ours.put(f"/v1/jobs/{first['id']}/schedule", json={}), 409)


def test_a_queued_job_is_scheduled_anew(ours: httpx.Client) -> None:
    address = scheduled(ours, priority=4, within="90m").headers["location"]
    answer = ours.put(f"{address}/schedule", json={"priority": -1})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["priority"], answer.json()["deadline_at"]) == (-1, None)
    assert ours.get(address).headers["etag"] == answer.headers["etag"]
    for wrong, pointer in (
        ({"priority": 11}, "/priority"),
        ({"priority": "high"}, "/priority"),
        ({"prio": 1}, "/prio"),
        ({"within": "soon"}, "/within"),
        ({"deadline": "2020-01-01T00:00Z"}, "/deadline"),
    ):
        assert pointers(problem(ours.put(f"{address}/schedule", json=wrong), 422)) == {pointer}
    problem(ours.put(f"{address}/schedule", content=b"[]", headers={"content-type": "application/json"}), 422)
    problem(ours.put(f"{address}/schedule", content=b"{}", headers={"content-type": "text/plain"}), 415)
    assert ours.get(address).json()["priority"] == -1
