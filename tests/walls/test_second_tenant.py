"""A second tenant: without walls between jobs no worker takes any, nothing is lost, and the operator may allow it."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert

from jobs.codec import parse_document
from jobs.devices.registry import Device, Worker, register
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT
from jobs.repository.store import read_job, request_cancel
from jobs.repository.submission import submit
from jobs.scheduling.placement import next_places, placement_of
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import tenants
from jobs.tenancy.shared_workers import BETWEEN_TENANTS, has_second_tenant, sharing_of_workers
from tests.machine.stopwatch import until
from worker.agent.agent import Agent
from worker.process.confinement import Confinement

SECONDS = 240
HOST = Device(uuid="HOST-a", kind="host", name="host", capacity_bytes=2**34)
DOCUMENT = {
    "kind": "capacity",
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
}


def tenant(ledger: Engine, name: str) -> str:
    with writing(ledger) as connection:
        connection.execute(insert(tenants).values(id=name, name=name, created_at=ledger_now()))
    return name


def submitted(ledger: Engine, owner: str) -> str:
    return submit(ledger, owner, parse_document(json.dumps(DOCUMENT).encode())).job.id


def state(ledger: Engine, owner: str, job_id: str) -> tuple[str, int]:
    found = read_job(ledger, owner, job_id)
    assert found is not None
    return found.state, found.attempt


@pytest.fixture
def agent(ledger: Engine, settings: Any, scripted: Any) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def start(isolation: tuple[str, ...] = (), **changes: Any) -> Agent:
        new = Agent(ledger, settings(**changes), scripted(["finish"]), isolation=isolation)
        made.append(new)
        new.start()
        return new

    yield start
    assert all(each.drain(SECONDS) for each in made)


def joined(ledger: Engine, *isolation: str) -> str:
    worker = Worker(id=new_id(), node="n", process_space="s", version="0", slots=1, factories=(), isolation=isolation)
    register(ledger, worker, [HOST], 600)
    return worker.id


def test_without_walls_no_job_starts_once_there_is_a_second_tenant(ledger: Engine, agent: Any) -> None:
    alone = agent(shared_without_walls=False)
    first = submitted(ledger, LOCAL_TENANT)
    until(lambda: state(ledger, LOCAL_TENANT, first) == ("succeeded", 1), SECONDS, "one tenant is served")
    other = tenant(ledger, "other")
    waiting = [(LOCAL_TENANT, submitted(ledger, LOCAL_TENANT)), (other, submitted(ledger, other))]
    assert not alone.take()
    for owner, job_id in waiting:
        assert state(ledger, owner, job_id) == ("queued", 0)
        held = read_job(ledger, owner, job_id)
        assert held is not None
        placement = placement_of(ledger, held)
        assert placement is not None
        assert placement.status == "no_worker"
        assert "there are several tenants" in placement.message
    assert "1 of 1 workers take no job" in sharing_of_workers(ledger)
    assert "KRONOSCOPE_SHARED_WITHOUT_WALLS=1" in sharing_of_workers(ledger)
    agent(BETWEEN_TENANTS, shared_without_walls=False)
    for owner, job_id in waiting:
        until(lambda: state(ledger, owner, job_id) == ("succeeded", 1), SECONDS, "a worker with walls serves both")  # noqa: B023


def test_the_operator_may_allow_it(ledger: Engine, agent: Any) -> None:
    other = tenant(ledger, "other")
    waiting = [(LOCAL_TENANT, submitted(ledger, LOCAL_TENANT)), (other, submitted(ledger, other))]
    agent(shared_without_walls=True)
    for owner, job_id in waiting:
        until(lambda: state(ledger, owner, job_id) == ("succeeded", 1), SECONDS, "both are served")  # noqa: B023
    assert sharing_of_workers(ledger).startswith("several tenants, without walls between them, as")


@pytest.mark.parametrize("missing", BETWEEN_TENANTS)
def test_each_of_the_walls_is_needed(ledger: Engine, missing: str) -> None:
    worker = joined(ledger, *(each for each in BETWEEN_TENANTS if each != missing))
    other = tenant(ledger, "other")
    submitted(ledger, LOCAL_TENANT)
    submitted(ledger, other)
    (place, _) = next_places(ledger, worker, 0)
    assert claim(ledger, place.job_id, "worker", secrets.token_hex(8), 60, place=place) is None
    assert f"({missing})" in sharing_of_workers(ledger)


def test_a_claim_under_way_sees_the_tenant_whose_job_it_takes(ledger: Engine) -> None:
    worker = joined(ledger)
    ours = submitted(ledger, LOCAL_TENANT)
    assert not has_second_tenant(ledger)
    other = tenant(ledger, "other")
    theirs = submitted(ledger, other)
    for place in next_places(ledger, worker, 0):  # the worker's own look at the tenants was before
        assert claim(ledger, place.job_id, "worker", secrets.token_hex(8), 60, place=place) is None
    assert state(ledger, LOCAL_TENANT, ours) == state(ledger, other, theirs) == ("queued", 0)


def test_the_tenant_that_every_ledger_has_counts_from_its_first_job_on(ledger: Engine) -> None:
    tenant(ledger, "only")
    assert not has_second_tenant(ledger)
    submitted(ledger, LOCAL_TENANT)
    assert has_second_tenant(ledger)


def test_a_claim_asks_two_short_questions_more(ledger: Engine) -> None:
    worker = joined(ledger)
    submitted(ledger, LOCAL_TENANT)
    (place,) = next_places(ledger, worker, 0)
    asked: list[str] = []
    event.listen(ledger, "before_cursor_execute", lambda *call: asked.append(call[2]))
    assert claim(ledger, place.job_id, "worker", secrets.token_hex(8), 60, place=place) is not None
    questions = [each for each in asked if each.startswith("SELECT")]
    of_tenants = [each for each in questions if "FROM tenants" in each or "workers.isolation" in each]
    assert len(of_tenants) == 2


def worker_process(url: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a worker to which the kernel lends nothing until nothing is left to do."""
    given = {
        "KRONOSCOPE_DATABASE_URL": url,
        "KRONOSCOPE_ARTIFACTS": str(folder / "artifacts"),
        "KRONOSCOPE_MODEL_STORE": str(folder / "models"),
        "KRONOSCOPE_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-P", "-m", "worker.embedded", "--until-idle"],
        env=os.environ | given | more,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        # behind the filter of a job, as in a container whose profile denies namespaces
        **Confinement().popen_arguments(),
    )


@pytest.mark.parametrize("dialect", ["postgresql"])
def test_a_worker_without_walls_does_not_start_and_one_that_may_computes(
    ledger: Engine, ledger_url: str, tmp_path: Path
) -> None:
    request_cancel(ledger, LOCAL_TENANT, submitted(ledger, LOCAL_TENANT))  # who had a job counts
    other = tenant(ledger, "other")
    job_id = submitted(ledger, other)
    refused = worker_process(ledger_url, tmp_path)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "the worker does not start: the ledger has several tenants" in refused.stderr
    assert "KRONOSCOPE_SHARED_WITHOUT_WALLS=1" in refused.stderr
    assert state(ledger, other, job_id) == ("queued", 0)
    done = worker_process(ledger_url, tmp_path, KRONOSCOPE_SHARED_WITHOUT_WALLS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert state(ledger, other, job_id) == ("succeeded", 1)
