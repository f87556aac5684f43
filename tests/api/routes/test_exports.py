"""Exports over HTTP: of one's own jobs alone, by the rules of a submission, and not before they are there."""

from typing import Any

import httpx
import pytest

from jobs.codec import sha256_of
from jobs.tenancy.api_keys import verify_key
from tests.api import seeding
from tests.api.conftest import Keyed
from tests.api.expect import problem
from tests.api.server import KEY_SECRET

LAPLACE = {"outputs": 10, "likelihood": "classification"}


@pytest.fixture
def job(keyed: Keyed) -> str:
    """A succeeded job that kept its factors."""
    holder = verify_key(keyed.engine, KEY_SECRET, keyed.key)
    assert holder is not None
    return seeding.finished(keyed.engine, keyed.artifacts, holder.tenant_id, with_factors=True)


def test_an_export_is_a_job_that_repeated_requests_share(ours: httpx.Client, job: str) -> None:
    answer = ours.post(f"/v1/jobs/{job}/exports/laplace", params=LAPLACE)
    assert answer.status_code == 202, answer.text
    made = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{made['id']}"
    assert (made["kinds"], made["document"]["factors"]["job"]) == (["export"], job)
    assert made["document"]["export"] == {
        "format": "laplace", "without": [], "likelihood": "classification", "outputs": 10,
    }  # fmt: skip
    assert ours.post(f"/v1/jobs/{job}/exports/laplace", params=LAPLACE).json()["id"] == made["id"]
    # other options are another file
    other = ours.post(f"/v1/jobs/{job}/exports/laplace", params={**LAPLACE, "outputs": 11})
    assert other.json()["id"] != made["id"]
    early = ours.get(f"/v1/jobs/{job}/exports/laplace", params=LAPLACE)
    said = problem(early, 409)
    assert f"job {made['id']}, which writes the file, is queued" in str(said["detail"])
    # one that was cancelled is made again; until then its file is not to come
    assert ours.post(f"/v1/jobs/{made['id']}:cancel").status_code == 202
    gone = ours.get(f"/v1/jobs/{job}/exports/laplace", params=LAPLACE)
    assert f"job {made['id']}, which was to write the file, is cancelled" in str(problem(gone, 404)["detail"])
    again = ours.post(f"/v1/jobs/{job}/exports/laplace", params=LAPLACE)
    assert again.status_code == 202
    assert again.json()["id"] != made["id"]
    # a job that is deleted in between hides none of the others
    assert ours.delete(f"/v1/jobs/{made['id']}").status_code == 204
    assert ours.post(f"/v1/jobs/{job}/exports/laplace", params=LAPLACE).json()["id"] == again.json()["id"]


def test_keys_of_a_caller_s_own_that_begin_alike_are_no_exports(ours: httpx.Client, job: str) -> None:
    path = f"/v1/jobs/{job}/exports/corda"
    first = ours.post(path).json()
    digest = sha256_of(first["document"])
    for rest, document in (("x", first["document"]), ("99999999999", first["document"])):
        headers = {"idempotency-key": f"export/{digest}/{rest}"}
        own = ours.post("/v1/jobs", json=document, headers=headers)
        assert own.status_code == 202, own.text
        assert ours.post(f"/v1/jobs/{own.json()['id']}:cancel").status_code == 202
    assert ours.post(f"/v1/jobs/{first['id']}:cancel").status_code == 202
    again = ours.post(path)
    assert again.status_code == 202, again.text
    assert again.json()["id"] != first["id"]


def test_a_job_of_others_is_none(theirs: httpx.Client, job: str) -> None:
    random = "0" * len(job)
    for method in ("GET", "POST"):
        answers = [theirs.request(method, f"/v1/jobs/{each}/exports/gptq") for each in (job, random)]
        assert [each.status_code for each in answers] == [404, 404]
        first, second = (each.json() for each in answers)
        assert {name: value for name, value in first.items() if name not in ("instance", "request_id")} == {
            name: value for name, value in second.items() if name not in ("instance", "request_id")
        }


def test_nothing_was_exported_yet(ours: httpx.Client, job: str) -> None:
    problem(ours.get(f"/v1/jobs/{job}/exports/gptq"), 404)


@pytest.mark.part(of=12, by=())
@pytest.mark.parametrize(
    ("named", "params", "pointer"),
    [
        ("onnx", {}, None),
        ("laplace", {}, "/export/likelihood"),
        ("gptq", {"outputs": 3}, "/export/outputs"),
        ("laplace", {**LAPLACE, "outputs": 0}, "/export/outputs"),
        ("laplace", {"outputs": 3}, "/export/likelihood"),
        ("gptq", {"without": [""]}, "/export/without"),
        ("laplace", {"outputs": 3, "likelihood": "poisson"}, "/export/likelihood"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_stored(
    ours: httpx.Client, job: str, named: str, params: dict[str, Any], pointer: str | None
) -> None:
    for method in ("POST", "GET"):
        answer = ours.request(method, f"/v1/jobs/{job}/exports/{named}", params=params)
        assert answer.status_code == 422, answer.text
        if pointer is not None:
            assert answer.json()["errors"][0]["pointer"] == pointer
    stored = ours.get("/v1/jobs", params={"kind": "export"}).json()["items"]
    assert not [each for each in stored if each["document"]["factors"]["job"] == job]


@pytest.mark.parametrize(
    ("without", "said"),
    [
        ("nope", "which is the name of no layer that is covered; give names of layers, or leave it out; there are"),
        ("head.00", "did you mean `head.0`?"),
        ("head.temperature", "the name of no layer that is covered"),
        ("*", "leaves no layer to export: it fits all 7; leave out fewer"),
    ],
)
def test_layers_to_leave_out_are_held_against_those_of_the_job(
    ours: httpx.Client, job: str, without: str, said: str
) -> None:
    document = {"kind": "export", "factors": {"job": job}, "export": {"format": "corda", "without": [without]}}
    for answer in (
        ours.post(f"/v1/jobs/{job}/exports/corda", params={"without": ["head.0", without]}),
        ours.post("/v1/jobs", params={"validate_only": "true"}, json=document),
    ):
        assert answer.status_code == 422, answer.text
        (fault,) = answer.json()["errors"]
        assert fault["pointer"] == "/export/without"
        assert said in fault["message"]
    assert ours.post(f"/v1/jobs/{job}/exports/corda", params={"without": ["head.*", "features.1"]}).status_code == 202


def test_the_number_of_outputs_may_be_left_to_the_factors(ours: httpx.Client, job: str) -> None:
    answer = ours.post(f"/v1/jobs/{job}/exports/laplace", params={"likelihood": "classification"})
    assert answer.status_code == 202, answer.text
    assert answer.json()["document"]["export"]["outputs"] is None
