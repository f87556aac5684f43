"""Jobs over HTTP: accepted once, read while they change, paged, cancelled, deleted; never another tenant's."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from jobs.queue import attempt_endings, claims
from jobs.schema.identifiers import new_id
from jobs.tenancy.api_keys import verify_key
from jobs.tenancy.quotas import set_quota
from tests.api import seeding
from tests.api.conftest import Keyed
from tests.api.expect import problem
from tests.api.seeding import DOCUMENT
from tests.api.server import KEY_SECRET
from tests.machine.stopwatch import Stopwatch


def tenant(keyed: Keyed) -> str:
    caller = verify_key(keyed.engine, KEY_SECRET, keyed.key)
    assert caller is not None
    return caller.tenant_id


def submit(client: httpx.Client, **changes: Any) -> dict[str, Any]:
    answer = client.post("/v1/jobs", json={**DOCUMENT, **changes})
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def test_a_submission_is_accepted_and_says_where(ours: httpx.Client) -> None:
    answer = ours.post("/v1/jobs", json=DOCUMENT)
    assert answer.status_code == 202
    assert int(answer.headers["retry-after"]) > 0
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert job["state"] == "queued"
    assert job["kinds"] == ["factors", "capacity"]
    assert job["document"]["collection"]["batch_size"] == 64
    assert ours.get(answer.headers["location"]).json() == job


def test_validation_stores_nothing(ours: httpx.Client) -> None:
    before = ours.get("/v1/jobs").json()["items"]
    answer = ours.post("/v1/jobs", params={"validate_only": "true"}, json=DOCUMENT)
    assert answer.status_code == 200
    assert answer.json()["valid"] is True
    assert ours.get("/v1/jobs").json()["items"] == before
    bad = {**DOCUMENT, "model": {"source": "upload", "id": "x"}}
    problem(ours.post("/v1/jobs", params={"validate_only": "true"}, json=bad), 422)


def test_one_key_makes_one_job(keyed: Keyed) -> None:
    key = f"key-{new_id()}"

    def post(_: int) -> httpx.Response:
        with keyed.server.client(keyed.key) as client:
            while True:
                answer = client.post("/v1/jobs", json=DOCUMENT, headers={"idempotency-key": key})
                # on a machine that stands still the first may hold the key for longer than the others wait for it
                if answer.status_code != 503:
                    return answer

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(post, range(20)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1


def test_a_replay_gets_its_job_though_its_factors_are_gone(keyed: Keyed, ours: httpx.Client) -> None:
    kept = seeding.finished(keyed.engine, keyed.artifacts, tenant(keyed), with_factors=True)
    headers = {"idempotency-key": f"key-{new_id()}"}
    document = {"kind": "capacity", "factors": {"job": kept}}
    first = ours.post("/v1/jobs", json=document, headers=headers)
    assert first.status_code == 202, first.text
    assert ours.delete(f"/v1/jobs/{kept}").status_code == 204
    problem(ours.post("/v1/jobs", json=document), 422)
    assert ours.post("/v1/jobs", json=document, headers=headers).json()["id"] == first.json()["id"]


def test_a_key_used_for_another_document(ours: httpx.Client, theirs: httpx.Client) -> None:
    headers = {"idempotency-key": f"key-{new_id()}"}
    first = ours.post("/v1/jobs", json=DOCUMENT, headers=headers).json()
    body = problem(ours.post("/v1/jobs", json={**DOCUMENT, "kind": "capacity"}, headers=headers), 422)
    assert body["type"] == "urn:kronoscope:problem:idempotency-conflict"
    # keys are a tenant's own
    assert theirs.post("/v1/jobs", json=DOCUMENT, headers=headers).json()["id"] != first["id"]
    problem(ours.post("/v1/jobs", json=DOCUMENT, headers={"idempotency-key": "x" * 256}), 422)


def test_pages_by_keyset_with_filters(ours: httpx.Client) -> None:
    label = {"batch": new_id()}
    made = [submit(ours, labels=label)["id"] for _ in range(5)]
    made.append(submit(ours, labels=label, kind="capacity")["id"])
    query = f"batch={label['batch']}"
    seen: list[str] = []
    address = f"/v1/jobs?limit=2&label={query}"
    while address:
        answer = ours.get(address)
        page = answer.json()
        seen += [job["id"] for job in page["items"]]
        address = answer.links.get("next", {}).get("url", "")
        assert (page["next"] is not None) == bool(address)
    assert seen == list(reversed(made))
    only = ours.get("/v1/jobs", params={"label": query, "kind": "factors", "state": "queued"}).json()["items"]
    assert [job["id"] for job in only] == list(reversed(made[:-1]))
    assert ours.get("/v1/jobs", params={"label": query, "state": "failed"}).json() == {"items": [], "next": None}
    second = submit(ours, labels={**label, "round": "two"})
    first_page = ours.get("/v1/jobs", params={"label": [query, "round=two"], "sort": "oldest", "limit": 1})
    assert [job["id"] for job in first_page.json()["items"]] == [second["id"]]
    seen, address = [], f"/v1/jobs?limit=3&sort=oldest&label={query}&label={query}"
    while address:
        answer = ours.get(address)
        seen += [job["id"] for job in answer.json()["items"]]
        address = answer.links.get("next", {}).get("url", "")
    assert seen == [*made, second["id"]]
    earlier = ours.get("/v1/jobs", params={"label": query, "until": second["created_at"]}).json()["items"]
    assert [job["id"] for job in earlier] == list(reversed(made))
    assert ours.get("/v1/jobs", params={"label": query, "until": "1h"}).json()["items"] == []


def test_parameters_that_mean_nothing(ours: httpx.Client) -> None:
    for query in (
        "limit=0",
        "limit=101",
        "limit=x",
        "state=canary",
        "kind=canary",
        "label=canary",
        "label=a=b&label=canary",
        "&".join(["label=a=b"] * 9),
        "sort=canary",
        "until=canary",
        "name=",
        "since=canary",
        "since=2026-11-01T12:00",
        "since=999999999d",
        "since=0001-01-01T00:00%2B23:59",
        "id=canary",
        "before=canary",
        "limit=99999999999999999999999",
    ):
        answer = ours.get(f"/v1/jobs?{query}")
        body = problem(answer, 422)
        assert "canary" not in answer.text
        errors = body["errors"]
        assert isinstance(errors, list)
        assert errors[0]["parameter"] == query.partition("=")[0]
    problem(ours.get("/v1/jobs?kind=%00"), 400)
    problem(ours.get("/v1/jobs/%00"), 400)


def test_lists_are_filtered_by_name_age_and_the_end_of_an_id(ours: httpx.Client) -> None:
    name = f"run of {new_id()}"
    made = submit(ours, name=name)
    assert made["name"] == name
    assert "name" not in made["document"]

    def found(**filters: str) -> list[str]:
        return [job["id"] for job in ours.get("/v1/jobs", params=filters).json()["items"]]

    assert found(name=name[3:].upper()) == [made["id"]]
    assert found(name=name, since="5m", id=made["id"][-8:]) == [made["id"]]
    assert found(name=name, since="2026-01-01T00:00Z") == [made["id"]]
    assert found(name=name, since="2999-01-01T00:00+01:00") == []
    unescaped = ours.get(f"/v1/jobs?limit=1&since=2026-01-01T00:00+01:00&name={name.replace(' ', '+')}")
    assert [job["id"] for job in unescaped.json()["items"]] == [made["id"]]
    spelt = [f"{new_id()} caf{letter}" for letter in ("\u00e9", "e\u0301")]
    ids = {submit(ours, name=each)["id"] for each in spelt}
    for letter in ("\u00e9", "e\u0301"):
        assert set(found(name=f" caf{letter}")) == ids


def test_unknown_parameters_are_refused(ours: httpx.Client) -> None:
    body = problem(ours.get("/v1/jobs?stat=failed"), 422)
    assert body["detail"] == "`stat` is not a parameter of this address; did you mean `state`?"
    for address in ("/v1/jobs?canary", "/v1/devices?canary=1", f"/v1/jobs/{new_id()}?canary=1", "/v1/analyses?limit=1"):
        body = problem(ours.get(address), 422)
        assert body["errors"][0]["code"] == "unknown_parameter", address  # type: ignore[index]
    problem(ours.post("/v1/jobs?validate-only=true", json=DOCUMENT), 422)
    assert ours.get("/livez?canary=1").status_code == 200  # probes are asked in ways of their own


def test_a_value_that_is_nearly_a_choice_is_suggested(ours: httpx.Client) -> None:
    assert "did you mean `succeeded`?" in problem(ours.get("/v1/jobs?state=suceeded"), 422)["detail"]
    for change, meant in (
        ({"kind": "capcity"}, "capacity"),
        ({"kind": ["capacity", "factor"]}, "factors"),
        ({"collection": {"fisher": "empircal"}}, "empirical"),
        ({"model": {"source": "buildin", "name": "digits_cnn"}}, "builtin"),
    ):
        refused = problem(ours.post("/v1/jobs", json={**DOCUMENT, **change}), 422)
        assert f"did you mean `{meant}`?" in refused["errors"][0]["message"]  # type: ignore[index]
        assert "canary" not in str(problem(ours.post("/v1/jobs", json={**DOCUMENT, "kind": "canary"}), 422))


def test_an_etag_names_a_version(keyed: Keyed, ours: httpx.Client) -> None:
    claim = seeding.running(keyed.engine, tenant(keyed))
    address = f"/v1/jobs/{claim.job_id}"
    first = ours.get(address)
    etag = first.headers["etag"]
    again = ours.get(address, headers={"if-none-match": etag})
    assert again.status_code == 304
    assert again.content == b""
    claims.heartbeat(keyed.engine, claim, 600)
    assert ours.get(address, headers={"if-none-match": etag}).status_code == 304
    seeding.progress(keyed.engine, claim, stage="collection", done=18, total=29, unit="batches", percent=43.0)
    changed = ours.get(address, headers={"if-none-match": etag})
    assert changed.status_code == 200
    assert changed.json()["progress"]["done"] == 18
    assert changed.headers["etag"] != etag


def test_a_long_poll_answers_when_the_job_changes(keyed: Keyed, ours: httpx.Client) -> None:
    claim = seeding.running(keyed.engine, tenant(keyed))
    address = f"/v1/jobs/{claim.job_id}"
    etag = ours.get(address).headers["etag"]
    began, watch = time.monotonic(), Stopwatch()
    mover = threading.Timer(
        1.0,
        seeding.progress,
        (keyed.engine, claim),
        {"stage": "collection", "done": 20, "total": 29, "unit": "batches", "percent": 50.0},
    )
    mover.start()
    answer = ours.get(address, params={"wait": 30}, headers={"if-none-match": etag})
    mover.join()
    assert answer.status_code == 200
    assert answer.json()["progress"]["done"] == 20
    assert time.monotonic() - began > 0.8
    assert watch.seconds() < 25
    # without an ETag it waits for the end, no longer than asked
    began, watch = time.monotonic(), Stopwatch()
    assert ours.get(address, params={"wait": 1}).json()["state"] == "running"
    assert time.monotonic() - began > 0.9
    assert watch.seconds() < 25
    attempt_endings.finish(keyed.engine, claim)
    assert ours.get(address, params={"wait": 20}).json()["state"] == "succeeded"
    for wait in ("-1", "31", "nan", "x"):
        problem(ours.get(address, params={"wait": wait}), 422)


def test_cancel_and_delete(keyed: Keyed, ours: httpx.Client) -> None:
    queued = submit(ours)["id"]
    assert ours.post(f"/v1/jobs/{queued}:cancel").json()["state"] == "cancelled"
    assert ours.post(f"/v1/jobs/{queued}:cancel").json()["state"] == "cancelled"
    running = seeding.running(keyed.engine, tenant(keyed))
    problem(ours.delete(f"/v1/jobs/{running.job_id}"), 409)
    assert ours.post(f"/v1/jobs/{running.job_id}:cancel").json()["state"] == "cancelling"
    finished = seeding.finished(keyed.engine, keyed.artifacts, tenant(keyed))
    left = keyed.artifacts / finished / ".waiting"
    left.mkdir(parents=True, exist_ok=True)
    assert ours.delete(f"/v1/jobs/{finished}").status_code == 204
    assert not (keyed.artifacts / finished).exists()
    problem(ours.get(f"/v1/jobs/{finished}"), 404)
    problem(ours.delete(f"/v1/jobs/{finished}"), 404)


def test_without_bytes_left_no_job_is_taken(keyed: Keyed, ours: httpx.Client, theirs: httpx.Client) -> None:
    seeding.finished(keyed.engine, keyed.artifacts, tenant(keyed))
    keyed_post: Any = {"json": DOCUMENT, "headers": {"idempotency-key": "before-the-quota"}}
    kept = ours.post("/v1/jobs", **keyed_post).json()
    assert set_quota(keyed.engine, "ours", 1)
    try:
        answer = ours.post("/v1/jobs", json=DOCUMENT)
        told = problem(answer, 429)
        assert told["type"].endswith("quota-exceeded")
        assert "of the 1 bytes that they may" in told["detail"]
        assert int(answer.headers["retry-after"]) > 0
        # a replay is an answer, not a job
        assert ours.post("/v1/jobs", **keyed_post).json()["id"] == kept["id"]
        submit(theirs)
    finally:
        set_quota(keyed.engine, "ours", None)
    submit(ours)


def test_a_failure_is_told_without_its_detail(keyed: Keyed, ours: httpx.Client) -> None:
    answer = ours.get(f"/v1/jobs/{seeding.failed(keyed.engine, tenant(keyed))}")
    failure = answer.json()["failure"]
    assert set(failure) == {"category", "code", "message", "pointer", "layer", "trace"}
    assert failure["layer"] == "features.3"
    assert "SECRET" not in answer.text


def test_another_tenants_job_is_like_a_random_id(keyed: Keyed, theirs: httpx.Client) -> None:
    job = seeding.finished(keyed.engine, keyed.artifacts, tenant(keyed))

    def anonymous(answer: httpx.Response) -> tuple[int, dict[str, Any]]:
        body = problem(answer, 404)
        return answer.status_code, {name: value for name, value in body.items() if name != "instance"}

    for method, tail in (
        ("GET", ""),
        ("GET", "/results"),
        ("GET", "/layers"),
        ("GET", "/layers.csv"),
        ("GET", "/layers.jsonl"),
        ("GET", "/layers/head.0"),
        ("GET", "/log"),
        ("GET", "/events"),
        ("GET", "/artifacts"),
        ("GET", "/artifacts/spectra/0.json"),
        ("POST", ":cancel"),
        ("PUT", "/schedule"),
        ("DELETE", ""),
    ):
        body = {"json": {}} if method == "PUT" else {}
        foreign = theirs.request(method, f"/v1/jobs/{job}{tail}", **body)
        random = theirs.request(method, f"/v1/jobs/{new_id()}{tail}", **body)
        nonsense = theirs.request(method, f"/v1/jobs/nonsense{tail}", **body)
        assert anonymous(foreign) == anonymous(random) == anonymous(nonsense)
    assert theirs.get("/v1/jobs").json()["items"] == [] or all(
        each["id"] != job for each in theirs.get("/v1/jobs").json()["items"]
    )


def test_a_part_of_a_model_is_told_as_a_part(keyed: Keyed, ours: httpx.Client) -> None:
    part = ours.get(f"/v1/jobs/{seeding.partly_measured(keyed.engine, keyed.artifacts, tenant(keyed))}").json()
    assert part["state"] == "succeeded"
    assert part["coverage"]["status"] == "partial"
    assert part["coverage"]["measured_share"] == 0.3509
    assert [each["reason"] for each in part["coverage"]["not_measured"]] == ["embedding_renormalised", "unheard_of"]
    accepting = {**seeding.DOCUMENT, "collection": {"min_coverage": 0.35}}
    accepted = seeding.partly_measured(keyed.engine, keyed.artifacts, tenant(keyed), accepting)
    assert ours.get(f"/v1/jobs/{accepted}").json()["coverage"]["status"] == "accepted"
    whole = seeding.finished(keyed.engine, keyed.artifacts, tenant(keyed))
    assert ours.get(f"/v1/jobs/{whole}/results").json()["job"]["coverage"]["status"] == "complete"
    assert submit(ours)["coverage"] is None


def test_a_job_says_what_of_its_inputs_was_not_read_as_it_stands(keyed: Keyed, ours: httpx.Client) -> None:
    job_id = seeding.noticed(keyed.engine, keyed.artifacts, tenant(keyed))
    said = ["3 of 4 texts are longer than 12 tokens and are cut there"]
    assert ours.get(f"/v1/jobs/{job_id}").json()["notices"] == said
    manifest = ours.get(f"/v1/jobs/{job_id}/results").json()["manifest"]
    assert manifest["unused"] == ["`id` of rows.jsonl", "file `generation_config.json`"]
    assert manifest["notices"] == said
    assert manifest["reading"] == {"columns": {"text": "line"}, "labels": None, "pixels": None}
    assert submit(ours)["notices"] == []
    assert {each["id"]: each["notices"] for each in ours.get("/v1/jobs").json()["items"]}[job_id] == said


def test_a_job_says_which_of_its_analyses_was_refused(keyed: Keyed, ours: httpx.Client) -> None:
    job_id = seeding.partly_refused(keyed.engine, keyed.artifacts, tenant(keyed))
    job = ours.get(f"/v1/jobs/{job_id}").json()
    assert (job["state"], job["failure"]) == ("succeeded", None)
    [refused] = job["refused"]
    assert (refused["kind"], refused["layer"], refused["pointer"]) == ("capacity", "features.0", "/stabilisation")
    assert "has no curvature; take" in refused["message"]
    results = ours.get(f"/v1/jobs/{job_id}/results").json()
    assert set(results["summary"]) == {"factors"}
    assert results["manifest"]["refused"] == job["refused"] == results["job"]["refused"]
    assert submit(ours)["refused"] == []
    listed = {each["id"]: each["refused"] for each in ours.get("/v1/jobs").json()["items"]}
    assert listed[job_id] == job["refused"]
    assert [each for each in listed.values() if each] == [job["refused"]]


def _done_in_part(job: Any) -> bool:
    return bool(job["refused"]) or job["coverage"]["status"] == "partial"


def _has_diagonals(job: Any) -> bool:
    return any(part["kind"] == "diagonal" for part in job["coverage"]["parts"])


def test_jobs_are_listed_by_the_part_that_they_did(keyed: Keyed, ours: httpx.Client) -> None:
    seeds = (keyed.engine, keyed.artifacts, tenant(keyed))
    submit(ours)
    seeding.finished(*seeds)
    accepting = {**seeding.DOCUMENT, "collection": {"min_coverage": 0.35}}
    seeding.partly_measured(*seeds, accepting)
    partial = {seeding.partly_measured(*seeds), seeding.partly_refused(*seeds)}
    diagonal = {seeding.of_diagonals(*seeds)}
    for coverage, expected in (("partial", partial), ("diagonal", diagonal)):
        listed = ours.get("/v1/jobs", params={"coverage": coverage, "limit": 100}).json()["items"]
        found = {job["id"] for job in listed}
        assert expected <= found
        assert all(_done_in_part(job) if coverage == "partial" else _has_diagonals(job) for job in listed)
    refused = problem(ours.get("/v1/jobs?coverage=partially"), 422)
    assert "did you mean `partial`?" in refused["detail"]
