"""Estimates over HTTP: waited for or fetched later, refused with the field, and never taken for jobs."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from catalog.frames import Failed, Planned
from jobs.queue import attempt_endings, attempt_writes, claims
from jobs.records import Claim
from jobs.schema.identifiers import new_id
from tests.api.conftest import Keyed
from tests.api.expect import pointers, problem
from tests.api.seeding import DOCUMENT
from tests.api.server import METRICS_TOKEN
from tests.machine.stopwatch import Stopwatch, until
from tests.queue_order import next_claimable

WAITING = 41
"""More than there are threads for requests, or connections to the database."""

PLAN: dict[str, Any] = {
    "device_peak_bytes": 0,
    "host_peak_bytes": 500 * 2**20,
    "disk_peak_bytes": 7,
    "stages": {
        "collection": {"device_bytes": 0, "host_bytes": 500 * 2**20, "disk_bytes": 7, "seconds": 2.5},
        "decomposition": {"device_bytes": 0, "host_bytes": 400 * 2**20, "disk_bytes": 7, "seconds": 0.5},
    },
    "seconds": 5.0,
    "seconds_range": [3.5, 8.0],
    "terms": [],
    "why": "one pass",
    "fits": False,
    "budget": {"device_bytes": 2**62, "host_bytes": 2**20},
    "smallest_budget": {"device_bytes": 2**20, "host_bytes": 450 * 2**20},
}


def taken(keyed: Keyed) -> Claim:
    """The estimate that waits, as a worker takes it: before every job."""

    def claimed() -> Claim | None:
        for job_id in next_claimable(keyed.engine, limit=1):
            claim = claims.claim(keyed.engine, job_id, "test", secrets.token_hex(8), 600)
            if claim is not None and claim.kinds == ("plan",):
                return claim
        return None

    found = until(claimed, what="an estimate is queued")
    assert found is not None
    return found


def planned(keyed: Keyed, claim: Claim) -> None:
    attempt_writes.write_plan(keyed.engine, claim, Planned(plan=PLAN))
    attempt_endings.finish(keyed.engine, claim)


def refused(keyed: Keyed, claim: Claim, category: Any = "usage") -> None:
    failure = Failed(
        category=category,
        code="wrong_type",
        message="`digits` fits `classification` only",
        pointer="/task/type",
        layer=None,
        detail="SECRET traceback",
    )
    attempt_endings.fail(keyed.engine, claim, failure)


@contextmanager
def working(keyed: Keyed, work: Callable[[Keyed, Claim], None]) -> Iterator[None]:
    """A worker that takes one estimate in the meantime."""
    worker = threading.Thread(target=lambda: work(keyed, taken(keyed)))
    worker.start()
    yield
    worker.join(300)
    assert not worker.is_alive()


def answered(client: httpx.Client) -> httpx.Response:
    """The answer of an estimate that some worker makes meanwhile, however slow the machine is."""
    headers = {"idempotency-key": f"key-{new_id()}"}

    def answer() -> httpx.Response | None:
        given = client.post("/v1/estimates", json=DOCUMENT, headers=headers)
        return None if given.status_code == 202 else given

    found = until(answer)
    assert found is not None
    return found


def succeeded(client: httpx.Client, address: str) -> dict[str, Any] | None:
    found: dict[str, Any] = client.get(address, params={"wait": "20"}).json()
    return found if found["state"] == "succeeded" else None


def asked(client: httpx.Client, **options: Any) -> dict[str, Any]:
    answer = client.post("/v1/estimates", json=DOCUMENT, **options)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/estimates/{answer.json()['id']}"
    return dict(answer.json())


def test_an_estimate_is_waited_for(keyed: Keyed, ours: httpx.Client) -> None:
    with working(keyed, planned):
        answer = answered(ours)
    assert answer.status_code == 200
    found = answer.json()
    assert answer.headers["location"] == f"/v1/estimates/{found['id']}"
    assert (found["state"], found["fits"], found["seconds"], found["why"]) == ("succeeded", False, 5.0, "one pass")
    assert found["seconds_range"] == [3.5, 8.0]
    assert found["peak"] == {"device": 0, "host": 500 * 2**20, "disk": 7}
    # nothing stands on a device, so nothing is said of one
    assert found["budget"] == {"device": None, "host": 2**20, "disk": None}
    assert found["smallest_budget"] == {"device": None, "host": 450 * 2**20, "disk": None}
    assert found["plan"] == PLAN
    assert found["document"]["collection"]["batch_size"] == 64
    assert ours.get(found["links"]["self"]).json() == found


def test_one_that_takes_longer_is_fetched_later(keyed: Keyed, ours: httpx.Client) -> None:
    headers = {"idempotency-key": f"key-{new_id()}"}

    def post() -> tuple[httpx.Response, float]:
        began, watch = time.monotonic(), Stopwatch()
        answer = ours.post("/v1/estimates", json=DOCUMENT, headers=headers)
        assert answer.status_code == 202
        assert time.monotonic() - began >= 0.5  # what the tests' service waits
        return answer, watch.seconds()

    answer, took = post()
    assert took < 5 or post()[1] < 5  # a machine that stood still once hardly does so twice
    assert int(answer.headers["retry-after"]) > 0
    found = answer.json()
    assert (found["state"], found["fits"], found["plan"]) == ("queued", None, None)
    problem(ours.delete(answer.headers["location"]), 409)
    with working(keyed, planned):
        later = until(lambda: succeeded(ours, answer.headers["location"]))
    assert later is not None
    assert (later["id"], later["state"], later["plan"]) == (found["id"], "succeeded", PLAN)
    assert ours.delete(answer.headers["location"]).status_code == 204
    problem(ours.get(answer.headers["location"]), 404)
    problem(ours.get(answer.headers["location"], params={"wait": "31"}), 422)


def test_waiting_holds_up_nobody(keyed: Keyed, ours: httpx.Client) -> None:
    address = f"/v1/estimates/{asked(ours)['id']}"

    def wait(_: int) -> str:
        return str(ours.get(address, params={"wait": "30"}).json()["state"])

    with ThreadPoolExecutor(WAITING) as pool:
        states = pool.map(wait, range(WAITING))
        keyed.server.await_long_polls(WAITING, METRICS_TOKEN)
        assert ours.get("/v1/jobs?limit=1").status_code == 200
        keyed.server.await_long_polls(WAITING, METRICS_TOKEN)  # all of them wait still
        planned(keyed, taken(keyed))
        assert set(states) == {"succeeded"}


def test_a_job_that_cannot_be_planned_names_the_field(keyed: Keyed, ours: httpx.Client) -> None:
    with working(keyed, refused):
        answer = answered(ours)
    body = problem(answer, 422)
    assert body["errors"] == [
        {
            "pointer": "/task/type",
            "parameter": None,
            "code": "wrong_type",
            "message": "`digits` fits `classification` only",
        }
    ]
    assert "SECRET" not in answer.text
    problem(ours.get(answer.headers["location"]), 422)
    with working(keyed, lambda keyed, claim: refused(keyed, claim, "fatal")):
        problem(answered(ours), 500)


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"model": {"source": "directory", "path": "/etc"}}, "/model/path"),
        ({"collection": {"batch_size": 0}}, "/collection/batch_size"),
        ({"kind": "plan"}, "/kind"),
    ],
)
def test_what_a_job_is_refused_for_an_estimate_is(ours: httpx.Client, changes: dict[str, Any], pointer: str) -> None:
    for address in ("/v1/estimates", "/v1/jobs"):
        assert pointers(problem(ours.post(address, json={**DOCUMENT, **changes}), 422)) == {pointer}


def test_of_a_series_the_first_checkpoint_is_planned(keyed: Keyed, ours: httpx.Client) -> None:
    (keyed.artifacts / "models" / "hub" / "models--owner--name").mkdir(parents=True, exist_ok=True)
    model = {"source": "huggingface", "id": "owner/name", "revision": "none"}
    made = ours.post("/v1/estimates", json={**DOCUMENT, "model": model, "series": {"model": ["step0", "step1"]}})
    assert made.status_code == 202, made.text
    asked = taken(keyed).document
    assert (asked["series"], asked["model"]["revision"]) == (None, "step0")
    refused = ours.post("/v1/estimates", json={**DOCUMENT, "model": model, "series": {"model": ["step0", "a b"]}})
    assert pointers(problem(refused, 422)) == {"/series/model/1"}


def test_factors_bring_no_model_to_plan(ours: httpx.Client) -> None:
    body = problem(ours.post("/v1/estimates", json={"kind": "capacity", "factors": {"job": new_id()}}), 422)
    assert pointers(body) == {"/factors"}


def test_bodies_are_guarded_as_those_of_jobs_are(ours: httpx.Client) -> None:
    sent = {"content-type": "application/json"}
    problem(ours.post("/v1/estimates", content=b"{", headers=sent), 422)
    problem(ours.post("/v1/estimates", content=b'{"x": "' + b"a" * 300_000 + b'"}', headers=sent), 413)
    problem(ours.post("/v1/estimates", content=b"{}", headers={"content-type": "text/plain"}), 415)


def test_an_estimate_is_no_job_and_a_job_no_estimate(keyed: Keyed, ours: httpx.Client, theirs: httpx.Client) -> None:
    key = {"idempotency-key": f"key-{new_id()}"}
    before = ours.get("/v1/jobs").json()["items"]
    estimate = asked(ours, headers=key)
    assert asked(ours, headers=key)["id"] == estimate["id"]
    problem(ours.post("/v1/estimates", json={**DOCUMENT, "kind": "capacity"}, headers=key), 422)
    assert ours.get("/v1/jobs").json()["items"] == before
    problem(ours.get("/v1/jobs?kind=plan"), 422)
    for address in ("", "/results", "/layers", "/log", "/artifacts"):
        problem(ours.get(f"/v1/jobs/{estimate['id']}{address}"), 404)
    problem(ours.post(f"/v1/jobs/{estimate['id']}:cancel"), 404)
    problem(ours.delete(f"/v1/jobs/{estimate['id']}"), 404)
    later = {"kind": "capacity", "factors": {"job": estimate["id"]}}
    assert pointers(problem(ours.post("/v1/jobs", json=later), 422)) == {"/factors/job"}
    # the same key makes a job of its own
    job = ours.post("/v1/jobs", json=DOCUMENT, headers=key)
    assert job.status_code == 202
    assert job.json()["id"] != estimate["id"]
    problem(ours.get(f"/v1/estimates/{job.json()['id']}"), 404)
    problem(ours.delete(f"/v1/estimates/{job.json()['id']}"), 404)
    # another tenant's is like one that never was
    foreign, random = (theirs.get(f"/v1/estimates/{each}") for each in (estimate["id"], new_id()))
    assert problem(foreign, 404) | {"instance": ""} == problem(random, 404) | {"instance": ""}
    problem(theirs.delete(f"/v1/estimates/{estimate['id']}"), 404)
    with keyed.server.client(keyed.reading_key) as reading:
        assert reading.get(f"/v1/estimates/{estimate['id']}").status_code == 200
        problem(reading.post("/v1/estimates", json=DOCUMENT), 403)
        problem(reading.delete(f"/v1/estimates/{estimate['id']}"), 403)
    planned(keyed, taken(keyed))


def test_what_a_document_tells_of_its_needs_is_kept(keyed: Keyed, ours: httpx.Client) -> None:
    answer = ours.post("/v1/jobs", json=DOCUMENT)
    job_id = answer.json()["id"]
    assert job_id not in next_claimable(keyed.engine, 1_000, 40_103)  # digits_cnn has 10,026 numbers of four bytes
    assert job_id in next_claimable(keyed.engine, 1_000, 40_104)
