"""Deadlines and priorities as a submission gives them, and as they are changed afterwards, on both databases."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, update

from catalog.requests.job import JobDocument
from catalog.requests.schedule import Schedule
from jobs.errors import DocumentRefused, IdempotencyConflict, JobEnded, JobNotFound
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT
from jobs.repository.results import events_after
from jobs.repository.store import JobQuery, list_jobs, read_job, request_cancel, reschedule
from jobs.repository.submission import submit
from jobs.schema.database import reading, writing
from jobs.schema.tables import job_events, jobs
from tests.queue_order import next_claimable

Make = Callable[..., JobDocument]
TOMORROW = (datetime.now(UTC) + timedelta(days=1)).isoformat(timespec="seconds")


def count(engine: Engine, table: Any) -> int:
    with reading(engine) as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def test_a_job_keeps_the_terms_that_it_was_given(ledger: Engine, document: Make) -> None:
    until = submit(ledger, LOCAL_TENANT, document(schedule={"priority": -3, "deadline": TOMORROW})).job
    assert (until.priority, until.deadline_at) == (-3, datetime.fromisoformat(TOMORROW))
    within = submit(ledger, LOCAL_TENANT, document(schedule={"within": "2h"})).job
    assert within.deadline_at is not None
    assert abs((within.deadline_at - within.created_at).total_seconds() - 7200) < 600  # on the database's clock
    neither = submit(ledger, LOCAL_TENANT, document()).job
    assert (neither.priority, neither.deadline_at) == (0, None)
    assert until.document_sha256 == within.document_sha256 == neither.document_sha256


def test_a_deadline_that_has_passed_is_refused_and_nothing_is_stored(
    ledger: Engine, document: Make, woken: Callable[[], int]
) -> None:
    with pytest.raises(DocumentRefused, match="has passed") as refused:
        submit(ledger, LOCAL_TENANT, document(schedule={"deadline": "2020-01-01T00:00Z"}), "k")
    assert [(each.pointer, each.code) for each in refused.value.complaints] == [("/schedule/deadline", "in_the_past")]
    assert (count(ledger, jobs), woken()) == (0, 0)


def test_a_repeated_request_is_known_by_its_schedule_too(ledger: Engine, document: Make) -> None:
    given = {"priority": 2, "within": "2h"}
    first = submit(ledger, LOCAL_TENANT, document(schedule=given), "k")
    again = submit(ledger, LOCAL_TENANT, document(schedule=given), "k")
    # the repeated `within` does not begin anew
    assert (again.created, again.job) == (False, first.job)
    for other in ({}, {"priority": 2}, {"priority": 3, "within": "2h"}, {"priority": 2, "within": "3h"}):
        with pytest.raises(IdempotencyConflict):
            submit(ledger, LOCAL_TENANT, document(schedule=other), "k")
    # what was changed afterwards is no other request
    reschedule(ledger, LOCAL_TENANT, first.job.id, Schedule())
    assert submit(ledger, LOCAL_TENANT, document(schedule=given), "k").job.id == first.job.id
    plain = submit(ledger, LOCAL_TENANT, document(), "plain").job
    assert submit(ledger, LOCAL_TENANT, document(schedule={"priority": 0}), "plain").job.id == plain.id


def test_an_estimate_takes_the_document_and_not_its_schedule(ledger: Engine, document: Make) -> None:
    job = submit(ledger, LOCAL_TENANT, document(schedule={"within": "2h", "priority": -10}), estimate=True).job
    assert job.deadline_at is None
    assert next_claimable(ledger) == [job.id]


def test_other_terms_take_the_place_of_all_that_were(ledger: Engine, document: Make, queued: Any) -> None:
    job_id = submit(ledger, LOCAL_TENANT, document(schedule={"priority": -3, "within": "2h"})).job.id
    first = queued()
    assert next_claimable(ledger) == [first, job_id]
    changed = reschedule(ledger, LOCAL_TENANT, job_id, Schedule(priority=9))
    assert (changed.priority, changed.deadline_at) == (9, None)
    assert changed == read_job(ledger, LOCAL_TENANT, job_id)
    assert next_claimable(ledger) == [job_id, first]
    told = [event.data for event in events_after(ledger, LOCAL_TENANT, job_id) if event.type == "schedule"]
    assert told == [{"priority": 9, "deadline_at": None}]


@pytest.mark.parametrize(
    "given", [{}, {"priority": -10}, {"deadline": TOMORROW}, {"priority": 2, "deadline": TOMORROW}]
)
def test_the_same_schedule_again_writes_nothing_of_a_job_or_its_pieces(
    ledger: Engine, document: Make, given: dict[str, Any]
) -> None:
    """Each repetition was an event of the job, and one of each of its pieces."""
    model = {"source": "directory", "path": "/models/a"}
    series = {"model": ["/models/a", "/models/b"], "overlaps": False}
    whole = submit(ledger, LOCAL_TENANT, document(kind="spectrum", model=model, series=series, schedule=given)).job
    piece = list_jobs(ledger, LOCAL_TENANT, JobQuery(parent=whole.id)).items[0].id
    written = count(ledger, job_events)
    for job_id in (whole.id, piece):
        before = read_job(ledger, LOCAL_TENANT, job_id)
        assert reschedule(ledger, LOCAL_TENANT, job_id, Schedule(**given)) == before
        assert read_job(ledger, LOCAL_TENANT, job_id) == before
    assert count(ledger, job_events) == written
    reschedule(ledger, LOCAL_TENANT, whole.id, Schedule(priority=9))
    assert count(ledger, job_events) == written + 3


def test_the_same_deadline_is_refused_once_it_has_passed(ledger: Engine, document: Make) -> None:
    job_id = submit(ledger, LOCAL_TENANT, document(schedule={"deadline": TOMORROW})).job.id
    passed = datetime.now(UTC) - timedelta(days=1)
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(deadline_at=passed))
    with pytest.raises(DocumentRefused):
        reschedule(ledger, LOCAL_TENANT, job_id, Schedule(deadline=passed.isoformat()))


def test_a_running_job_is_rescheduled_under_its_holder(ledger: Engine, held: Any) -> None:
    held = held()
    changed = reschedule(ledger, LOCAL_TENANT, held.job_id, Schedule(deadline=TOMORROW))
    assert (changed.state, changed.fence) == ("running", held.fence)
    assert changed.deadline_at == datetime.fromisoformat(TOMORROW)


def test_what_cannot_be_rescheduled(ledger: Engine, queued: Any) -> None:
    job_id = queued()
    with pytest.raises(DocumentRefused) as refused:
        reschedule(ledger, LOCAL_TENANT, job_id, Schedule(priority=5, deadline="2020-01-01T00:00Z"))
    assert [each.pointer for each in refused.value.complaints] == ["/deadline"]
    kept = read_job(ledger, LOCAL_TENANT, job_id)
    assert kept is not None
    assert (kept.priority, kept.deadline_at, kept.event_seq) == (0, None, 1)
    with pytest.raises(JobNotFound):
        reschedule(ledger, "another", job_id, Schedule())
    request_cancel(ledger, LOCAL_TENANT, job_id)
    with pytest.raises(JobEnded, match="cancelled already; submit it again"):
        reschedule(ledger, LOCAL_TENANT, job_id, Schedule(within="2h"))
    assert claim(ledger, job_id, "w", "t", 45) is None
