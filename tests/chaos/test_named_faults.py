"""Workers that are frozen, told to go, or given jobs that kill: nothing is written twice and nothing begins anew."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import CHECKPOINTS
from tests.chaos.stack.gated_jobs import BATCHES, GatedJob, outcomes, quick_document
from tests.chaos.stack.processes import Part, gone
from tests.chaos.stack.stack import LONG_LEASES, Stack, running_stack
from tests.machine.stopwatch import Stopwatch, until

DRY_RUNS = 2
"""Forward passes before the first batch."""
MAX_FAILURES = 5
HANDED_BACK_SECONDS = 10
"""What is promised; the stopwatch leaves out what was taken from the machine."""
HEARTBEATS = 4
SKEWS = {"worker0": 7200, "worker1": -7200}
SHIFT = Path(__file__).parent / "shifted_clock"


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Three workers: two sleep, and one goes on."""
    with running_stack(tmp_path_factory.mktemp("stack"), workers=3, settings=LONG_LEASES | CHECKPOINTS) as stack:
        yield stack


def test_two_zombies_write_nothing(stack: Stack, undisturbed: list[Any]) -> None:
    """Frozen with a job half done, while their children compute on and fill the pipes; one wakes beside its successor
    that is in the midst of the job, the other after the end."""
    job = GatedJob(stack, "zombie")
    job.hold("batch12")
    job_id = job.submit()
    zombies = []
    for _ in range(2):
        job.await_at("batch12")
        zombie = stack.holder(job_id)
        assert zombie is not None
        zombie.pause()
        zombies.append((zombie, stack.computing(zombie)))
        job.seen_again("batch12")
        stack.take_from(zombie)
    job.await_at("batch12")
    finisher = stack.holder(job_id)
    assert finisher not in [zombie for zombie, _ in zombies]
    job.hold("row3")
    job.release("batch12")
    until(lambda: len(stack.layers(job_id)) == 3, 200, "the successor's rows are stored")
    job.await_at("row3", writers=3)
    during = stack.fingerprint(job_id, running=True)
    wakes(*zombies[0])
    assert stack.fingerprint(job_id, running=True) == during
    assert stack.row(job_id).fence == 3
    job.release("row3")
    assert stack.await_end(job_id) == ["succeeded"]
    after = stack.fingerprint(job_id)
    wakes(*zombies[1])
    assert stack.fingerprint(job_id) == after
    assert outcomes(stack, job_id) == undisturbed
    row = stack.row(job_id)
    assert (row.attempt, row.failures, row.fence) == (3, 2, 3)


def wakes(zombie: Part, computing: list[int]) -> None:
    """It goes on where it was frozen, tries to write, and lets go."""
    zombie.resume()
    until(lambda: zombie.said("nothing more is written"), 200, f"{zombie.name} sees that it lost")
    assert gone(computing, 200)


def test_a_busy_worker_hands_its_job_back_and_another_goes_on_from_the_checkpoint(
    stack: Stack, undisturbed: list[Any]
) -> None:
    job = GatedJob(stack, "drained", seconds=0.15)
    job.hold("batch12")
    job_id = job.submit()
    job.await_at("batch12")
    worker = stack.holder(job_id)
    assert worker is not None
    others = [each for each in stack.workers if each is not worker]
    for each in others:
        each.pause()  # or one of them would take the job before it is looked at
    told = Stopwatch()
    worker.terminate()
    job.release("batch12")
    stack.await_state(job_id, "queued")
    assert told.seconds() <= HANDED_BACK_SECONDS
    handed = stack.row(job_id)
    assert (handed.attempt, handed.failures, handed.lease_owner) == (0, 0, None)
    assert worker.ended(300) == 0
    kept = checkpointed_batches(stack.artifacts / job_id)
    passed = job.forward_passes() - DRY_RUNS
    assert 0 < kept <= passed
    for each in others:
        each.resume()
    assert stack.await_end(job_id) == ["succeeded"]
    # repeated are passed - kept batches: those since the checkpoint, which no clock makes more than a few
    (line,) = [event.data["message"] for event in stack.events(job_id, "log") if "resumed" in event.data["message"]]
    assert f"batch {kept} of {BATCHES}" in line
    assert outcomes(stack, job_id) == undisturbed
    assert (stack.row(job_id).attempt, stack.row(job_id).failures) == (1, 0)


@pytest.mark.nightly(
    covered_by=(
        "tests/worker/supervision/test_supervisor.py::test_the_same_crash_twice_is_poison",
        "tests/chaos/test_kill_matrix.py::test_every_job_ends_as_if_nobody_had_killed_anything[child-mid_collection]",
    )
)
def test_a_poison_job_ends_and_others_go_on(quick: Stack) -> None:
    poison = [["started"], ["progress", "capacity", 0, 2], ["layer", 0], ["kill_self"]]
    poisoned = quick.submit(quick_document(*poison))
    others = [quick.submit(quick_document()) for _ in range(5)]
    assert quick.await_end(poisoned, *others) == ["failed", *["succeeded"] * len(others)]
    row = quick.row(poisoned)
    assert (row.attempt, row.failures, row.failure["category"], row.failure["code"]) == (2, 2, "fatal", "crashed")
    assert len(quick.layers(poisoned)) == 1
    assert [quick.row(other).attempt for other in others] == [1] * len(others)


@pytest.mark.nightly(
    covered_by=(
        "tests/jobs/queue/test_reaper.py::test_a_job_that_kills_every_worker_ends_after_max_failures",
        "tests/chaos/test_kill_matrix.py::test_every_job_ends_as_if_nobody_had_killed_anything[worker-mid_layer]",
    )
)
def test_a_job_that_kills_its_worker_ends_after_its_failures_and_others_go_on(quick: Stack) -> None:
    murderer = quick.submit(quick_document(["started"], ["murder"]))
    others = []
    deaths = 0

    def restarted() -> bool:
        """As whatever supervises the workers does."""
        nonlocal deaths
        for worker in quick.workers:
            if not worker.alive:
                deaths += 1
                quick.take_from(worker)
                worker.start()
                others.append(quick.submit(quick_document()))
        return quick.state(murderer) == "failed"

    until(restarted, 400, "the murderer ends")
    row = quick.row(murderer)
    assert (row.failures, row.attempt, deaths) == (MAX_FAILURES, MAX_FAILURES, MAX_FAILURES)
    assert row.failure["code"] == "worker_lost"
    assert quick.await_end(*others) == ["succeeded"] * len(others)
    assert all(worker.alive for worker in quick.workers)


@pytest.fixture
def skewed(shared_stack: Stack, tmp_path: Path) -> Iterator[list[Part]]:
    """One worker that lives in the future and one in the past, and no other; their children compute nothing."""
    environments = {worker.name: dict(worker.environment) for worker in shared_stack.workers}
    for worker in shared_stack.workers:
        worker.kill()
    chosen = [worker for worker in shared_stack.workers if worker.name in SKEWS]
    for worker in chosen:
        folder = tmp_path / worker.name
        shutil.copytree(SHIFT, folder)
        (folder / "seconds").write_text(str(SKEWS[worker.name]))
        path = f"{folder}:{worker.environment['PYTHONPATH']}"
        worker.start(PYTHONPATH=path, CHAOS_QUICK="1", KRONOSCOPE_SLOTS="2")
    shared_stack.await_ready(*chosen)
    yield chosen
    for worker in shared_stack.workers:
        worker.kill()
        worker.environment = environments[worker.name]  # with which a test that follows revives it


def test_clocks_two_hours_off_steal_nothing(shared_stack: Stack, skewed: list[Part], tmp_path: Path) -> None:
    """Between them the two hold four jobs, and renew their leases."""
    quick = shared_stack
    now = time.time()
    for worker in skewed:
        told = json.loads(next(line for line in worker.lines()[::-1] if "worker starts" in line))["timestamp"]
        shown = time.mktime(time.strptime(told[:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone
        assert abs(shown - now - SKEWS[worker.name]) < 600, "the clock of this worker is not shifted"
    gate = tmp_path / "gate"
    held = [quick.submit(quick_document(["started"], ["wait_for", str(gate)], ["finish"])) for _ in range(4)]
    for job_id in held:
        quick.await_state(job_id, "running")
    seen: dict[str, set[Any]] = {job_id: set() for job_id in held}

    def renewed() -> bool:
        """By the hours that the clocks are off a lease would have run out, or been seen to have, at the first."""
        for job_id in held:
            seen[job_id].add(quick.row(job_id).lease_expires_at)
        return all(len(leases) > HEARTBEATS for leases in seen.values())

    until(renewed, 200, lambda: f"all leases are renewed: {[quick.describe(job_id) for job_id in held]}")
    assert [(row.state, row.fence) for row in map(quick.row, held)] == [("running", 1)] * 4
    gate.touch()
    assert quick.await_end(*held) == ["succeeded"] * 4
    assert [(row.attempt, row.failures) for row in map(quick.row, held)] == [(1, 0)] * 4


def checkpointed_batches(folder: Path) -> int:
    """How many batches the checkpoint holds that the handed-back attempt has left."""
    (manifest,) = folder.rglob("checkpoint.json")
    batches: int = json.loads(manifest.read_text())["body"]["cursor"]["batches"]
    return batches
