"""Divided jobs whose workers are killed, frozen, drained and cancelled: one result, with the digests of a quiet run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from jobs.repository.pieces import PieceJob, read_pieces
from jobs.schema.database import reading
from jobs.schema.tables import device_leases
from tests.chaos.stack.documents import MEASURED, run_alone
from tests.chaos.stack.gated_jobs import BATCHES, GatedJob, quick_document
from tests.chaos.stack.gated_jobs import document as gated_document
from tests.chaos.stack.processes import Part, gone
from tests.chaos.stack.stack import LONG_LEASES, Stack, running_stack
from tests.machine.stopwatch import until
from tests.machine.template.client import forked

PIECES, WORKERS = 4, 3
EXAMPLES = 4 * BATCHES
SHARDED = {"shards": PIECES, "keep": ["factors"]}
IN_PIECE = "batch10"
"""A forward pass that every piece comes to, and the attempt that divides does not: that one has eight."""
QUICK_PIECES = 5


@pytest.fixture(scope="module")
def three_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A service of one job at a time on each of three workers."""
    settings = LONG_LEASES | {"KRONOSCOPE_SLOTS": "1"}
    with running_stack(tmp_path_factory.mktemp("divided"), workers=WORKERS, settings=settings) as stack:
        yield stack


def test_two_workers_killed_in_one_moment_cost_their_pieces_an_attempt(quick: Stack, tmp_path: Path) -> None:
    """Children that only do what they are told, so that the job's end is known: each piece counts once."""
    stack, gate = quick, tmp_path / "gate"
    job_id = stack.submit(scripted(["wait_for", str(gate)], ["collect"], ["finish", 2]))
    until(lambda: len(pieces(stack, job_id, "running")) == 4, 200, "each slot has a piece")
    assert len(set(map(id, holders(stack, job_id)))) == len(stack.workers) == 2
    killed(stack, *stack.workers)
    for each in stack.workers:
        stack.take_from(each)
    stack.workers[0].start()
    until(lambda: sum(each.failures for each in pieces(stack, job_id)) == 4, 200, lambda: stack.describe(job_id))
    gate.touch()
    assert stack.await_end(job_id) == ["succeeded"], stack.describe(job_id)
    done = pieces(stack, job_id)
    assert [each.state for each in done] == ["succeeded"] * QUICK_PIECES
    assert sorted(each.failures for each in done) == [0, 1, 1, 1, 1]
    assert stack.row(job_id).failures == 0
    (result,) = stack.layers(job_id)
    assert result.outcome["metrics"]["effective_rank"] == sum(n**2 for n in range(2 * QUICK_PIECES))
    until(lambda: nothing_is_held(stack), 200, "every device is given back")


@pytest.mark.nightly(
    covered_by=(
        "tests/chaos/test_divided_jobs.py::test_two_workers_killed_in_one_moment_cost_their_pieces_an_attempt",
        "tests/chaos/test_kill_matrix.py::test_every_job_ends_as_if_nobody_had_killed_anything[worker-mid_layer]",
        "tests/chaos/test_named_faults.py::test_two_zombies_write_nothing",
        "tests/jobs/queue/test_division.py::test_a_piece_is_retried_and_its_end_for_good_fails_the_job",
        "tests/worker/supervision/test_stage_pieces.py::test_a_job_goes_on_after_each_round_with_the_files_of_its_pieces",
        "tests/worker/execution/pieces/test_shard_plans.py::test_any_number_of_pieces_gives_the_figures_of_the_whole",
    )
)
def test_whoever_is_killed_or_frozen_the_job_gives_the_undisturbed_result_once(
    three_workers: Stack, tmp_path: Path
) -> None:
    """One job of four pieces and all faults: its own worker is killed as it divides and as it merges, that of a piece,
    those of two at once; and one sleeps beyond its lease and wakes beside its successor."""
    stack = three_workers
    with forked():  # nothing is done to its processes
        truth = run_alone(gated_document() | SHARDED, tmp_path)
    job = GatedJob(stack, "divided", **SHARDED)
    lose_the_divider(stack, job)
    lose_workers_of_pieces(stack, job)
    wake_a_zombie(stack, job)
    lose_the_merger(stack, job)
    assert stack.await_end(job.id) == ["succeeded"]

    row, done = stack.row(job.id), pieces(stack, job.id)
    rounds = len({each.piece.round for each in done})
    # claimed to divide, which was lost, and again; in the last round claimed to merge, which was lost, and again
    assert moves(stack, job.id) == [
        *("queued", "running", "queued", "running", "waiting"),
        *("queued", "running", "waiting") * (rounds - 1),
        *("queued", "running", "queued", "running", "succeeded"),
    ]
    assert (row.attempt, row.failures) == (rounds + 3, 2)
    assert {(each.kind, each.ordinal): each.sha256 for each in stack.layers(job.id)} == truth.rows
    listed = {each.name: each.sha256 for each in stack.listed(job.id) if each.name not in MEASURED}
    assert listed == truth.artifacts
    assert stack.verify_artifacts(job.id) >= len(listed)
    alone = json.loads((tmp_path / "out/job.json").read_text())
    for name in ("model_sha256", "data_sha256", "examples"):
        assert row.manifest[name] == alone[name]
    # every example once: by what each piece says it has read, and by what the result counts
    collected = [each for each in done if each.piece.round == "collect"]
    assert [each.piece.index for each in collected] == list(range(PIECES))
    assert [each.piece.begin for each in collected] == [0, *(each.piece.end for each in collected[:-1])]
    assert all(each.examples == (each.piece.end or 0) - (each.piece.begin or 0) for each in collected)
    assert sum(each.examples or 0 for each in collected) == row.manifest["examples"] == EXAMPLES
    assert set(states(stack, job.id)) == {"succeeded"}
    assert sum(each.failures for each in done) == 4
    until(lambda: nothing_is_held(stack), 200, "every device is given back")


def lose_the_divider(stack: Stack, job: GatedJob) -> None:
    """kill -9 of the job's worker before it has divided; the next one divides."""
    job.hold("start")
    job.submit()
    job.await_at("start")
    lost(stack, stack.await_holder(job.id))
    job.hold(IN_PIECE)
    job.release("start")
    stack.await_state(job.id, "waiting")
    assert len(pieces(stack, job.id)) == PIECES


def lose_workers_of_pieces(stack: Stack, job: GatedJob) -> None:
    """kill -9 of one that computes a piece, then of two at once; all are at work again after it."""
    job.await_at(IN_PIECE, writers=WORKERS)
    lost(stack, holders(stack, job.id)[0])
    job.await_at(IN_PIECE, writers=WORKERS + 1)
    lost(stack, *holders(stack, job.id)[:2])
    job.await_at(IN_PIECE, writers=WORKERS + 3)
    assert sum(each.failures for each in pieces(stack, job.id)) == 3


def wake_a_zombie(stack: Stack, job: GatedJob) -> None:
    """SIGSTOP of one with a piece half done, which another computes then; what it wants to write is refused."""
    zombie = holders(stack, job.id)[0]
    (frozen,) = [each.id for each in pieces(stack, job.id, "running") if stack.holder(each.id) is zombie]
    computing = stack.computing(zombie)
    zombie.pause()
    job.release(IN_PIECE)  # what it computes goes on, and fills the pipe
    until(lambda: states(stack, job.id).count("succeeded") == PIECES - 1, 300, lambda: states(stack, job.id))
    job.hold("start")
    stack.take_from(zombie)
    until(lambda: stack.holder(frozen) not in (None, zombie), 200, "another worker takes the piece")
    job.await_at("start")
    taken = stack.row(frozen).fence
    zombie.resume()
    until(lambda: zombie.said("nothing more is written"), 200, f"{zombie.name} sees that it lost")
    assert gone(computing, 200)
    assert (stack.row(frozen).fence, stack.state(frozen), stack.listed(frozen)) == (taken, "running", [])
    (stack.folder / "gates" / f"settle-{job.id}.hold").touch()
    job.release("start")


def lose_the_merger(stack: Stack, job: GatedJob) -> None:
    """kill -9 of the job's worker when it has merged and measured, and its end is not written."""
    gates = stack.folder / "gates"
    until(lambda: list(gates.glob(f"settle-{job.id}.*.seen")), 300, lambda: stack.describe(job.id))
    assert stack.layers(job.id)
    merger = stack.holder(job.id)
    assert merger is not None
    lost(stack, merger)
    (gates / f"settle-{job.id}.hold").unlink()


@pytest.mark.nightly(
    covered_by=(
        "tests/jobs/queue/test_division.py::test_a_cancelled_job_is_cancelled_once_its_last_piece_has_stopped",
        "tests/jobs/queue/test_division.py::test_a_piece_is_retried_and_its_end_for_good_fails_the_job",
        "tests/jobs/queue/test_division.py::test_a_deadline_that_passes_in_the_queue_ends_the_job_with_its_pieces",
        "tests/jobs/queue/test_division.py::test_a_schedule_reaches_the_pieces_and_that_of_a_piece_its_job",
        "tests/worker/supervision/test_stage_pieces.py::test_a_piece_that_cannot_be_computed_fails_its_job",
        "tests/worker/supervision/test_supervisor.py::test_a_drain_hands_the_job_back_uncounted",
    )
)
def test_cancels_failures_deadlines_priorities_and_drains_reach_every_piece(quick: Stack, tmp_path: Path) -> None:
    """Children that only do what they are told: four jobs one after another, three of which are ended early."""
    stack = quick
    with stack.client() as client:
        # a priority, for those that run and those that wait; then a drain in the midst of it, uncounted
        gate = tmp_path / "gate"
        whole = stack.submit(scripted(["wait_for", str(gate)], ["collect"], ["finish", 2]))
        until(lambda: len(pieces(stack, whole, "running")) == 4, 200, "each slot has a piece")
        running = [each.id for each in pieces(stack, whole, "running")]
        answer = client.put(f"/v1/jobs/{whole}/schedule", json={"priority": 7})
        assert answer.status_code == 200, answer.text
        assert {stack.row(each.id).priority for each in pieces(stack, whole)} == {7}
        drained = stack.holder(running[0])
        assert drained is not None
        drained.terminate()
        gate.touch()
        drained.ended(300)
        drained.start()
        assert stack.await_end(whole) == ["succeeded"]
        assert [each.failures for each in pieces(stack, whole)] == [0] * QUICK_PIECES
        (result,) = stack.layers(whole)
        assert result.outcome["metrics"]["effective_rank"] == sum(n**2 for n in range(2 * QUICK_PIECES))

        # cancelled in the middle: one is done, others run, one waits
        job_id = stack.submit(scripted(["at", 0, ["collect"], ["finish", 2]], ["wait_for", str(tmp_path / "never")]))
        until(lambda: states(stack, job_id) == ["succeeded", *["running"] * 4], 200, lambda: states(stack, job_id))
        begun = [stack.row(each.id).fence for each in pieces(stack, job_id)]
        stack.cancel(pieces(stack, job_id)[3].id)  # a piece alone means nothing, so the job
        assert stack.await_end(job_id) == ["cancelled"]
        assert states(stack, job_id) == ["succeeded", *["cancelled"] * 4]
        assert [stack.row(each.id).fence for each in pieces(stack, job_id)] == begun
        assert stack.layers(job_id) == stack.listed(job_id) == []
        assert client.delete(f"/v1/jobs/{job_id}").status_code == 204

        # one that cannot be computed: the others are cancelled, and the job names it
        never = ["wait_for", str(tmp_path / "never")]
        job_id = stack.submit(scripted(["at", 2, ["fail", "usage", "bad_row", "row 7 is empty"]], never))
        assert stack.await_end(job_id) == ["failed"]
        failure = stack.row(job_id).failure
        assert (failure["category"], failure["code"]) == ("usage", "bad_row")
        assert failure["message"].startswith(f"piece 3 of {QUICK_PIECES} of the round `collect` (job ")
        assert failure["message"].endswith("failed: row 7 is empty")
        each_has_ended(stack, job_id, "failed")

        # a deadline that passes while pieces run
        job_id = stack.submit(scripted(never) | {"schedule": {"within": "1h"}})
        until(lambda: pieces(stack, job_id, "running"), 200, "a piece runs")
        client.put(f"/v1/jobs/{job_id}/schedule", json={"within": "1s"})
        assert stack.await_end(job_id) == ["failed"]
        assert stack.row(job_id).failure["code"] == "deadline_exceeded"
        each_has_ended(stack, job_id, "failed")
    until(lambda: nothing_is_held(stack), 200, "every device is given back")


def scripted(*steps: list[Any]) -> dict[str, Any]:
    """A job whose pieces do this, and which merges what they give."""
    divides = ["divide", QUICK_PIECES]
    script = [["started"], ["if_piece", *steps], divides, ["merge"], ["summary"], ["finish"]]
    return quick_document(*script) | {"shards": QUICK_PIECES}


def each_has_ended(stack: Stack, job_id: str, *own: str) -> None:
    """All pieces soon stop after their job; each ended as one of these, or was cancelled."""
    until(lambda: set(states(stack, job_id)) <= {*own, "cancelled", "succeeded"}, 200, lambda: states(stack, job_id))
    assert "cancelled" in states(stack, job_id)


def pieces(stack: Stack, job_id: str, state: str | None = None) -> list[PieceJob]:
    found = read_pieces(stack.engine, stack.row(job_id).tenant_id, job_id)
    return [each for each in found if state in (None, each.state)]


def states(stack: Stack, job_id: str) -> list[str]:
    return [each.state for each in pieces(stack, job_id)]


def moves(stack: Stack, job_id: str) -> list[str]:
    return [event.data["state"] for event in stack.events(job_id, "state")]


def holders(stack: Stack, job_id: str) -> list[Part]:
    """The workers that hold a piece."""
    found = [stack.holder(each.id) for each in pieces(stack, job_id, "running")]
    return [each for each in found if each is not None]


def nothing_is_held(stack: Stack) -> bool:
    with reading(stack.engine) as connection:
        return connection.execute(select(func.count()).select_from(device_leases)).scalar_one() == 0


def lost(stack: Stack, *workers: Part) -> None:
    """kill -9 of workers in one moment, with all they compute; they are started again as a supervisor would."""
    killed(stack, *workers)
    for worker in workers:
        stack.take_from(worker)
        worker.start()


def killed(stack: Stack, *workers: Part) -> None:
    """kill -9 of workers in one moment, with all they compute."""
    computing = [pid for worker in workers for pid in stack.computing(worker)]
    for worker in workers:
        worker.kill()
    assert gone(computing, 200)
