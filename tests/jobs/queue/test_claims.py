"""One holder at a time, and only the holder writes."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from catalog.frames import ArtifactWritten, Failed, LayerDone, LogLine, Planned, Started, Summarised
from jobs.codec import sha256_of
from jobs.errors import LeaseLost
from jobs.lifecycle import HELD
from jobs.metrics.counters import Counter, read_counters
from jobs.queue import attempt_endings
from jobs.queue.attempt_endings import decline, fail, finish, hand_back
from jobs.queue.attempt_writes import (
    write_artifact,
    write_layer,
    write_log_line,
    write_plan,
    write_progress,
    write_started,
    write_summary,
)
from jobs.queue.claims import claim, heartbeat
from jobs.queue.crash_signatures import record_crash
from jobs.queue.fence import draw
from jobs.queue.reaper import reap_expired
from jobs.records import LOCAL_TENANT, Claim, Job
from jobs.repository.results import events_after, layer_rows, list_artifacts
from jobs.repository.store import read_job, request_cancel
from jobs.repository.submission import submit
from jobs.schema.database import reading, writing
from jobs.schema.tables import counters, job_events, jobs, metadata
from tests.conftest import Dialect
from tests.jobs.conftest import ON_BOTH, POSTGRESQL_OFTEN
from tests.queue_order import next_claimable

Held = Callable[..., Claim]
ARTIFACT = ArtifactWritten(name="spectra/0.json", sha256="0" * 64, size_bytes=3, media_type="application/json")


@pytest.fixture(params=POSTGRESQL_OFTEN)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """SQLite by the commit, but for the tests that between them run each statement of this file."""
    chosen: Dialect = request.param
    return chosen


def job_of(engine: Engine, held: Claim) -> Job:
    job = read_job(engine, LOCAL_TENANT, held.job_id)
    assert job is not None
    return job


def everything(engine: Engine) -> dict[str, list[Any]]:
    with reading(engine) as connection:
        return {
            table.name: sorted(map(repr, connection.execute(select(table)).all()))
            for table in metadata.sorted_tables
            if table is not counters  # they count what is refused, too
        }


def counted(engine: Engine) -> dict[Counter, dict[str, int]]:
    with reading(engine) as connection:
        return read_counters(connection)


def test_twenty_workers_claim_one_job_and_one_gets_it(ledger: Engine, queued: Callable[..., str], at_once: Any) -> None:
    job_id = queued()
    answers = at_once(20, lambda number: claim(ledger, job_id, f"worker-{number}", f"token-{number}", 45))
    won = [answer for answer in answers if answer is not None]
    assert len(won) == 1, answers
    assert (won[0].fence, won[0].attempt, won[0].completed) == (1, 1, ())
    job = job_of(ledger, won[0])
    assert (job.state, job.attempt, job.fence) == ("running", 1, 1)
    assert job.started_at is not None
    assert next_claimable(ledger) == []


@ON_BOTH
def test_a_fence_that_a_failover_hands_out_twice_has_one_holder(ledger: Engine, queued: Callable[..., str]) -> None:
    """A standby that never received the first claim makes it again, for another."""
    job_id = queued()
    lost = claim(ledger, job_id, "w", "one token", 45)
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(state="queued", fence=0, claim_token=None))
    kept = claim(ledger, job_id, "v", "another", 45)
    assert lost is not None
    assert kept is not None
    assert lost.fence == kept.fence
    with pytest.raises(LeaseLost):
        finish(ledger, lost)
    with pytest.raises(LeaseLost):
        heartbeat(ledger, lost, 45)
    assert finish(ledger, kept) == "succeeded"


def test_a_claim_whose_reply_was_lost_recognises_its_own(ledger: Engine, queued: Callable[..., str]) -> None:
    job_id = queued()
    first = claim(ledger, job_id, "w", "token", 45)
    assert first is not None
    assert claim(ledger, job_id, "w", "token", 45) == first
    assert claim(ledger, job_id, "w", "another", 45) is None
    assert job_of(ledger, first).attempt == 1


@pytest.mark.parametrize("job_id", ["", "x", "a\0b", "0190b3c6-0000-7000-8000-000000000000"])
def test_a_wakeup_for_no_job_is_dropped(ledger: Engine, job_id: str) -> None:
    assert claim(ledger, job_id, "w", "t", 45) is None


def test_the_urgent_come_first_then_the_longest_waiting(ledger: Engine, document: Callable[..., Any]) -> None:
    first, second = (submit(ledger, LOCAL_TENANT, document()).job.id for _ in range(2))
    urgent = submit(ledger, LOCAL_TENANT, document(schedule={"priority": 5})).job.id
    assert next_claimable(ledger) == [urgent, first, second]
    assert next_claimable(ledger, limit=1) == [urgent]


def test_a_whole_attempt_leaves_what_it_wrote(ledger: Engine, held: Held, layer_frame: Any) -> None:
    mine = held()
    write_started(ledger, mine, Started(environment={"torch": "2.13"}))
    write_plan(ledger, mine, Planned(plan={"peak_bytes": 7}))
    for done in (1, 2):
        write_progress(ledger, mine, {"stage": "collection", "done": done, "total": 2, "unit": "batches"})
    assert write_layer(ledger, mine, layer_frame(0, trace=1.5)) == "written"
    assert write_artifact(ledger, mine, ARTIFACT, f"{mine.job_id}/1/spectra/0.json") == "written"
    write_log_line(ledger, mine, LogLine(level="info", message="λ_G=1e-4"))
    write_summary(ledger, mine, Summarised(kind="capacity", summary={"layers": 1}))
    write_summary(ledger, mine, Summarised(kind="factors", summary={"layers": 2}))
    assert finish(ledger, mine) == "succeeded"
    job = job_of(ledger, mine)
    assert job.ended
    assert job.summary == {"capacity": {"layers": 1}, "factors": {"layers": 2}}
    assert job.plan == {"peak_bytes": 7}
    assert job.manifest == {
        "environment": {"torch": "2.13"},
        "document_sha256": job.document_sha256,
        "artifacts": 1,
        "fence": 1,
        "attempt": 1,
        "coverage": {"diagonal": False, "partial": False},
    }
    assert job.progress is not None
    assert (job.progress["done"], job.progress["stage"]) == (2, "collection")
    assert job.progress["updated_at"].endswith("+00:00")
    assert job.started_at is not None
    assert job.finished_at is not None
    assert job.created_at <= job.queued_at <= job.started_at <= job.finished_at
    events = events_after(ledger, LOCAL_TENANT, mine.job_id)
    types = ["state", "state", "started", "plan", "progress", "layer", "artifact", "log", "summary", "summary", "state"]
    assert [event.type for event in events] == types
    assert [event.seq for event in events] == sorted({event.seq for event in events})
    assert events[-1].seq == job.event_seq
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert events_after(ledger, LOCAL_TENANT, mine.job_id, events[3].seq, 2) == events[4:6]
    assert [artifact.uri for artifact in list_artifacts(ledger, LOCAL_TENANT, mine.job_id)] == [
        f"{mine.job_id}/1/spectra/0.json"
    ]


WRITES: dict[str, Callable[[Engine, Claim], object]] = {
    "heartbeat": lambda engine, mine: heartbeat(engine, mine, 45),
    "started": lambda engine, mine: write_started(engine, mine, Started(environment={})),
    "progress": lambda engine, mine: write_progress(engine, mine, {"stage": "data"}),
    "plan": lambda engine, mine: write_plan(engine, mine, Planned(plan={})),
    "layer": lambda engine, mine: write_layer(
        engine, mine, LayerDone(kind="capacity", ordinal=9, layer="z", outcome={}, observed={})
    ),
    "artifact": lambda engine, mine: write_artifact(engine, mine, ARTIFACT, "u"),
    "summary": lambda engine, mine: write_summary(engine, mine, Summarised(kind="capacity", summary={})),
    "log": lambda engine, mine: write_log_line(engine, mine, LogLine(level="info", message="m")),
    "crash": lambda engine, mine: record_crash(engine, mine, {"signal": 9}),
    "finish": finish,
    "fail": lambda engine, mine: fail(
        engine, mine, Failed(category="fatal", code="c", message="m", pointer=None, layer=None, detail=None)
    ),
    "hand_back": hand_back,
    "decline": lambda engine, mine: decline(engine, mine, "not_started"),
}


@ON_BOTH
@pytest.mark.part(of=16)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("since", ["reclaimed", "requeued", "ended", "deleted"])
def test_a_zombie_writes_nothing(ledger: Engine, held: Held, expire: Any, write: str, since: str) -> None:
    zombie = held()
    if since == "ended":
        finish(ledger, zombie)
    elif since == "deleted":
        with writing(ledger) as connection:
            connection.execute(jobs.delete())
    else:
        expire(zombie.job_id)
        assert reap_expired(ledger) == 1
    if since == "reclaimed":
        assert held(zombie.job_id).fence == zombie.fence + 1
    before = everything(ledger)
    with pytest.raises(LeaseLost, match=f"fence {zombie.fence};"):
        WRITES[write](ledger, zombie)
    assert everything(ledger) == before
    assert counted(ledger)["refused_writes"] == {"": 1}


def test_without_the_fence_the_zombie_would_have_written(
    ledger: Engine, held: Held, expire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: a check of the state alone lets a zombie end the next attempt."""
    zombie = held()
    expire(zombie.job_id)
    reap_expired(ledger)
    held(zombie.job_id)
    monkeypatch.setattr(
        attempt_endings,
        "draw_fenced",
        lambda connection, mine: draw(connection, jobs.c.id == mine.job_id, jobs.c.state.in_(HELD)),
    )
    assert finish(ledger, zombie) == "succeeded"


def test_a_layer_is_written_once_and_another_digest_is_an_event(ledger: Engine, held: Held, layer_frame: Any) -> None:
    mine = held()
    frame = layer_frame(0, trace=1.0, form="kronecker")
    assert write_layer(ledger, mine, frame) == "written"
    assert write_layer(ledger, mine, frame) == "repeated"
    assert write_layer(ledger, mine, layer_frame(0, trace=1.0000000000000002, form="kronecker")) == "differs"
    [row] = layer_rows(ledger, LOCAL_TENANT, mine.job_id).items
    assert row.outcome == frame.outcome
    assert row.sha256 == sha256_of(row.outcome) == sha256_of(frame.outcome)
    told = [event for event in events_after(ledger, LOCAL_TENANT, mine.job_id) if event.type != "state"]
    assert [event.type for event in told] == ["layer", "digest_differs"]
    assert told[1].data["kept_sha256"] == row.sha256 != told[1].data["sha256"]


def test_a_repeated_event_is_recognised_above_the_last_one_that_is_known(ledger: Engine, held: Held) -> None:
    """The same line once more, by a writer who knows of the first, is another line."""
    mine, line = held(), LogLine(level="info", message="same")
    first = write_log_line(ledger, mine, line, 0)
    assert write_log_line(ledger, mine, line, 0) == first
    other = write_log_line(ledger, mine, LogLine(level="warning", message="same"), 0)
    second = write_log_line(ledger, mine, line, first)
    plan = Planned(plan={"device_peak_bytes": 1e5, "layers": ({"bytes": 2**60, "share": 0.1},)})
    assert [write_plan(ledger, mine, plan, second) for _ in range(2)] == [True, True]
    told = [(each.type, each.seq) for each in events_after(ledger, LOCAL_TENANT, mine.job_id) if each.type != "state"]
    assert [kind for kind, _ in told] == ["log"] * 3 + ["plan"]
    assert [seq for _, seq in told[:3]] == [first, other, second]


def test_times_are_outside_the_digest(ledger: Engine, held: Held) -> None:
    mine = held()
    for seconds in (0.1, 0.2):
        written = write_layer(
            ledger, mine, LayerDone(kind="factors", ordinal=1, layer="l", outcome={"a": 1}, observed={"s": seconds})
        )
    assert written == "repeated"


def test_a_digest_holds_for_every_number_that_comes_back(ledger: Engine, held: Held, layer_frame: Any) -> None:
    mine = held()
    write_layer(ledger, mine, layer_frame(0, trace=1e16, logdet=-0.0, kappa=1e300, rank=3, tiny=5e-324))
    [row] = layer_rows(ledger, LOCAL_TENANT, mine.job_id).items
    assert sha256_of(row.outcome) == row.sha256


def test_not_a_number_is_refused_before_anything_is_written(ledger: Engine, held: Held, layer_frame: Any) -> None:
    mine = held()
    before = everything(ledger)
    with pytest.raises(ValueError, match="Out of range float"):
        write_layer(ledger, mine, layer_frame(0, trace=float("nan")))
    assert everything(ledger) == before


@ON_BOTH
def test_an_artifact_is_listed_once(ledger: Engine, held: Held) -> None:
    mine = held()
    other = ArtifactWritten(name=ARTIFACT.name, sha256="1" * 64, size_bytes=3, media_type="application/json")
    written = [write_artifact(ledger, mine, frame, "u") for frame in (ARTIFACT, ARTIFACT, other)]
    assert written == ["written", "repeated", "differs"]
    assert [artifact.sha256 for artifact in list_artifacts(ledger, LOCAL_TENANT, mine.job_id)] == ["0" * 64]


def test_the_first_plan_stands(ledger: Engine, held: Held) -> None:
    mine = held()
    write_plan(ledger, mine, Planned(plan={"threads": 2}))
    hand_back(ledger, mine)
    again = held(mine.job_id)
    assert again.plan == {"threads": 2}
    write_plan(ledger, again, Planned(plan={"threads": 8}))
    assert job_of(ledger, again).plan == {"threads": 2}


def test_a_plan_that_memory_proved_wrong_is_replaced_by_what_was_done(ledger: Engine, held: Held) -> None:
    mine = held()
    write_plan(ledger, mine, Planned(plan={"micro_batch": 8}))
    corrected = {"micro_batch": 4, "planning_errors": [{"rung": "slices of 8, 1 pass"}]}
    write_plan(ledger, mine, Planned(plan=corrected))
    assert job_of(ledger, mine).plan == corrected
    write_plan(ledger, mine, Planned(plan={"micro_batch": 8}))
    assert job_of(ledger, mine).plan == corrected


def test_a_plan_says_what_the_job_needs_where_its_document_only_bounded_it(
    ledger: Engine, document: Callable[..., Any]
) -> None:
    job_id = submit(ledger, LOCAL_TENANT, document(), needs_bytes=100).job.id
    first = claim(ledger, job_id, "w", "t", 45)
    assert first is not None
    assert job_of(ledger, first).needs_bytes == 100
    write_plan(ledger, first, Planned(plan={"threads": 2}))
    assert job_of(ledger, first).needs_bytes == 100
    hand_back(ledger, first)
    second = claim(ledger, job_id, "w", "u", 45)
    assert second is not None
    corrected = {"device_peak_bytes": 0, "host_peak_bytes": 3 * 2**30, "planning_errors": [{}]}
    with pytest.raises(LeaseLost):
        write_plan(ledger, first, Planned(plan=corrected))
    assert job_of(ledger, second).needs_bytes == 100
    write_plan(ledger, second, Planned(plan=corrected))
    assert job_of(ledger, second).needs_bytes == pytest.approx(3 * 2**30 / 0.9, abs=4)
    write_plan(ledger, second, Planned(plan=corrected | {"device_peak_bytes": 5 * 2**30}))
    assert job_of(ledger, second).needs_bytes == pytest.approx(5 * 2**30 / 0.9, abs=4)
    hand_back(ledger, second)


def test_a_drain_returns_the_attempt_and_keeps_the_rows(
    ledger: Engine, held: Held, layer_frame: Any, woken: Callable[[], int]
) -> None:
    mine = held()
    write_layer(ledger, mine, layer_frame(1))
    write_layer(ledger, mine, layer_frame(0))
    assert woken() == 1  # as it was submitted, and not as it was claimed
    assert hand_back(ledger, mine) == "queued"
    job = job_of(ledger, mine)
    assert (job.state, job.attempt, job.failures, job.fence) == ("queued", 0, 0, 1)
    assert woken() == 1
    again = held(mine.job_id)
    assert (again.attempt, again.fence, again.completed) == (1, 2, (("capacity", 0), ("capacity", 1)))
    assert woken() == 0


def test_cancelling_a_running_job_reaches_its_holder_and_ends_it(ledger: Engine, held: Held) -> None:
    mine = held()
    assert heartbeat(ledger, mine, 45) is None
    assert request_cancel(ledger, LOCAL_TENANT, mine.job_id).state == "cancelling"
    asked_at = heartbeat(ledger, mine, 45)
    assert asked_at is not None
    assert request_cancel(ledger, LOCAL_TENANT, mine.job_id).cancel_requested_at == asked_at
    assert hand_back(ledger, mine) == "cancelled"
    assert job_of(ledger, mine).finished_at is not None


@pytest.mark.parametrize("end", [finish, hand_back, WRITES["decline"], WRITES["fail"]])
def test_a_job_being_cancelled_ends_cancelled_whatever_its_attempt_says(ledger: Engine, held: Held, end: Any) -> None:
    mine = held()
    request_cancel(ledger, LOCAL_TENANT, mine.job_id)
    assert end(ledger, mine) == "cancelled"
    job = job_of(ledger, mine)
    assert (job.state, job.failure, job.failures) == ("cancelled", None, 0)


@ON_BOTH
def test_an_attempt_that_could_not_begin_costs_the_job_neither_a_failure_nor_its_place(
    ledger: Engine, held: Held
) -> None:
    mine = held()
    queued_at = job_of(ledger, mine).queued_at
    assert decline(ledger, mine, "device_lost", 900) == "queued"
    job = job_of(ledger, mine)
    assert (job.state, job.attempt, job.failures, job.queued_at) == ("queued", 0, 0, queued_at)
    assert next_claimable(ledger) == []
    assert claim(ledger, mine.job_id, "w", "t", 45) is None
    told = events_after(ledger, LOCAL_TENANT, mine.job_id)[-1].data
    assert told == {"state": "queued", "attempt": 0, "reason": "device_lost"}
    assert counted(ledger)["attempt_failures"] == {"transient device_lost": 1}
    assert decline(ledger, held(), "not_started") == "queued"
    assert len(next_claimable(ledger)) == 1


def test_cancel_and_finish_at_once_leave_one_ending(ledger: Engine, held: Held, at_once: Any) -> None:
    for _ in range(5):
        mine = held()
        acts = [
            lambda mine=mine: finish(ledger, mine),
            lambda mine=mine: request_cancel(ledger, LOCAL_TENANT, mine.job_id),
        ]
        at_once(2, lambda number, acts=acts: acts[number]())
        events = [event.data["state"] for event in events_after(ledger, LOCAL_TENANT, mine.job_id)]
        assert events in (["queued", "running", "succeeded"], ["queued", "running", "cancelling", "cancelled"])


@ON_BOTH
def test_a_fatal_failure_ends_the_job_and_keeps_its_detail_inside(ledger: Engine, held: Held, failure: Any) -> None:
    mine = held()
    assert fail(ledger, mine, failure("fatal")) == "failed"
    job = job_of(ledger, mine)
    assert job.failure == {
        "category": "fatal",
        "code": "out_of_memory",
        "message": "the plan needs 12 GiB, 8 GiB are free",
        "pointer": "/memory/device",
        "layer": None,
        "trace": [],
    }
    with reading(ledger) as connection:
        stored = connection.execute(select(jobs.c.failure)).scalar_one()
        events = connection.execute(select(job_events.c.data)).scalars().all()
    assert stored["detail"] == "Traceback with a path /srv/secret"
    assert "secret" not in repr(events)


def test_a_transient_failure_is_tried_again_until_the_last(ledger: Engine, held: Held, failure: Any) -> None:
    job_id = None
    for attempt in range(1, 6):
        mine = held(job_id)
        job_id = mine.job_id
        assert mine.attempt == attempt
        assert fail(ledger, mine, failure("transient")) == ("failed" if attempt == 5 else "queued")
    job = job_of(ledger, mine)
    assert (job.state, job.failures, job.attempt) == ("failed", 5, 5)
    assert job.failure is not None


def test_many_threads_number_their_events_without_gap_or_repeat(ledger: Engine, held: Held, at_once: Any) -> None:
    mine = held()
    answers = at_once(16, lambda n: write_log_line(ledger, mine, LogLine(level="info", message=str(n))))
    assert sorted(answers) == list(range(3, 19))
    events = events_after(ledger, LOCAL_TENANT, mine.job_id)
    assert [event.seq for event in events] == list(range(1, 19))


def test_a_crash_is_told_apart_from_the_same_crash_again(ledger: Engine, held: Held, failure: Any) -> None:
    first = held()
    at_layer_3, at_layer_4 = ({"signal": 9, "stage": "capacity", "layer": f"features.{n}"} for n in (3, 4))
    assert not record_crash(ledger, first, at_layer_3)
    fail(ledger, first, failure("transient"))
    with pytest.raises(LeaseLost):
        record_crash(ledger, first, at_layer_3)
    second = held(first.job_id)
    assert record_crash(ledger, second, at_layer_3)
    assert not record_crash(ledger, second, at_layer_4)


def test_a_crash_told_again_after_a_lost_reply_is_not_poison(ledger: Engine, held: Held) -> None:
    """The commit came through and its answer did not, so the same attempt asks once more."""
    mine = held()
    signature = {"signal": 9, "stage": "capacity", "layer": "features.3"}
    assert [record_crash(ledger, mine, signature) for _ in range(3)] == [False] * 3
    told = [event.type for event in events_after(ledger, LOCAL_TENANT, mine.job_id)]
    assert told.count("crash") == 1
