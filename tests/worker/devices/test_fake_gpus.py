"""Real workers on made-up GPUs: each job has one to itself, plans within it, and goes to a larger one if it must."""

from typing import Any

import pytest
from sqlalchemy import update

from jobs.devices.registry import list_devices
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.tables import jobs
from worker.devices import fake_gpu

MIB = 2**20
ROOMY, TIGHT = 4096 * MIB, 300 * MIB


@pytest.mark.part(of=2, law="a job goes on on another device")
def test_a_job_that_outgrows_a_small_gpu_ends_on_a_larger_one(
    ledger: Any, started: Any, submitted: Any, job: Any, eventually: Any
) -> None:
    started("tight", TIGHT)
    started("roomy", ROOMY)
    # a plan that is made before the larger one is known stays on the small one
    eventually(lambda: len(list_devices(ledger)) == 2)
    job_id = submitted()
    eventually(lambda: job(job_id).ended)
    done = job(job_id)
    assert (done.state, done.attempt, done.failures) == ("succeeded", 1, 0)
    assert done.needs_bytes <= ROOMY
    assert done.plan["host_peak_bytes"] <= 0.9 * ROOMY
    eventually(lambda: {each.jobs for each in list_devices(ledger)} == {0})
    assert {each.uuid for each in list_devices(ledger)} == {fake_gpu("tight", 0, 1).uuid, fake_gpu("roomy", 0, 1).uuid}


@pytest.mark.real_programs
@pytest.mark.part(of=2, law="a job goes on on another device")
def test_after_a_kill_the_job_goes_on_on_the_same_gpu_under_another_worker(
    ledger: Any, started: Any, submitted: Any, job: Any, eventually: Any, gated: Any
) -> None:
    """The killed worker's guardian ends what computes there; only then is the GPU leased again."""
    job_id = submitted(**gated.document)
    first = started("node", ROOMY, **gated.environment)
    eventually(gated.begun)
    assert [each.jobs for each in list_devices(ledger)] == [1]
    first.kill()
    first.wait()
    with writing(ledger) as connection:  # as it does by itself when nobody renews it any more
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(lease_expires_at=ledger_now(-1)))
    started("node", ROOMY, **gated.environment)
    eventually(lambda: job(job_id).attempt == 2)
    assert job(job_id).failures == 1
    assert [(each.jobs, each.draining) for each in list_devices(ledger)] == [(1, 0)]
