"""Parameters and headers that a request gives: once where they have one value, of the form that is stored."""

from typing import Any

import httpx
import pytest

from jobs.schema.identifiers import new_id
from tests.api.expect import problem
from tests.api.seeding import DOCUMENT


def faults(answer: httpx.Response) -> list[dict[str, Any]]:
    errors = problem(answer, 422)["errors"]
    assert isinstance(errors, list)
    return errors


@pytest.mark.parametrize(
    ("method", "address", "name"),
    [
        ("POST", "/v1/jobs?validate_only=True&validate_only=false", "validate_only"),
        ("GET", "/v1/jobs?state=failed&state=succeeded", "state"),
        ("GET", "/v1/jobs?limit=2&limit=2", "limit"),
        ("GET", "/v1/jobs/x?wait=0&wait=1", "wait"),
        ("GET", "/v1/jobs/x/layers?kind=capacity&kind=factors", "kind"),
        ("GET", "/v1/jobs:compare?ids=a,b&ids=a,c", "ids"),
        ("POST", "/v1/jobs/x/exports/laplace?outputs=1&outputs=2", "outputs"),
    ],
)
def test_a_parameter_of_one_value_that_is_given_twice_is_refused_by_name(
    ours: httpx.Client, method: str, address: str, name: str
) -> None:
    before = ours.get("/v1/jobs").json()["items"]
    (fault,) = faults(ours.request(method, address, **({"json": DOCUMENT} if method == "POST" else {})))
    assert (fault["parameter"], fault["code"]) == (name, "repeated_parameter")
    assert fault["message"] == "is given 2 times, and takes one value; give one"
    assert ours.get("/v1/jobs").json()["items"] == before


@pytest.mark.parametrize(
    ("address", "name", "message"),
    [
        ("/v1/jobs?limit=abc", "limit", "must be a whole number, such as 20"),
        ("/v1/jobs?limit=1e1", "limit", "must be a whole number, such as 20"),
        ("/v1/jobs?limit=2.5", "limit", "must be a whole number, such as 20"),
        (
            f"/v1/jobs?limit={'9' * 5_000}",
            "limit",
            "is a larger number than any that is taken here; take a smaller one",
        ),
        ("/v1/jobs/x?wait=soon", "wait", "must be a number, such as 0.5"),
        ("/v1/jobs/x/artifacts/a?direct=maybe", "direct", "must be true or false"),
        ("/v1/jobs:compare", "ids", "is missing; it must be given"),
        ("/v1/jobs/x/exports/laplas", "format", "did you mean `laplace`?"),
    ],
)
def test_a_parameter_of_another_type_is_refused_with_what_it_takes(
    ours: httpx.Client, address: str, name: str, message: str
) -> None:
    answer = ours.get(address)
    (fault,) = faults(answer)
    assert fault["parameter"] == name
    assert fault["message"].endswith(message)
    assert answer.json()["detail"] == f"`{name}` {fault['message']}"


def test_a_list_may_be_given_several_times(ours: httpx.Client) -> None:
    assert ours.get("/v1/jobs?label=a=1&label=b=2").status_code == 200


@pytest.mark.parametrize("key", ["", "a b", "é", "x" * 256])
@pytest.mark.parametrize(
    ("address", "params"),
    [("/v1/jobs", {}), ("/v1/jobs", {"validate_only": "true"}), ("/v1/estimates", {})],
)
def test_a_key_that_cannot_be_stored_is_refused_whether_or_not_anything_is_stored(
    ours: httpx.Client, key: str, address: str, params: dict[str, str]
) -> None:
    headers = [(b"idempotency-key", key.encode("latin-1"))]
    answer = ours.post(address, params=params, json=DOCUMENT, headers=headers)
    (fault,) = faults(answer)
    assert fault["parameter"] == "Idempotency-Key"
    assert "must be 1 to 255 visible ASCII characters" in fault["message"]
    assert "take a UUID" in fault["message"]


def test_a_key_of_another_document_is_refused_where_nothing_is_stored(ours: httpx.Client) -> None:
    headers = {"idempotency-key": f"key-{new_id()}"}
    assert ours.post("/v1/jobs", json=DOCUMENT, headers=headers).status_code == 202
    params = {"validate_only": "true"}
    assert ours.post("/v1/jobs", json=DOCUMENT, headers=headers, params=params).status_code == 200
    other = ours.post("/v1/jobs", json={**DOCUMENT, "kind": "factors"}, headers=headers, params=params)
    assert problem(other, 422)["type"] == "urn:kronoscope:problem:idempotency-conflict"
