"""An archived job over HTTP: read as before, its archive among its files, and an error where that is damaged."""

import gzip
import json
from typing import Any

import httpx

from jobs.objects.artifacts import ArtifactFolder
from jobs.retention.retention import archive_ended
from tests.api import seeding
from tests.api.conftest import Keyed
from tests.api.expect import problem
from tests.api.routes.test_jobs import tenant


def archived(keyed: Keyed) -> None:
    while archive_ended(keyed.engine, ArtifactFolder(keyed.artifacts), 0, drop_files=False):
        pass


def read(client: httpx.Client, job: str) -> list[Any]:
    """Every way to read layers, page after page."""
    found: list[Any] = []
    for tail in ("layers?limit=3", "layers?kind=capacity&sort=-trace&limit=4", "layers?sort=kappa", "layers/head.0"):
        address = f"/v1/jobs/{job}/{tail}"
        while address:
            answer = client.get(address)
            assert answer.status_code == 200, answer.text
            found.append(answer.json())
            address = answer.links.get("next", {}).get("url", "")
    found += [client.get(f"/v1/jobs/{job}/{tail}").text for tail in ("layers.csv", "layers.jsonl?sort=-trace", "log")]
    return [*found, client.get(f"/v1/jobs/{job}/results").json()["layers"]]


def test_an_archived_job_answers_as_before(keyed: Keyed, ours: httpx.Client) -> None:
    job = seeding.finished(keyed.engine, keyed.artifacts, tenant(keyed))
    before = read(ours, job)
    view = ours.get(f"/v1/jobs/{job}").json()
    assert view["archived_at"] is None
    archived(keyed)
    assert read(ours, job) == before
    now = ours.get(f"/v1/jobs/{job}").json()
    assert now["archived_at"] is not None
    assert now | {"archived_at": None} == view
    problem(ours.get(f"/v1/jobs/{job}/layers/nobody"), 404)
    problem(ours.get(f"/v1/jobs/{job}/layers?limit=101"), 422)
    problem(ours.get(f"/v1/jobs/{job}/layers?sort=canary"), 422)
    problem(ours.get(f"/v1/jobs/{job}/layers?after=canary"), 422)
    answer = ours.get(f"/v1/jobs/{job}/artifacts/archive.jsonl.gz")
    assert json.loads(gzip.decompress(answer.content).splitlines()[0])["job"] == job
    assert ours.delete(f"/v1/jobs/{job}").status_code == 204
    problem(ours.get(f"/v1/jobs/{job}/log"), 404)


def test_a_damaged_archive_is_said_to_be_one(keyed: Keyed, ours: httpx.Client) -> None:
    job = seeding.finished(keyed.engine, keyed.artifacts, tenant(keyed))
    archived(keyed)
    (listed,) = [
        each for each in ours.get(f"/v1/jobs/{job}/artifacts").json()["items"] if each["name"] == "archive.jsonl.gz"
    ]
    (path,) = keyed.artifacts.glob(f"objects/*/*/{listed['sha256']}")
    path.write_bytes(path.read_bytes()[:-40])
    for tail in ("layers", "log", "results"):
        body = problem(ours.get(f"/v1/jobs/{job}/{tail}"), 500)
        assert body["type"] == "urn:kronoscope:problem:artifact-damaged"
