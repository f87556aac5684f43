"""kill -9 of each part at each point of a job: it ends, each layer is stored once, with the digests of a quiet run."""

from typing import Any

from tests.chaos.gated_jobs import GatedJob, outcomes
from tests.chaos.processes import gone, until
from tests.chaos.stack import Stack


def test_a_killed_worker_leaves_no_child_and_its_job_keeps_its_rows(stack: Stack, undisturbed: list[Any]) -> None:
    job = GatedJob(stack, "orphan")
    job.hold("row1")
    job_id = job.submit()
    job.await_at("row1")
    first = until(lambda: stack.layers(job_id), 20, "the row that was sent is stored")
    worker = stack.holder(job_id)
    assert worker is not None
    computing = stack.computing(worker)
    assert computing
    worker.kill()
    assert gone(computing, 2)
    job.release("row1")
    assert stack.await_end(job_id) == ["succeeded"]
    assert outcomes(stack, job_id) == undisturbed
    assert {(row.kind, row.ordinal) for row in stack.layers(job_id) if row.attempt == 1} >= {
        (row.kind, row.ordinal) for row in first
    }
    assert stack.verify_artifacts(job_id) >= 7
    row = stack.row(job_id)
    assert (row.attempt, row.failures) == (2, 1)
