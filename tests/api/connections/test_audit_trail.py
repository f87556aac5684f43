"""The audit trail: one line for each change and each refused key, which holds identifiers and nothing else."""

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx

from api.connections import audit_trail
from jobs.tenancy.api_keys import revoke_key, verify_key
from tests.api import seeding
from tests.api.conftest import Keyed
from tests.api.seeding import DOCUMENT
from tests.api.server import KEY_SECRET

CANARY = "canary-7f3e9"
CONTRACT = Path(__file__).parents[1] / "requests" / "openapi.json"


def lines(log: Path) -> list[dict[str, Any]]:
    return [each for line in log.read_text().splitlines() if (each := json.loads(line)).get("event") == "audit"]


def later(keyed: Keyed, before: int) -> list[dict[str, Any]]:
    return lines(keyed.server.log)[before:]


def submitted(client: httpx.Client, **changes: object) -> str:
    answer = client.post("/v1/jobs", json={**DOCUMENT, **changes})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def test_each_change_is_one_line_with_key_client_route_job_and_outcome(keyed: Keyed, ours: httpx.Client) -> None:
    before = len(lines(keyed.server.log))
    job = submitted(ours)
    ours.headers["x-forwarded-for"] = "6.6.6.6, 198.51.100.7"
    assert ours.put(f"/v1/jobs/{job}/schedule", json={"priority": 3}).status_code == 200
    assert ours.patch(f"/v1/jobs/{job}", json={"note": CANARY, "labels": {"a": CANARY}}).status_code == 200
    assert ours.post(f"/v1/jobs/{job}:cancel").is_success
    assert ours.delete(f"/v1/jobs/{job}").status_code == 204
    assert ours.get("/v1/jobs").status_code == 200
    assert ours.post("/v1/jobs", json={}).status_code == 422
    assert ours.post("/v1/jobs?validate_only=true", json=DOCUMENT).status_code == 200

    trail = later(keyed, before)
    prefix = keyed.key.split("_")[1]
    assert [(each["action"], each["outcome"], each["job"], each["key"]) for each in trail] == [
        (action, "done", job, prefix) for action in ("submit", "reschedule", "annotate", "cancel", "delete")
    ]
    assert [each["client"] for each in trail] == ["127.0.0.1", *["198.51.100.7"] * 4]
    assert trail[3]["route"] == "/v1/jobs/{job_id}:cancel"
    assert {each["logger"] for each in trail} == {"kronoscope.audit"}


def test_an_estimate_is_a_change(keyed: Keyed, ours: httpx.Client) -> None:
    before = len(lines(keyed.server.log))
    waiting = ours.post("/v1/estimates", json=DOCUMENT)
    assert waiting.status_code == 202  # no worker is there
    estimate = waiting.headers["location"].rpartition("/")[2]
    assert ours.get(f"/v1/estimates/{estimate}").status_code == 200
    assert ours.delete(f"/v1/estimates/{estimate}").status_code in {204, 409}
    assert ours.post("/v1/estimates", json={}).status_code == 422
    stored = later(keyed, before)[0]
    assert (stored["action"], stored["outcome"], stored["job"]) == ("estimate", "done", estimate)
    assert {each["action"] for each in later(keyed, before)[1:]} <= {"delete_estimate"}


def test_an_upload_is_changes(keyed: Keyed, ours: httpx.Client) -> None:
    before = len(lines(keyed.server.log))
    file = {"name": f"{CANARY}.csv", "size_bytes": 3, "sha256": hashlib.sha256(b"a\n1").hexdigest()}
    made = ours.post("/v1/uploads", json={"kind": "data", "files": [file]}).raise_for_status().json()
    address = f"/v1/uploads/{made['id']}"
    ours.put(f"{address}/{CANARY}.csv", content=b"a\n1").raise_for_status()
    ours.post(f"{address}:complete").raise_for_status()
    assert ours.post(f"{address}:import").status_code == 409  # it is of no run, and nothing has changed
    assert ours.delete(address).status_code == 204
    trail = later(keyed, before)
    actions = ["create_upload", "send_file", "complete_upload", "delete_upload"]
    assert [(each["action"], each["outcome"], each["job"]) for each in trail] == [
        (each, "done", None) for each in actions
    ]
    assert CANARY not in json.dumps(trail)


def test_an_export_is_a_change(keyed: Keyed, ours: httpx.Client) -> None:
    holder = verify_key(keyed.engine, KEY_SECRET, keyed.key)
    assert holder is not None
    job = seeding.finished(keyed.engine, keyed.artifacts, holder.tenant_id, with_factors=True)
    before = len(lines(keyed.server.log))
    made = ours.post(f"/v1/jobs/{job}/exports/gptq").raise_for_status().json()
    (line,) = later(keyed, before)
    assert (line["action"], line["outcome"], line["job"]) == ("export", "done", made["id"])


def test_every_request_that_may_change_something_is_listed() -> None:
    paths = json.loads(CONTRACT.read_text())["paths"]
    asked = {
        (method.upper(), path) for path, methods in paths.items() for method in methods if method not in {"get", "head"}
    }
    assert {(method, str(path).replace(":path}", "}")) for method, path in audit_trail._CHANGES} == asked


def test_refused_keys_are_in_the_trail(keyed: Keyed) -> None:
    before = len(lines(keyed.server.log))
    with keyed.server.client() as nobody:
        assert nobody.get("/v1/jobs").status_code == 401
    with keyed.server.client(keyed.reading_key) as reader:
        assert reader.post("/v1/jobs", json={}).status_code == 403
    nobody_line, reader_line = later(keyed, before)
    assert (nobody_line["outcome"], nobody_line["key"]) == ("unauthorised", None)
    assert (reader_line["outcome"], reader_line["action"]) == ("forbidden", "submit")
    assert reader_line["key"] == keyed.reading_key.split("_")[1]


def test_the_trail_repeats_no_secret_and_nothing_that_a_caller_wrote(keyed: Keyed, ours: httpx.Client) -> None:
    submitted(ours, name=CANARY, labels={"note": CANARY})
    with keyed.server.client(f"kron_{CANARY}") as wrong:
        assert wrong.delete(f"/v1/jobs/{CANARY}?{CANARY}={CANARY}").status_code == 401
        assert wrong.post("/v1/jobs", json={CANARY: CANARY}, headers={"x-forwarded-for": CANARY}).status_code == 401
        assert wrong.request(CANARY.upper(), "/v1/jobs").status_code in {401, 405}
    written = json.dumps(lines(keyed.server.log))
    assert CANARY not in written.lower()
    assert not any(key.split("_")[2] in written for key in (keyed.key, keyed.reading_key))


def test_a_line_of_a_revoked_key_names_no_key(keyed: Keyed) -> None:
    before = len(lines(keyed.server.log))
    revoke_key(keyed.engine, keyed.other_key)
    with keyed.server.client(keyed.other_key) as revoked:
        assert revoked.get("/v1/jobs").status_code == 401
    (line,) = later(keyed, before)
    assert (line["outcome"], line["key"]) == ("unauthorised", None)
