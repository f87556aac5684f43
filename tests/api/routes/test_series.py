"""A series over HTTP: admitted with all its checkpoints or not at all, and shown with what its jobs have stored."""

import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from catalog.frames import Failed, Summarised
from catalog.record import plain
from jobs.queue import attempt_endings, attempt_writes, claims
from jobs.records import LOCAL_TENANT
from jobs.schema.database import open_database
from jobs.tenancy.api_keys import create_key
from tests.api import seeding
from tests.api.conftest import Embedded, Keyed
from tests.api.expect import problem
from tests.api.routes.test_comparison import at, is_right
from tests.api.server import KEY_SECRET, METRICS_TOKEN, serve
from tests.conftest import Databases

DOCUMENT: dict[str, Any] = {
    "kind": ["capacity"],
    "name": "training",
    "model": {"source": "huggingface", "id": "owner/name"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
    "series": {"model": ["step0", "step1", "step2", "step3"], "learning_rate": [0.5, 0.25, 0.2, 0.1]},
}


def in_store(folder: Path) -> None:
    """Have the store of models hold one."""
    (folder / "models" / "hub" / "models--owner--name").mkdir(parents=True, exist_ok=True)


def measured(embedded: Embedded, job_id: str, scale: float) -> None:
    """End a checkpoint's job, whose second layer has a spectrum of this scale."""
    claim = claims.claim(embedded.engine, job_id, "node:1", secrets.token_hex(8), 600)
    assert claim is not None
    for place, name in enumerate(("a", "b")):
        row = seeding.row("capacity", place, name, "Linear", 10, [1.0 + place * scale, 3.0], [0.5, 1.0])
        attempt_writes.write_layer(embedded.engine, claim, seeding.layer_frame(row))
    summary = plain(seeding.summary("capacity"))
    summary["trace"], summary["model"]["spectral_norm"] = 7.0 * scale, 2.0 * scale
    attempt_writes.write_summary(embedded.engine, claim, Summarised(kind="capacity", summary=summary))
    attempt_endings.finish(embedded.engine, claim)


def compared(embedded: Embedded, job_id: str, overlap: float) -> None:
    """End a comparison."""
    claim = claims.claim(embedded.engine, job_id, "node:1", secrets.token_hex(8), 600)
    assert claim is not None
    overlaps = [{"k": k, "overlap": overlap / k, "layers": 2} for k in (1, 5)]
    summary = {"coverage": plain(seeding.coverage()), "overlaps": overlaps, "relative_distance": 2 * overlap}
    attempt_writes.write_summary(embedded.engine, claim, Summarised(kind="compare_curvature", summary=summary))
    attempt_endings.finish(embedded.engine, claim)


def drawn_series(embedded: Embedded) -> str:
    """A finished series of six checkpoints, of which the third has failed and the last comparison too."""
    in_store(embedded.artifacts)
    series = {"model": [f"step{place}" for place in range(6)], "learning_rate": 0.5}
    with embedded.server.client() as client:
        job = client.post("/v1/jobs", json=DOCUMENT | {"series": series})
        assert job.status_code == 202, job.text
        series_id = str(job.json()["id"])
        points = client.get(f"/v1/jobs/{series_id}/series").json()["points"]
        for place, point in enumerate(points):
            if place == 2:
                _fail(embedded, point["job"], "/models/step2 holds no weights")
            else:
                measured(embedded, point["job"], 1.0 + place)
        pairs = client.get(f"/v1/jobs/{series_id}/series").json()["overlaps"]
        for pair in pairs[:-1]:
            compared(embedded, pair["job"], 0.1 * pair["index"])
        _fail(embedded, pairs[-1]["job"], "not enough memory")
    return series_id


def _fail(embedded: Embedded, job_id: str, message: str) -> None:
    claim = claims.claim(embedded.engine, job_id, "node:1", secrets.token_hex(8), 600)
    assert claim is not None
    failure = Failed(category="usage", code="c", message=message, pointer=None, layer=None, detail="SECRET")
    attempt_endings.fail(embedded.engine, claim, failure)


@pytest.fixture(scope="module")
def series(embedded: Embedded) -> str:
    return drawn_series(embedded)


@pytest.fixture
def client(embedded: Embedded) -> Any:
    with embedded.server.client() as client:
        yield client


def test_the_numbers_are_those_of_the_jobs(client: httpx.Client, series: str) -> None:
    view = client.get(f"/v1/jobs/{series}/series").json()
    assert (view["job"], view["state"], view["layers"]) == (series, "succeeded", [])
    assert [each["model"] for each in view["points"]] == [f"step{place}" for place in range(6)]
    assert [each["stable_below"] for each in view["points"]] == [4.0] * 6
    results = [client.get(f"/v1/jobs/{each['job']}/results").json() for each in view["points"]]
    assert [each["job"]["document"]["model"]["revision"] for each in results] == [f"step{place}" for place in range(6)]
    summaries = [each["summary"].get("capacity") for each in results]
    assert [each["largest"] for each in view["points"]] == [
        {} if each is None else {"kfac": each["model"]["spectral_norm"]} for each in summaries
    ]
    for name, metric in view["model"]["capacity"].items():
        is_right(name, metric, [at(each, name) for each in summaries])
    assert view["model"]["capacity"]["trace"]["ratios"] == [1, 2, None, 4, 5, 6]


def test_what_failed_is_said_and_the_others_are_there(client: httpx.Client, series: str) -> None:
    view = client.get(f"/v1/jobs/{series}/series").json()
    assert [(each["state"], each["failure"]) for each in view["points"]] == [
        ("failed", "/models/step2 holds no weights") if place == 2 else ("succeeded", None) for place in range(6)
    ]
    assert [(each["index"], each["failure"]) for each in view["overlaps"]] == [
        (1, None), (4, None), (5, "not enough memory"),
    ]  # fmt: skip
    assert view["overlaps"][1]["overlaps"] == {"1": 0.4, "5": 0.4 / 5}
    assert view["overlaps"][1]["relative_distance"] == 0.8
    assert (view["overlaps"][2]["overlaps"], view["overlaps"][2]["relative_distance"]) == ({}, None)
    assert "SECRET" not in json.dumps(view)


def test_one_number_by_layer(client: httpx.Client, series: str) -> None:
    view = client.get(f"/v1/jobs/{series}/series", params={"kind": "capacity", "metric": "trace"}).json()
    rows = [
        {row["layer"]: row["metrics"] for row in client.get(f"/v1/jobs/{each['job']}/layers").json()["items"]}
        for each in view["points"]
    ]
    assert [each["layer"] for each in view["layers"]] == ["a", "b"]
    for layer in view["layers"]:
        assert set(layer["metrics"]) == {"trace"}
        is_right("trace", layer["metrics"]["trace"], [each.get(layer["layer"], {}).get("trace") for each in rows])
    # A has the eigenvalues 1 + scale and 3, G 0.5 and 1
    b = view["layers"][1]["metrics"]["trace"]["values"]
    assert b == [pytest.approx(1.5 * (5 + place)) if place != 2 else None for place in range(6)]


def test_the_jobs_of_a_series_are_listed_under_it_alone(client: httpx.Client, series: str) -> None:
    children = client.get("/v1/jobs", params={"parent": series, "limit": 100}).json()["items"]
    assert len(children) == 6 + 3
    listed = client.get("/v1/jobs", params={"limit": 100}).json()["items"]
    assert {each["id"] for each in children}.isdisjoint(each["id"] for each in listed)
    (own,) = [each for each in listed if each["id"] == series]
    assert own["document"]["series"] == {"learning_rate": 0.5, "overlaps": True}


def test_a_job_that_is_no_series_has_none(client: httpx.Client, embedded: Embedded) -> None:
    job = seeding.finished(embedded.engine, embedded.artifacts, LOCAL_TENANT)
    assert "not a series" in str(problem(client.get(f"/v1/jobs/{job}/series"), 404)["detail"])


def test_a_series_of_others_is_answered_as_a_random_one(keyed: Keyed, ours: httpx.Client, theirs: httpx.Client) -> None:
    in_store(keyed.artifacts)
    own = ours.post("/v1/jobs", json=DOCUMENT).json()["id"]
    random = own[:-4] + ("0000" if own[-4:] != "0000" else "1111")
    said = [problem(theirs.get(f"/v1/jobs/{each}/series"), 404) for each in (own, random)]
    assert said[0]["detail"] == said[1]["detail"]
    assert ours.get(f"/v1/jobs/{own}/series").json()["points"][1]["stable_below"] == 8.0


@pytest.mark.parametrize(
    ("changes", "pointer", "said"),
    [
        ({"series": {"model": ["step0"]}}, "/series/model", "2 to 200"),
        ({"series": {"model": ["step0", "a b"]}}, "/series/model/1", "is not the name of a branch, tag or commit"),
        ({"model": {"source": "directory", "path": "/c"}, "series": {"model": ["/c/0", "/etc"]}}, "/series/model/0",
         "outside the folders that the operator"),
        ({"series": {"model": ["step0", "step1"]}, "model": {"source": "huggingface", "id": "owner/none"}}, "/model/id",
         "not in the model store"),
    ],
)  # fmt: skip
def test_a_series_that_cannot_be_stores_nothing(
    keyed: Keyed, ours: httpx.Client, changes: dict[str, Any], pointer: str, said: str
) -> None:
    in_store(keyed.artifacts)
    before = ours.get("/v1/jobs", params={"limit": 100}).json()["items"]
    answer = ours.post("/v1/jobs", json=DOCUMENT | changes)
    problem(answer, 422)
    faults = answer.json()["errors"]
    assert faults[0]["pointer"] == pointer
    assert said in faults[0]["message"]
    assert len({(each["pointer"], each["message"]) for each in faults}) == len(faults)
    assert ours.get("/v1/jobs", params={"limit": 100}).json()["items"] == before


def test_a_series_beyond_the_quota_stores_nothing(databases: Databases, tmp_path: Path) -> None:
    more = {"KRONOSCOPE_KEY_SECRET": KEY_SECRET, "KRONOSCOPE_METRICS_TOKEN": METRICS_TOKEN}
    in_store(tmp_path / "artifacts")
    url = databases.migrated("sqlite")
    with (
        serve(url, tmp_path, {**more, "KRONOSCOPE_EMBEDDED": "1", "KRONOSCOPE_QUEUED_JOBS": "7"}) as server,
        server.client() as client,
    ):
        first = client.post("/v1/jobs", json=DOCUMENT | {"series": {"model": ["step0", "step1"]}})
        assert first.status_code == 202, first.text
        refused = client.post("/v1/jobs", json=DOCUMENT)
        assert "3 of your jobs wait, of 7 that may, and these are 5 jobs" in str(problem(refused, 429)["detail"])
        assert [each["id"] for each in client.get("/v1/jobs").json()["items"]] == [first.json()["id"]]
        again = client.post("/v1/jobs", json=DOCUMENT | {"series": {"model": ["step0", "step1", "step2"]}})
        assert again.status_code == 202, again.text


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/estimates"])
def test_what_is_sent_at_once_is_taken_as_far_as_it_fits(databases: Databases, tmp_path: Path, path: str) -> None:
    in_store(tmp_path / "artifacts")
    url = databases.migrated("postgresql")
    engine = open_database(url)
    key = create_key(engine, KEY_SECRET, "ours")
    engine.dispose()
    fits = 5 if path == "/v1/jobs" else 1
    more = {
        "KRONOSCOPE_KEY_SECRET": KEY_SECRET,
        "KRONOSCOPE_QUEUED_JOBS": str(fits),
        "KRONOSCOPE_ESTIMATE_SECONDS": "0",
    }
    with serve(url, tmp_path, more) as server, server.client(key) as client, ThreadPoolExecutor(8) as threads:
        sent = threads.map(lambda _: client.post(path, json=DOCUMENT).status_code, range(16))
        assert sorted(sent) == [202, *[429] * 15]
        assert len(client.get("/v1/jobs").json()["items"]) == int(path == "/v1/jobs")
