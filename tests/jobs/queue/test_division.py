"""A job divides once, its pieces are ordinary jobs, and the end of the last one decides, whoever else ends then."""

import secrets
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, and_, null, select, update

from catalog.frames import ArtifactWritten, Divided, Failed, Finished
from catalog.requests.schedule import Schedule
from jobs.autoscale.demand import read_waiting
from jobs.errors import JobNotFound, JobStillActive, LeaseLost, PieceRefused, QueueFull
from jobs.queue import attempt_endings, attempt_writes, piece_progress, reaper
from jobs.queue.claims import claim
from jobs.queue.division import divide
from jobs.queue.piece_progress import report_piece
from jobs.records import LOCAL_TENANT, Claim, Job
from jobs.repository.events import read_history
from jobs.repository.pieces import read_pieces
from jobs.repository.results import list_artifacts
from jobs.repository.store import JobQuery, delete_job, list_jobs, read_job, request_cancel, reschedule
from jobs.scheduling.fair_share import fair_order, has_running_slot, is_due
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import jobs
from jobs.tenancy.quotas import require_place
from tests.conftest import Dialect
from tests.jobs.conftest import ON_BOTH, POSTGRESQL_OFTEN
from tests.jobs.queue.conftest import BATCH, frame
from tests.queue_order import next_claimable


@pytest.fixture(params=POSTGRESQL_OFTEN)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """SQLite by the commit, but for the tests that between them run each statement of this file."""
    chosen: Dialect = request.param
    return chosen


def within_cap(ledger: Engine) -> list[str]:
    """What may be claimed where a tenant may run one job at a time."""
    with reading(ledger) as connection:
        order = fair_order(connection.dialect.name, 20, and_(is_due(), has_running_slot()), null())
        return list(connection.execute(order, {"most_running": 1}).scalars())


def claimed(ledger: Engine, job_id: str) -> Claim:
    made = claim(ledger, job_id, "worker-1:7", secrets.token_hex(8), 3600)
    assert made is not None
    return made


def seen(ledger: Engine, job_id: str) -> Job:
    found = read_job(ledger, LOCAL_TENANT, job_id)
    assert found is not None
    return found


def states(ledger: Engine, parent_id: str) -> list[str]:
    return [each.state for each in read_pieces(ledger, LOCAL_TENANT, parent_id)]


def events(ledger: Engine, job_id: str, kind: str) -> list[Any]:
    history = read_history(ledger, LOCAL_TENANT, job_id, 0)
    assert history is not None
    return [event.data for event in history.events if event.type == kind]


def test_a_division_makes_ordinary_jobs_in_their_parents_place(
    ledger: Engine, divided: Callable[..., Any], queued: Callable[..., str], woken: Callable[[], int]
) -> None:
    mine, ids = divided(3, schedule={"priority": 4, "within": "1h"}, labels={"of": "all"})
    queued(schedule={"priority": 4})
    parent = seen(ledger, mine.job_id)
    assert (parent.state, parent.progress["percent"], parent.progress["total"]) == ("waiting", 0.0, 3 * BATCH)
    for index, piece in enumerate(map(seen, [ledger] * 3, ids)):
        assert (piece.state, piece.name, piece.parent_id) == ("queued", f"digits · piece {index + 1} of 3", mine.job_id)
        assert piece.piece["begin"] == index * BATCH
        for same in (
            "document",
            "document_sha256",
            "priority",
            "deadline_at",
            "needs_bytes",
            "plan",
            "queued_at",
            "kinds",
        ):
            assert getattr(piece, same) == getattr(parent, same), same
        assert events(ledger, piece.id, "state") == [{"state": "queued", "attempt": 0}]
    # the pieces precede what was submitted after their parent
    assert set(next_claimable(ledger)[:3]) == set(ids)
    with writing(ledger) as connection:
        row = connection.execute(select(jobs).where(jobs.c.id == mine.job_id)).one()
    assert woken() == 3  # for their parent, all of them, and the later job
    assert (row.lease_owner, row.lease_expires_at, row.claim_token) == (None, None, None)
    assert claimed(ledger, ids[0]).plan["threads"] == 3


@ON_BOTH
def test_lists_show_whole_jobs_and_pieces_where_they_are_asked_for(ledger: Engine, divided: Callable[..., Any]) -> None:
    mine, ids = divided(3)
    assert [job.id for job in list_jobs(ledger, LOCAL_TENANT).items] == [mine.job_id]
    of_parent = list_jobs(ledger, LOCAL_TENANT, JobQuery(parent=mine.job_id)).items
    assert sorted(job.id for job in of_parent) == sorted(ids)
    assert [job.id for job in list_jobs(ledger, LOCAL_TENANT, JobQuery(id_end=ids[1][-12:])).items] == [ids[1]]
    assert list_jobs(ledger, LOCAL_TENANT, JobQuery(parent=ids[0])).items == ()
    for tenant, parent in (("another", mine.job_id), (LOCAL_TENANT, "no id"), (LOCAL_TENANT, new_id())):
        with pytest.raises(JobNotFound):
            list_jobs(ledger, tenant, JobQuery(parent=parent))
    assert read_pieces(ledger, "another", mine.job_id) == ()


def test_a_zombie_divides_nothing_and_a_repeated_division_is_refused(
    ledger: Engine, divided: Callable[..., Any], held: Callable[..., Claim], expire: Callable[[str], None]
) -> None:
    mine, _ = divided(3)
    with pytest.raises(LeaseLost):
        divide(ledger, mine, frame(3))
    zombie = held(shards=2)
    expire(zombie.job_id)
    assert reaper.reap_expired(ledger) == 1
    with pytest.raises(LeaseLost):
        divide(ledger, zombie, frame(2))
    assert read_pieces(ledger, LOCAL_TENANT, zombie.job_id) == ()


@ON_BOTH
def test_the_last_piece_to_succeed_queues_the_job_once(
    ledger: Engine, divided: Callable[..., Any], at_once: Callable[..., list[Any]], failure: Callable[..., Failed]
) -> None:
    """Eight pieces end in the same moment; whoever is last must see that it is, and nobody else."""
    mine, ids = divided(8)
    claims = [claimed(ledger, each) for each in ids]
    assert next_claimable(ledger) == []
    ended = at_once(
        8, lambda n: attempt_endings.finish(ledger, claims[n], Finished(data_sha256=f"{n:064}", examples=n))
    )
    assert ended == ["succeeded"] * 8
    assert [data["state"] for data in events(ledger, mine.job_id, "state")] == [
        "queued",
        "running",
        "waiting",
        "queued",
    ]
    ends = [data["job"] for data in events(ledger, mine.job_id, "piece") if data["state"] == "succeeded"]
    assert sorted(ends) == sorted(ids)
    assert next_claimable(ledger) == [mine.job_id]
    found = read_pieces(ledger, LOCAL_TENANT, mine.job_id)
    assert [(each.piece.index, each.examples, each.data_sha256) for each in found] == [
        (n, n, f"{n:064}") for n in range(8)
    ]
    again = claimed(ledger, mine.job_id)
    assert (again.attempt, again.percent) == (2, 60.0)
    # what the pieces have done stays done where the job itself is tried again
    attempt_writes.write_progress(ledger, again, {"stage": "decomposition", "percent": 80.0})
    assert attempt_endings.fail(ledger, again, failure("transient")) == "queued"
    assert attempt_endings.hand_back(ledger, claimed(ledger, mine.job_id)) == "queued"
    again = claimed(ledger, mine.job_id)
    assert (again.attempt, again.percent) == (3, 60.0)
    assert attempt_endings.finish(ledger, again) == "succeeded"


def test_a_second_round_follows_the_first_and_is_not_made_twice(ledger: Engine, divided: Callable[..., Any]) -> None:
    mine, ids = divided(2)
    for each in ids:
        attempt_endings.finish(ledger, claimed(ledger, each))
    second = claimed(ledger, mine.job_id)
    assert divide(ledger, second, frame(3, "correct")) == "waiting"
    found = read_pieces(ledger, LOCAL_TENANT, mine.job_id)
    assert [(each.piece.round, each.piece.index) for each in found] == [
        *(("collect", 0), ("collect", 1)),
        *(("correct", 0), ("correct", 1), ("correct", 2)),
    ]
    for each in found[2:]:
        assert seen(ledger, mine.job_id).state == "waiting"
        attempt_endings.finish(ledger, claimed(ledger, each.id))
    third = claimed(ledger, mine.job_id)
    assert divide(ledger, third, frame(2)) == "failed"
    failure = seen(ledger, mine.job_id).failure
    assert failure is not None
    assert (failure["category"], failure["code"]) == ("fatal", "broken_child")
    assert "round `collect` was divided before" in failure["message"]
    assert len(read_pieces(ledger, LOCAL_TENANT, mine.job_id)) == 5


@pytest.mark.parametrize(
    "bad",
    [
        Divided(round="collect", pieces=()),
        Divided(round="correct", pieces=frame(2).pieces),
        Divided(round="collect", pieces=frame(3).pieces[:2]),
        Divided(round="collect", pieces=({"round": "collect", "index": 0, "count": 1},)),
        Divided(round="collect", pieces=({"anything": 1},)),
    ],
)
def test_what_is_no_round_fails_the_job_and_leaves_no_piece(
    ledger: Engine, held: Callable[..., Claim], bad: Divided
) -> None:
    mine = held(shards=2)
    assert divide(ledger, mine, bad) == "failed"
    assert read_pieces(ledger, LOCAL_TENANT, mine.job_id) == ()
    assert seen(ledger, mine.job_id).failure["code"] == "broken_child"


def test_a_piece_cannot_be_divided(ledger: Engine, divided: Callable[..., Any]) -> None:
    mine, ids = divided(2)
    assert divide(ledger, claimed(ledger, ids[0]), frame(2)) == "failed"
    assert (seen(ledger, mine.job_id).state, states(ledger, mine.job_id)) == ("failed", ["failed", "cancelled"])


def test_a_piece_is_retried_and_its_end_for_good_fails_the_job(
    ledger: Engine, divided: Callable[..., Any], failure: Callable[..., Failed], expire: Callable[[str], None]
) -> None:
    mine, ids = divided(4)
    assert attempt_endings.fail(ledger, claimed(ledger, ids[0]), failure("transient")) == "queued"
    assert attempt_endings.hand_back(ledger, claimed(ledger, ids[0])) == "queued"
    claimed(ledger, ids[0])
    expire(ids[0])
    assert reaper.reap_expired(ledger) == 1
    assert (seen(ledger, mine.job_id).state, seen(ledger, ids[0]).failures) == ("waiting", 2)
    attempt_endings.finish(ledger, claimed(ledger, ids[1]))
    running = claimed(ledger, ids[2])
    assert attempt_endings.fail(ledger, claimed(ledger, ids[0]), failure("usage")) == "failed"
    assert states(ledger, mine.job_id) == ["failed", "succeeded", "cancelling", "cancelled"]
    parent = seen(ledger, mine.job_id)
    assert parent.state == "failed"
    assert parent.failure["message"] == (
        f"piece 1 of 4 of the round `collect` (job {ids[0]}) failed: the plan needs 12 GiB, 8 GiB are free"
    )
    assert (parent.failure["code"], parent.failure["pointer"]) == ("out_of_memory", "/memory/device")
    with pytest.raises(JobStillActive, match=ids[2]):
        delete_job(ledger, LOCAL_TENANT, mine.job_id)
    assert attempt_endings.finish(ledger, running) == "cancelled"
    history = read_history(ledger, LOCAL_TENANT, mine.job_id, 0)
    assert history is not None
    assert history.events[-1].data["state"] == "failed", "nothing follows the end of a job"
    delete_job(ledger, LOCAL_TENANT, mine.job_id)
    assert [read_job(ledger, LOCAL_TENANT, each) for each in ids] == [None] * 4


def test_a_reaper_that_ends_a_piece_for_good_fails_the_job(
    ledger: Engine, divided: Callable[..., Any], expire: Callable[[str], None]
) -> None:
    mine, ids = divided(2)
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == ids[0]).values(max_failures=1))
    claimed(ledger, ids[0])
    expire(ids[0])
    assert reaper.reap_expired(ledger) == 1
    assert (seen(ledger, mine.job_id).state, states(ledger, mine.job_id)) == ("failed", ["failed", "cancelled"])
    assert seen(ledger, mine.job_id).failure["code"] == "worker_lost"


@ON_BOTH
def test_a_deadline_that_passes_in_the_queue_ends_the_job_with_its_pieces(
    ledger: Engine, divided: Callable[..., Any]
) -> None:
    mine, _ = divided(3, schedule={"within": "1h"})
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.parent_id == mine.job_id).values(deadline_at=ledger_now(-1)))
    assert reaper.end_overdue(ledger) >= 1
    assert sorted(states(ledger, mine.job_id)) == ["cancelled", "cancelled", "failed"]
    assert seen(ledger, mine.job_id).failure["code"] == "deadline_exceeded"


@pytest.mark.parametrize("by_piece", [False, True])
def test_a_cancelled_job_is_cancelled_once_its_last_piece_has_stopped(
    ledger: Engine, divided: Callable[..., Any], expire: Callable[[str], None], *, by_piece: bool
) -> None:
    mine, ids = divided(4)
    attempt_endings.finish(ledger, claimed(ledger, ids[0]))
    stopping, silent = claimed(ledger, ids[1]), claimed(ledger, ids[2])
    asked = ids[3] if by_piece else mine.job_id
    assert request_cancel(ledger, LOCAL_TENANT, asked).id == asked
    assert seen(ledger, mine.job_id).state == "cancelling"
    assert states(ledger, mine.job_id) == ["succeeded", "cancelling", "cancelling", "cancelled"]
    assert attempt_endings.hand_back(ledger, stopping) == "cancelled"
    assert seen(ledger, mine.job_id).state == "cancelling"
    expire(silent.job_id)
    assert reaper.reap_expired(ledger) == 1
    assert seen(ledger, mine.job_id).state == "cancelled"
    with pytest.raises(LeaseLost):
        attempt_endings.finish(ledger, silent)


def test_a_job_whose_pieces_all_wait_is_cancelled_at_once(ledger: Engine, divided: Callable[..., Any]) -> None:
    mine, _ = divided(3)
    assert request_cancel(ledger, LOCAL_TENANT, mine.job_id).state == "cancelled"
    assert states(ledger, mine.job_id) == ["cancelled"] * 3
    assert next_claimable(ledger) == []


def test_a_division_after_a_cancel_makes_no_piece(ledger: Engine, held: Callable[..., Claim]) -> None:
    mine = held(shards=2)
    request_cancel(ledger, LOCAL_TENANT, mine.job_id)
    assert divide(ledger, mine, frame(2)) == "cancelled"
    assert read_pieces(ledger, LOCAL_TENANT, mine.job_id) == ()


def test_cancels_and_ends_of_pieces_at_once_never_lock_each_other_out(
    ledger: Engine, divided: Callable[..., Any], failure: Callable[..., Failed], at_once: Callable[..., list[Any]]
) -> None:
    """The job ends once, cancelled or failed, and with no piece open."""
    mine, ids = divided(6)
    claims = [claimed(ledger, each) for each in ids[:5]]
    acts: list[Callable[[], Any]] = [
        *(lambda each=each: attempt_endings.finish(ledger, each) for each in claims[:3]),
        lambda: attempt_endings.fail(ledger, claims[3], failure("fatal")),
        lambda: attempt_endings.hand_back(ledger, claims[4]),
        lambda: request_cancel(ledger, LOCAL_TENANT, mine.job_id),
        lambda: request_cancel(ledger, LOCAL_TENANT, ids[5]),
        lambda: reschedule(ledger, LOCAL_TENANT, mine.job_id, Schedule(priority=3)),
    ]
    done = at_once(len(acts), lambda n: acts[n]())
    for each in done:
        assert not isinstance(each, BaseException) or type(each).__name__ == "JobEnded", done
    for each in claims:  # whoever was told to stop stops
        if seen(ledger, each.job_id).state == "cancelling":
            attempt_endings.hand_back(ledger, each)
    assert set(states(ledger, mine.job_id)) <= {"succeeded", "failed", "cancelled"}
    told = [data["state"] for data in events(ledger, mine.job_id, "state")]
    assert told[-1] in {"failed", "cancelled"}
    assert len([state for state in told if state in {"failed", "cancelled", "succeeded"}]) == 1


@ON_BOTH
def test_a_schedule_reaches_the_pieces_and_that_of_a_piece_its_job(ledger: Engine, divided: Callable[..., Any]) -> None:
    mine, ids = divided(3)
    attempt_endings.finish(ledger, claimed(ledger, ids[0]))
    reschedule(ledger, LOCAL_TENANT, ids[1], Schedule(priority=7, within="2h"))
    parent = seen(ledger, mine.job_id)
    assert parent.priority == 7
    found = [seen(ledger, each) for each in ids]
    assert [each.priority for each in found] == [0, 7, 7]
    assert [each.deadline_at for each in found] == [None, parent.deadline_at, parent.deadline_at]


def test_a_piece_is_deleted_with_its_job_alone(ledger: Engine, divided: Callable[..., Any]) -> None:
    mine, ids = divided(2)
    request_cancel(ledger, LOCAL_TENANT, mine.job_id)
    with pytest.raises(PieceRefused, match=mine.job_id):
        delete_job(ledger, LOCAL_TENANT, ids[0])
    with pytest.raises(JobNotFound):
        delete_job(ledger, "another", ids[0])


@ON_BOTH
def test_caps_count_a_divided_job_once_in_the_queue_and_its_pieces_as_they_run(
    ledger: Engine, divided: Callable[..., Any]
) -> None:
    _, ids = divided(5)
    with reading(ledger) as connection:
        require_place(connection, LOCAL_TENANT, (2, 10**6))
        with pytest.raises(QueueFull):
            require_place(connection, LOCAL_TENANT, (1, 10**6))
    # with a cap of one running job the pieces run one after another, and then their parent: nothing waits for itself
    for each in range(6):
        [job_id, *_] = within_cap(ledger)
        mine = claimed(ledger, job_id)
        assert within_cap(ledger) == []
        assert (job_id in ids) == (each < 5)
        attempt_endings.finish(ledger, mine)


@ON_BOTH
def test_the_progress_of_a_job_is_the_sum_over_its_pieces(
    ledger: Engine, divided: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_progress, "_EVERY_SECONDS", 3600.0)
    mine, ids = divided(4)
    claims = [claimed(ledger, each) for each in ids[:3]]
    assert report_piece(ledger, claims[0], begins=True)
    attempt_endings.finish(ledger, claims[0])
    attempt_writes.write_progress(ledger, claims[1], {"stage": "collection", "percent": 50.0})
    assert not report_piece(ledger, claims[1]), "before its time nothing more is written"
    assert report_piece(ledger, claims[2], begins=True)
    progress = seen(ledger, mine.job_id).progress
    assert progress is not None
    # one of four is done and one half done: 24 of 64 examples, of a round that fills 60 per cent of the bar
    assert (progress["done"], progress["total"], progress["unit"]) == (24, 64, "examples")
    assert progress["percent"] == 60 * 24 / 64
    assert [data["state"] for data in events(ledger, mine.job_id, "piece")] == ["running", "succeeded", "running"]
    # a piece that is queued again keeps what its checkpoint holds
    kept = {"stages": {"collection": 0.25}, "percent": 25.0}
    attempt_writes.write_progress(ledger, claims[1], {"stage": "collection", "percent": 50.0, "kept": kept})
    assert attempt_endings.hand_back(ledger, claims[1]) == "queued"
    assert report_piece(ledger, claims[2], begins=True)
    assert (seen(ledger, mine.job_id).progress or {})["percent"] == 18.8  # of 20 of 64 examples


def test_the_files_of_pieces_stay_until_the_job_has_succeeded(ledger: Engine, divided: Callable[..., Any]) -> None:
    mine, ids = divided(2)
    files = {each: ["factors/a"] for each in ids}
    # the eigenbases are for a second round's pieces alone
    for job_id, written in {**files, mine.job_id: ["factors/b", "factors/bases/0.safetensors"]}.items():
        assert all(list_artifacts(ledger, LOCAL_TENANT, each) for each in ids if job_id == mine.job_id)
        holder = claimed(ledger, job_id)
        for name in written:
            file = ArtifactWritten(name=name, sha256="a" * 64, size_bytes=3, media_type="x/y")
            attempt_writes.write_artifact(ledger, holder, file, f"objects/local/{'a' * 64}")
        attempt_endings.finish(ledger, holder)
    listed = [[file.name for file in list_artifacts(ledger, LOCAL_TENANT, each)] for each in (*ids, mine.job_id)]
    assert listed == [[], [], ["factors/b"]]
    assert (seen(ledger, mine.job_id).manifest or {})["artifacts"] == 1


@ON_BOTH
def test_an_autoscaler_counts_the_pieces_that_wait_and_not_their_parent(ledger: Engine, divided: Any) -> None:
    parent, children = divided(3)
    with reading(ledger) as connection:
        (group,) = read_waiting(connection, 0)
    assert (group.count, group.needs_bytes) == (3, seen(ledger, children[0]).needs_bytes)
    assert group.example in children
    claimed(ledger, children[0])
    with reading(ledger) as connection:
        assert [each.count for each in read_waiting(connection, 0)] == [2]
        # of a tenant that may run two, the parent takes up no place while it waits
        assert [each.count for each in read_waiting(connection, 2)] == [1]
    assert seen(ledger, parent.job_id).state == "waiting"
