"""The checker can fail: it misses each protection that is taken away, and has nothing to say while all are there."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests import servers
from tests.chaos.stack.documents import run_alone
from tests.chaos.stack.gated_jobs import document
from tests.chaos.stack.slices import SLICES, Verdict, run_slice
from tests.chaos.stack.stack import DURABLE

BROKEN = {
    "fence": "stale",
    "reconciler": "lost",
    "reaper": "lost",
    "idempotency": "duplicated",
    "rename": "artifact",
}
"""The promise that each protection keeps."""
ENDS = {"rename": {"succeeded", "cancelled"}}
AT_ONCE = 4
"""They sleep most of the time."""

Verdicts = dict[tuple[str, bool], "Future[Verdict]"]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verdicts]:
    """Of every slice, whole and without its protection, all under way at once."""
    folder = tmp_path_factory.mktemp("slices")
    with servers.private_postgres(**DURABLE) as postgres, ThreadPoolExecutor(AT_ONCE) as pool:
        alone = pool.submit(run_alone, document(), folder / "alone")

        def judged(name: str, removed: bool) -> Verdict:
            place = folder / f"{name}-{'removed' if removed else 'whole'}"
            place.mkdir()
            return run_slice(name, place, alone.result(), postgres, removed=removed)

        yield {(name, removed): pool.submit(judged, name, removed) for name in SLICES for removed in (False, True)}


@pytest.mark.parametrize("name", SLICES)
def test_with_every_protection_in_place_no_promise_is_broken(verdicts: Verdicts, name: str) -> None:
    verdict = verdicts[name, False].result()
    assert not verdict.violations, verdict
    assert {job["state"] for job in verdict.evidence.jobs.values()} == ENDS.get(name, {"succeeded"}), verdict


@pytest.mark.parametrize(("name", "promise"), BROKEN.items())
def test_a_protection_that_is_missing_is_missed(verdicts: Verdicts, name: str, promise: str) -> None:
    verdict = verdicts[name, True].result()
    assert promise in verdict.promises, verdict


def test_the_slices_do_what_they_are_there_for(verdicts: Verdicts) -> None:
    assert verdicts["fence", False].result().refused >= 1
    assert verdicts["fence", True].result().refused == 0
    assert verdicts["fence", False].result().evidence.reclaims == 1
    assert verdicts["reaper", False].result().evidence.reclaims == 1
    assert verdicts["idempotency", False].result().unknown == 1
