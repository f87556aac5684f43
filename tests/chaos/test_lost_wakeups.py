"""The broker forgets, repeats itself, or is not there: every job ends, and each is done once."""

import time
from typing import Any

import pytest

from tests.chaos.stack.gated_jobs import quick_document
from tests.chaos.stack.stack import Stack


def each_was_done_once(stack: Stack, job_ids: list[str]) -> None:
    assert stack.await_end(*job_ids, seconds=600) == ["succeeded"] * len(job_ids)
    for job_id in job_ids:
        row = stack.row(job_id)
        assert (row.attempt, row.failures, row.fence) == (1, 0, 1), stack.describe(job_id)
        assert len(stack.layers(job_id)) == len(stack.events(job_id, "layer")) == 2
        assert [event.data["state"] for event in stack.events(job_id, "state")] == ["queued", "running", "succeeded"]


def held_back(stack: Stack) -> Any:
    """No worker claims anything until this file is gone."""
    gate = stack.folder / "gates" / "claim.hold"
    gate.touch()
    return gate


@pytest.mark.parametrize("queued", [6, pytest.param(100, marks=pytest.mark.nightly)])
def test_flushall_with_many_queued_loses_none(quick: Stack, queued: int) -> None:
    gate = held_back(quick)
    job_ids = [quick.submit(quick_document()) for _ in range(queued)]
    for _ in range(3):
        quick.broker().flushall()
        quick.broker().client_kill_filter(_type="pubsub")
        time.sleep(0.7)
    gate.unlink()
    each_was_done_once(quick, job_ids)


@pytest.mark.parametrize("times", [pytest.param(5, marks=pytest.mark.nightly), 50])
def test_a_wakeup_delivered_many_times_is_one_job(quick: Stack, times: int) -> None:
    gate = held_back(quick)
    job_id = quick.submit(quick_document())
    quick.send_wakeup(times)
    gate.unlink()
    quick.send_wakeup(times)
    each_was_done_once(quick, [job_id])
    quick.send_wakeup(times)  # where nothing is queued
    each_was_done_once(quick, [job_id, quick.submit(quick_document())])


@pytest.mark.nightly(
    covered_by=(
        "tests/api/test_start.py::test_a_probe_says_what_fails",
        "tests/worker/test_celery.py::test_without_redis_jobs_are_done_all_the_same",
        "tests/chaos/test_kill_matrix.py::test_every_job_ends_as_if_nobody_had_killed_anything[redis-before_claim]",
    )
)
def test_without_redis_from_start_to_end_every_job_ends_once(quick: Stack) -> None:
    quick.redis.kill()
    for part in quick.parts:
        part.kill()
    for part in quick.parts:
        part.start()
    quick.await_ready(*quick.parts)
    each_was_done_once(quick, [quick.submit(quick_document()) for _ in range(4)])
    assert all(part.alive for part in quick.parts)
    quick.redis.restart()  # and workers that never saw it receive the wake-up now
    job_id = quick.submit(quick_document())
    each_was_done_once(quick, [job_id])
