"""Jobs whose files are kept in a bucket: waited for while it does not answer, and never computed with if damaged."""

import secrets
import threading
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store
from sqlalchemy import Engine, select

from jobs.objects.artifacts import open_artifacts
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT, Job
from jobs.repository.results import list_artifacts
from jobs.s3_settings import S3Settings
from jobs.schema.database import reading
from jobs.schema.tables import jobs
from worker.settings import WorkerSettings
from worker.supervision.supervisor import Supervisor


@pytest.fixture
def dialect() -> str:
    """Which database it is makes no difference to a bucket."""
    return "sqlite"


@pytest.fixture
def to_bucket(settings: Any) -> Callable[[S3Settings], WorkerSettings]:
    """``to_bucket(bucket)``: settings of a worker that keeps its files there."""

    def make(bucket: S3Settings) -> WorkerSettings:
        found: WorkerSettings = settings()
        return found.model_copy(update={"ledger": found.ledger.model_copy(update={"bucket": bucket})})

    return make


@pytest.fixture
def supervise(ledger: Engine, to_bucket: Any, scripted: Any) -> Callable[..., WorkerSettings]:
    def run(job_id: str, bucket: S3Settings, *steps: Any) -> WorkerSettings:
        chosen: WorkerSettings = to_bucket(bucket)
        held = claim(ledger, job_id, "test", secrets.token_hex(8), chosen.ledger.lease_seconds)
        assert held is not None
        Supervisor(ledger, held, chosen, scripted(*steps)).run()
        return chosen

    return run


def leased_until(ledger: Engine) -> Any:
    """Of the one job that is held."""
    with reading(ledger) as connection:
        return connection.execute(select(jobs.c.lease_expires_at)).scalar_one()


def test_a_store_that_does_not_answer_is_waited_for(
    ledger: Engine, submitted: Any, supervise: Any, bucket: S3Settings, job: Callable[[str], Job], log_lines: Any,
    eventually: Any,
) -> None:  # fmt: skip
    job_id = submitted()
    later = S3Settings(**{**vars(bucket), "bucket": f"{bucket.bucket}-later"})
    steps = (["artifact", "a.json", "{}"], ["layer", 0], ["finish"])
    running = threading.Thread(target=supervise, args=(job_id, later, *steps), daemon=True)
    running.start()
    eventually(lambda: [line for line in log_lines() if "store of artifacts does not answer" in line["event"]])
    assert list_artifacts(ledger, LOCAL_TENANT, job_id) == ()
    leased = leased_until(ledger)
    eventually(lambda: leased_until(ledger) > leased + timedelta(seconds=1))
    made = urllib.request.Request(f"{later.endpoint}/{later.bucket}", method="PUT")
    with urllib.request.urlopen(made, timeout=300):
        running.join(240)
    assert (job(job_id).state, job(job_id).attempt, job(job_id).failures) == ("succeeded", 1, 0)
    assert [each.name for each in list_artifacts(ledger, LOCAL_TENANT, job_id)] == ["a.json"]


def test_factors_of_an_earlier_job_come_from_the_bucket_and_not_if_they_are_damaged(
    ledger: Engine, submitted: Any, supervise: Any, bucket: S3Settings, job: Callable[[str], Job], events: Any
) -> None:
    earlier = submitted(kind="factors")
    files = (["artifact", "factors/0.safetensors", "tensor"], ["artifact", "factors/factors.index.json", "{}"])
    chosen = supervise(earlier, bucket, *files, ["finish"])
    reference = {"model": None, "data": None, "task": None, "factors": {"job": earlier}}
    later = submitted(**reference)
    supervise(later, bucket, ["echo_factors"], ["finish"])
    assert events(later, "log")[0].data["message"] == '{"0.safetensors": "tensor", "factors.index.json": "{}"}'
    assert [path for path in Path(chosen.ledger.artifact_root).rglob("*") if path.is_file()] == []

    folder = open_artifacts(chosen.ledger)
    damaged = next(each for each in list_artifacts(ledger, LOCAL_TENANT, earlier) if each.name.endswith(".safetensors"))
    folder.verify(damaged)
    config: Any = {"endpoint": bucket.endpoint, "access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}
    raw = S3Store(bucket.bucket, prefix=bucket.prefix, config=config, client_options={"allow_http": True})
    obstore.put(raw, damaged.uri, b"tensoR")
    refused = submitted(**reference)
    supervise(refused, bucket, ["echo_factors"], ["finish"])
    assert (job(refused).state, (job(refused).failure or {})["code"]) == ("failed", "artifact_damaged")
    assert events(refused, "log") == []
