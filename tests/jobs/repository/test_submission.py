"""One key, one job; nothing of it is visible to another tenant."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, func, select

from catalog.requests.job import JobDocument
from jobs.codec import document_json, sha256_of
from jobs.errors import (
    DocumentRefused,
    IdempotencyConflict,
    JobNotFound,
    JobStillActive,
    PageRefused,
    ParameterRefused,
)
from jobs.records import LOCAL_TENANT, Claim, Job, Submitted
from jobs.repository.results import count_layers, events_after, layer_rows, list_artifacts, read_artifact
from jobs.repository.store import JobQuery, delete_job, list_jobs, read_job, request_cancel
from jobs.repository.submission import submit
from jobs.schema.database import reading
from jobs.schema.identifiers import is_id, new_id
from jobs.schema.tables import job_events, jobs
from jobs.tenancy.api_keys import create_key, verify_key
from tests.conftest import Dialect
from tests.jobs.conftest import ON_BOTH, POSTGRESQL_OFTEN
from tests.queue_order import next_claimable

Make = Callable[..., JobDocument]


@pytest.fixture(params=POSTGRESQL_OFTEN)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """SQLite by the commit, but for the tests that between them run each statement of this file."""
    chosen: Dialect = request.param
    return chosen


def count(engine: Engine, table: Any) -> int:
    with reading(engine) as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def test_a_job_that_extends_others_is_for_workers_that_may_call_their_models_factory(
    ledger: Engine, held: Callable[..., Claim], document: Make
) -> None:
    """Its own data's factory it names itself; the earlier data are not read again."""
    bare: dict[str, Any] = {"kind": ["factors"], "model": None, "task": None}
    factories = {name: {"source": "factory", "factory": f"package:{name}"} for name in ("model", "first", "own")}
    last = held(model=factories["model"], data=factories["first"]).job_id
    for estimate in (False, True):
        made = document(**bare, data=factories["own"], extends={"job": last})
        job_id = submit(ledger, LOCAL_TENANT, made, estimate=estimate).job.id
        with reading(ledger) as connection:
            named = connection.execute(
                select(jobs.c.model_factory, jobs.c.data_factory).where(jobs.c.id == job_id)
            ).one()
        assert tuple(named) == ("package:model", "package:own")
        last = job_id


def test_a_submitted_job_stands_with_its_first_event_and_wakes(
    ledger: Engine, document: Make, woken: Callable[[], int]
) -> None:
    made = document(labels={"team": "β"})
    submitted = submit(ledger, LOCAL_TENANT, made, None)
    job = read_job(ledger, LOCAL_TENANT, submitted.job.id)
    assert submitted.created
    assert job == submitted.job
    assert (job.state, job.attempt, job.fence, job.event_seq) == ("queued", 0, 0, 1)
    assert job.document == document_json(made)
    assert job.document_sha256 == sha256_of(document_json(made))
    assert job.created_at == job.queued_at or job.created_at < job.queued_at
    assert is_id(job.id)
    assert woken() == 1
    assert [(event.seq, event.data["state"]) for event in events_after(ledger, LOCAL_TENANT, job.id)] == [(1, "queued")]


@ON_BOTH
def test_twenty_threads_with_one_key_make_one_job(
    ledger: Engine, document: Make, at_once: Any, woken: Callable[[], int]
) -> None:
    answers = at_once(20, lambda _: submit(ledger, LOCAL_TENANT, document(), "the-key"))
    assert all(isinstance(answer, Submitted) for answer in answers), answers
    assert len({answer.job.id for answer in answers}) == 1
    assert sum(answer.created for answer in answers) == 1
    assert (count(ledger, jobs), woken(), count(ledger, job_events)) == (1, 1, 1)


def test_a_key_with_another_document_conflicts_and_stores_nothing(
    ledger: Engine, document: Make, woken: Callable[[], int]
) -> None:
    first = submit(ledger, LOCAL_TENANT, document(), "k").job
    with pytest.raises(IdempotencyConflict, match=first.id):
        submit(ledger, LOCAL_TENANT, document(labels={"a": "b"}), "k")
    assert (count(ledger, jobs), woken()) == (1, 1)


def test_documents_that_differ_in_spelling_only_are_the_same(ledger: Engine, document: Make) -> None:
    first = submit(ledger, LOCAL_TENANT, document(), "k")
    again = submit(ledger, LOCAL_TENANT, document(stabilisation={"damping": 1e-4}, keep=["spectra"]), "k")
    assert (again.created, again.job.id) == (False, first.job.id)


def test_without_a_key_every_submission_is_a_job(ledger: Engine, document: Make) -> None:
    assert len({submit(ledger, LOCAL_TENANT, document()).job.id for _ in range(3)}) == 3


@pytest.mark.parametrize("key", ["", "x" * 256, "a\0b", "two words", "ü"])
def test_unusable_keys_are_refused(ledger: Engine, document: Make, key: str) -> None:
    with pytest.raises(ParameterRefused):
        submit(ledger, LOCAL_TENANT, document(), key)


def test_numbers_of_a_document_come_back_as_they_were(ledger: Engine, document: Make) -> None:
    # a binary JSON column would give 10000000000000000 (an int) and 0.0 back
    kwargs = {"large": 1e16, "negative_zero": -0.0, "tiny": 5e-324, "huge": 1.7e308, "nothing": None, "text": "λ"}
    made = document(model={"source": "factory", "factory": "a:b", "kwargs": kwargs})
    job = read_job(ledger, LOCAL_TENANT, submit(ledger, LOCAL_TENANT, made).job.id)
    assert job is not None
    assert json.dumps(job.document["model"]["kwargs"], sort_keys=True) == json.dumps(kwargs, sort_keys=True)
    assert sha256_of(job.document) == job.document_sha256


@ON_BOTH
@pytest.mark.parametrize("sort", ["newest", "oldest"])
def test_pages_follow_the_key_and_lose_or_repeat_nothing(ledger: Engine, document: Make, sort: Any) -> None:
    ids = [submit(ledger, LOCAL_TENANT, document()).job.id for _ in range(7)]
    seen: list[str] = []
    before = None
    while True:
        page = list_jobs(ledger, LOCAL_TENANT, JobQuery(before=before, limit=3, sort=sort))
        seen += [job.id for job in page.items]
        if before is None and sort == "newest":  # what arrives meanwhile is newer than every cursor
            submit(ledger, LOCAL_TENANT, document())
        before = page.next
        if before is None:
            break
    assert seen == sorted(ids, reverse=sort == "newest")


@ON_BOTH
def test_jobs_are_found_by_state_kind_and_label(ledger: Engine, document: Make) -> None:
    plain = submit(ledger, LOCAL_TENANT, document()).job
    both = submit(ledger, LOCAL_TENANT, document(kind=["factors", "capacity"], labels={"a.b/c": 'x"y', "n": "1"})).job
    request_cancel(ledger, LOCAL_TENANT, plain.id)

    def found(**filters: Any) -> set[str]:
        return {job.id for job in list_jobs(ledger, LOCAL_TENANT, JobQuery(**filters)).items}

    assert found(state="cancelled") == {plain.id}
    assert found(kind="capacity") == {plain.id, both.id}
    assert found(kind="factors") == {both.id}
    assert found(kind="factor") == found(kind="%") == found(kind="a\0") == set()
    one, other = ("a.b/c", 'x"y'), ("n", "1")
    assert found(labels=(one,)) == found(labels=(other,)) == found(labels=(one, other)) == {both.id}
    assert found(labels=(("n", "2"),)) == found(labels=(('x"', "1"),)) == found(labels=(("n", "\0"),)) == set()
    assert found(labels=(one, ("n", "2"))) == set()


@ON_BOTH
def test_jobs_are_found_by_name_age_and_the_end_of_their_id(ledger: Engine, document: Make) -> None:
    named = submit(ledger, LOCAL_TENANT, document(name="Résumé of run_7, 50 %")).job
    other = submit(ledger, LOCAL_TENANT, document()).job

    def found(**filters: Any) -> set[str]:
        return {job.id for job in list_jobs(ledger, LOCAL_TENANT, JobQuery(**filters)).items}

    assert found(name="RUN_7") == found(name="50 %") == {named.id}
    # PostgreSQL's locale decides there
    assert ledger.dialect.name == "postgresql" or found(name="RÉSUMÉ") == {named.id}
    assert found(name="run%7") == found(name="runx7") == found(name="a\0") == set()  # no pattern
    assert found(id_end=other.id[-8:]) == found(id_end=other.id) == {other.id}
    assert found(id_end="%") == set()
    assert {named.id, other.id} <= found(since=600.0)
    assert found(since=named.created_at) == {named.id, other.id}
    assert found(since=other.created_at) == {other.id}
    assert found(until=other.created_at) == {named.id}
    assert found(until=named.created_at) == found(until=600.0) == set()
    assert found(since=named.created_at + timedelta(days=1)) == set()


def test_a_name_is_no_part_of_what_is_computed(ledger: Engine, document: Make) -> None:
    plain, named = (submit(ledger, LOCAL_TENANT, document(**more)).job for more in ({}, {"name": "first"}))
    assert named.document_sha256 == plain.document_sha256
    assert "name" not in named.document
    key = submit(ledger, LOCAL_TENANT, document(name="second"), "a-key").job
    assert submit(ledger, LOCAL_TENANT, document(name="second"), "a-key").job.id == key.id
    with pytest.raises(IdempotencyConflict):
        submit(ledger, LOCAL_TENANT, document(name="third"), "a-key")


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "x" * 121])
def test_a_name_is_one_short_line(document: Make, name: str) -> None:
    with pytest.raises(DocumentRefused, match="/name must be 1 to 120 printable characters"):
        document(name=name)


@pytest.mark.parametrize("limit", [0, -1, 101, 2**40])
def test_empty_and_unbounded_pages_are_refused(ledger: Engine, limit: int) -> None:
    with pytest.raises(PageRefused, match="1 to 100"):
        list_jobs(ledger, LOCAL_TENANT, JobQuery(limit=limit))


def test_a_foreign_cursor_is_refused(ledger: Engine) -> None:
    with pytest.raises(PageRefused, match="not a cursor"):
        list_jobs(ledger, LOCAL_TENANT, JobQuery(before="' OR 1=1"))


@ON_BOTH
@pytest.mark.parametrize("whose", ["theirs", "nobody's", "no id", "nul"])
def test_another_tenants_job_answers_as_one_that_never_was(
    ledger: Engine, document: Make, held: Callable[..., Claim], layer_frame: Any, whose: str
) -> None:
    key = create_key(ledger, "a secret of the server", "others")
    caller = verify_key(ledger, "a secret of the server", key)
    assert caller is not None
    foreign = submit(ledger, caller.tenant_id, document(), "shared-key").job
    own = submit(ledger, LOCAL_TENANT, document(), "shared-key")
    assert own.created  # keys of two tenants never meet
    job_id = {"theirs": foreign.id, "nobody's": new_id(), "no id": "../../etc", "nul": "a\0b"}[whose]
    assert read_job(ledger, LOCAL_TENANT, job_id) is None
    assert layer_rows(ledger, LOCAL_TENANT, job_id).items == ()
    assert count_layers(ledger, LOCAL_TENANT, job_id) == 0
    assert list_artifacts(ledger, LOCAL_TENANT, job_id) == ()
    assert read_artifact(ledger, LOCAL_TENANT, job_id, "spectra/0.json") is None
    assert events_after(ledger, LOCAL_TENANT, job_id) == ()
    for act in (request_cancel, delete_job):
        with pytest.raises(JobNotFound, match=r"^there is no such job$"):
            act(ledger, LOCAL_TENANT, job_id)
    assert {job.id for job in list_jobs(ledger, LOCAL_TENANT).items} == {own.job.id}
    assert read_job(ledger, caller.tenant_id, foreign.id) == foreign


def test_an_ended_job_is_deleted_with_its_rows_an_active_one_is_not(
    ledger: Engine, queued: Callable[..., str], held: Callable[..., Claim]
) -> None:
    kept, gone = held(), queued()
    with pytest.raises(JobStillActive, match="is running; cancel it and wait until"):
        delete_job(ledger, LOCAL_TENANT, kept.job_id)
    request_cancel(ledger, LOCAL_TENANT, kept.job_id)
    with pytest.raises(JobStillActive, match="is cancelling; wait until"):
        delete_job(ledger, LOCAL_TENANT, kept.job_id)
    request_cancel(ledger, LOCAL_TENANT, gone)
    assert delete_job(ledger, LOCAL_TENANT, gone) == ()
    assert read_job(ledger, LOCAL_TENANT, gone) is None
    assert {job.id for job in list_jobs(ledger, LOCAL_TENANT).items} == {kept.job_id}
    assert next_claimable(ledger) == []


def test_a_cancelled_queued_job_ends_at_once(ledger: Engine, queued: Callable[..., str]) -> None:
    job_id = queued()
    cancelled: Job = request_cancel(ledger, LOCAL_TENANT, job_id, "kr_first")
    assert cancelled.state == "cancelled"
    assert cancelled.finished_at is not None
    assert cancelled.cancel_requested_at is not None
    assert cancelled.cancel_requested_by == "kr_first"
    again = request_cancel(ledger, LOCAL_TENANT, job_id, "kr_second")
    assert again == cancelled
