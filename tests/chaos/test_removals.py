"""The checker can fail: it misses each protection that is taken away, and has nothing to say while all are there."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests import servers
from tests.chaos.stack.documents import run_alone
from tests.chaos.stack.gated_jobs import document
from tests.chaos.stack.slices import SLICES, Verdict, run_slice
from tests.chaos.stack.stack import DURABLE

BROKEN = {
    "fence": "stale",
    "poll": "lost",
    "reaper": "lost",
    "idempotency": "duplicated",
    "rename": "artifact",
}
"""The promise that each protection keeps."""
ENDS = {"rename": {"succeeded", "cancelled"}}
FAULTS = (
    "tests/chaos/test_named_faults.py::test_two_zombies_write_nothing",
    "tests/chaos/test_lost_wakeups.py::test_flushall_with_many_queued_loses_none",
    "tests/chaos/test_kill_matrix.py::test_every_job_ends_as_if_nobody_had_killed_anything[worker-mid_layer]",
    "tests/api/background/test_database_loss.py::test_a_submission_whose_commit_nobody_confirmed_is_repeated_safely",
)
"""Tests of a landing that miss a protection: the fence, the reconciler, the reaper, and idempotency."""
CHECKER = ("tests/chaos/test_checker.py::test_each_broken_promise_is_told",)
"""The checker's sentence for each broken promise, in a landing."""

Verdicts = Callable[[str, bool], Verdict]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verdicts]:
    """Judge a slice, whole or without its protection; each is run once, when a test first asks for it."""
    folder = tmp_path_factory.mktemp("slices")
    with servers.private_postgres(**DURABLE) as postgres:
        alone = run_alone(document(), folder / "alone")

        @cache
        def judged(name: str, removed: bool) -> Verdict:
            place = folder / f"{name}-{'removed' if removed else 'whole'}"
            place.mkdir()
            return run_slice(name, place, alone, postgres, removed=removed)

        yield judged


@pytest.mark.nightly(covered_by=(*FAULTS, "tests/chaos/test_checker.py::test_a_sound_job_breaks_no_promise"))
@pytest.mark.parametrize("name", SLICES)
def test_with_every_protection_in_place_no_promise_is_broken(verdicts: Verdicts, name: str) -> None:
    verdict = verdicts(name, False)
    assert not verdict.violations, verdict
    assert {job["state"] for job in verdict.evidence.jobs.values()} == ENDS.get(name, {"succeeded"}), verdict


@pytest.mark.nightly(covered_by=(*FAULTS, *CHECKER))
@pytest.mark.parametrize(("name", "promise"), BROKEN.items())
def test_a_protection_that_is_missing_is_missed(verdicts: Verdicts, name: str, promise: str) -> None:
    verdict = verdicts(name, True)
    assert promise in verdict.promises, verdict


@pytest.mark.nightly(covered_by=FAULTS)
@pytest.mark.parametrize("name", ["fence", "reaper", "idempotency"])
def test_the_slices_do_what_they_are_there_for(verdicts: Verdicts, name: str) -> None:
    verdict = verdicts(name, False)
    if name == "fence":
        assert verdict.refused >= 1
    if name == "idempotency":
        assert verdict.unknown == 1
    else:
        assert verdict.evidence.reclaims == 1


@pytest.mark.nightly(covered_by=(*FAULTS, *CHECKER))
def test_without_the_fence_nobody_is_refused(verdicts: Verdicts) -> None:
    assert verdicts("fence", True).refused == 0
