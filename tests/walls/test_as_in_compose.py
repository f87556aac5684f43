"""A worker with the rights that Compose gives it, and a job whose own code attacks the job beside it."""

import os

import pytest

from jobs.records import LOCAL_TENANT
from jobs.repository.results import events_after, layer_rows
from tests.walls.compose import Compose
from tests.walls.interpreter import JOBS, PACKAGES, PROGRAMS, ROOT, is_open
from tests.walls.programs.kronoscope_test_evil import told

HONEST = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits"},
    "task": {"type": "classification"},
    "keep": ["factors"],
    "cache": "refresh",
}
GREEDY = """
import os, time
from pathlib import Path


def model(nameless):
    place = Path(os.environ["HOME"]) / "closed"
    place.mkdir(mode=0o700)
    for number in range(64):
        with open(place / str(number), "wb") as file:
            file.write(os.urandom(2**20))
            file.flush()
            if nameless:
                os.unlink(file.name)
                os.dup(file.fileno())
    time.sleep(600)
"""

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not is_open(ROOT) or not is_open(PACKAGES),
    reason="only root may start a worker with these rights, on a project that every user may read",
)


def said_of(compose: Compose, job_id: str) -> str:
    events = events_after(compose.ledger, LOCAL_TENANT, job_id)
    return "\n".join(str(each.data.get("message", "")) for each in events)


@pytest.mark.nightly(
    covered_by=(
        "tests/walls/test_namespaces.py::test_nothing_is_gained_from_the_job_beside_it",
        "tests/walls/test_further_attacks.py::test_nothing_is_gained",
        "tests/walls/test_caches.py::test_a_job_in_namespaces_of_its_own_reads_what_was_found_for_it",
    )
)
def test_the_job_beside_an_attacker_gets_the_numbers_of_an_undisturbed_run(compose: Compose) -> None:
    compose.factory("kronoscope_test_evil", (PROGRAMS / "kronoscope_test_evil.py").read_text())
    alone = compose.submit(HONEST)
    log = compose.done()
    assert '"neighbours"' in log
    assert compose.job(alone).state == "succeeded", log[-4_000:]
    data = {"source": "synthetic", "shape": [12], "examples": 40, "classes": 3}
    folders = {"artifacts": str(compose.place / "artifacts"), "models": str(compose.place / "models")}
    beside = compose.submit(HONEST)
    told_of = {**folders, "known": [alone, beside]}
    evil = {"source": "factory", "factory": "kronoscope_test_evil:model", "kwargs": told_of}
    attacker = compose.submit(HONEST | {"model": evil, "data": data})
    compose.done()
    (layer,) = {row.layer for row in layer_rows(compose.ledger, LOCAL_TENANT, attacker).items}
    said = told(layer)
    assert said["others"], "the two have met"
    assert JOBS <= said["user"] < JOBS + 40_000
    assert (said["gains"], said["seen"]) == (0, [])
    for each in (alone, attacker, beside):
        assert (compose.job(each).state, compose.job(each).attempt) == ("succeeded", 1)
    assert compose.digests(beside) == compose.digests(alone)
    assert len(compose.digests(beside)) == 10  # six rows and four files
    # what was left in the cache is what the next one finds
    later = compose.submit(HONEST | {"cache": "use"})
    log = compose.done()
    assert compose.job(later).state == "succeeded", log[-4_000:]
    assert f"factors from the cache of job {beside}" in said_of(compose, later)
    assert compose.digests(later) == compose.digests(alone)


@pytest.mark.nightly(
    covered_by=("tests/walls/test_quota.py::test_a_job_with_too_much_on_the_disk_is_ended_with_the_figure",)
)
def test_the_job_beside_one_that_fills_the_disk_succeeds(compose: Compose) -> None:
    compose.factory("kronoscope_test_greedy", GREEDY)
    factory = {"source": "factory", "factory": "kronoscope_test_greedy:model"}
    data = {"source": "synthetic", "shape": [12], "examples": 40, "classes": 3}
    greedy = [
        compose.submit(HONEST | {"model": factory | {"kwargs": {"nameless": nameless}}, "data": data})
        for nameless in (True, False)
    ]
    beside = compose.submit(HONEST)
    compose.done(KRONOSCOPE_CHILD_DISK_BYTES=str(32 * 2**20))
    assert (compose.job(beside).state, compose.job(beside).attempt) == ("succeeded", 1), compose.job(beside).failure
    for each in greedy:
        failure = compose.job(each).failure
        assert failure is not None
        assert (compose.job(each).attempt, failure["category"], failure["code"]) == (1, "usage", "disk_limit")
        assert "33,554,432" in failure["message"]
        assert not (compose.place / "artifacts" / each).exists()
