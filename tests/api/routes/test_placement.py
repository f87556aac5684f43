"""Where a job stands with regard to devices: said at submission, shown while it waits, and no part of its version."""

from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy import delete

from jobs.devices.registry import Device, Worker, register
from jobs.schema.database import writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import devices, worker_devices, workers
from jobs.tenancy.api_keys import verify_key
from jobs.tenancy.shared_workers import ALLOWED_WITHOUT
from tests.api import seeding
from tests.api.conftest import Keyed
from tests.api.seeding import DOCUMENT
from tests.api.server import KEY_SECRET


@pytest.fixture(autouse=True)
def nobody_stays(keyed: Keyed) -> Iterator[None]:
    yield
    with writing(keyed.engine) as connection:
        for table in (worker_devices, workers, devices):
            connection.execute(delete(table))


def joined(keyed: Keyed, capacity_bytes: int) -> None:
    worker = Worker(
        id=new_id(), node="node-1", process_space="s", version="0", slots=1, factories=(), isolation=(ALLOWED_WITHOUT,)
    )
    device = Device(uuid=f"FAKE-{capacity_bytes}", kind="fake", name="fake GPU", capacity_bytes=capacity_bytes)
    register(keyed.engine, worker, [device], 600)


def test_a_job_that_no_device_can_hold_says_so_at_once_and_as_long_as_it_is_so(
    keyed: Keyed, ours: httpx.Client
) -> None:
    # no more than the catalog's bound is known of the job before it is planned, so no device is smaller than that one
    joined(keyed, 1_000)
    asked = ours.post("/v1/jobs?validate_only=true", json=DOCUMENT).json()["placement"]
    assert asked["status"] == "no_device"
    assert "the largest known device is FAKE-1000 with 1 kB" in asked["message"]
    answer = ours.post("/v1/jobs", json=DOCUMENT)
    assert answer.status_code == 202
    job = answer.json()
    assert job["placement"] == asked
    assert ours.get(f"/v1/jobs/{job['id']}").json() == job
    assert [each["placement"] for each in ours.get("/v1/jobs").json()["items"] if each["id"] == job["id"]] == [None]
    joined(keyed, 2**34)
    now = ours.get(f"/v1/jobs/{job['id']}")
    assert (now.json()["placement"]["status"], now.json()["placement"]["device"]) == ("waiting", None)
    # the job has not changed: who waits for it to change is not told
    again = ours.get(f"/v1/jobs/{job['id']}", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304
    assert ours.post(f"/v1/jobs/{job['id']}:cancel").json()["placement"] is None


def test_a_job_that_extends_another_needs_what_that_ones_model_needs(keyed: Keyed, ours: httpx.Client) -> None:
    # nothing is known of files before they are read, so the model alone gives a bound
    joined(keyed, 1_000)
    caller = verify_key(keyed.engine, KEY_SECRET, keyed.key)
    assert caller is not None
    first = seeding.finished(keyed.engine, keyed.artifacts, caller.tenant_id, with_factors=True)
    extending = {"kind": "factors", "data": DOCUMENT["data"], "extends": {"job": first}}
    asked = ours.post("/v1/jobs?validate_only=true", json=extending).json()["placement"]
    assert asked["status"] == "no_device"
    assert ours.post("/v1/jobs", json=extending).json()["placement"] == asked


def test_without_workers_a_job_waits_for_one(ours: httpx.Client) -> None:
    job = ours.post("/v1/jobs", json=DOCUMENT).json()
    assert job["placement"]["status"] == "no_worker"
    assert "no worker offers a device; it begins when one does" in job["placement"]["message"]
