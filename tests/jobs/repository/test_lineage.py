"""Lineage: what a job used and what used it, of its own tenant alone; and labels and notes that are edited."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, insert, update

from catalog.requests.job import Annotations
from jobs.codec import parse_document, parse_record
from jobs.errors import DocumentRefused, JobNotFound
from jobs.queue.attempt_writes import write_layer
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.lineage import read_lineage
from jobs.repository.store import JobQuery, annotate, delete_job, list_jobs, read_job, request_cancel
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import jobs, tenants

STRANGER = "stranger"
Document = Callable[..., Any]


@pytest.fixture
def stranger(ledger: Engine, document: Document) -> str:
    """A job of another tenant."""
    with writing(ledger) as connection:
        connection.execute(insert(tenants).values(id=STRANGER, name=STRANGER, created_at=ledger_now()))
    return submit(ledger, STRANGER, document(name="theirs")).job.id


def from_factors(job_id: str) -> dict[str, Any]:
    return {"factors": {"job": job_id}, "model": None, "data": None, "task": None}


def extending(job_id: str) -> dict[str, Any]:
    return {"extends": {"job": job_id}, "model": None, "task": None}


def comparing(job_id: str) -> dict[str, Any]:
    return {"kind": "compare_curvature", "compare_curvature": {"against": {"job": job_id}}}


WAYS = [
    pytest.param(from_factors, "factors", id="factors"),
    pytest.param(extending, "extends", id="extends"),
    pytest.param(comparing, "compare_curvature.against", id="against"),
]


@pytest.mark.parametrize(("naming", "relation"), WAYS)
def test_a_job_and_the_one_that_it_names_know_of_each_other(
    ledger: Engine, queued: Any, naming: Any, relation: str
) -> None:
    source = queued(name="source")
    user = queued(name="user", **naming(source))
    queued(labels={"of": source})  # its id elsewhere in a document is no use of it
    submit(ledger, LOCAL_TENANT, parse_document(document_of(ledger, user)), estimate=True)  # nor is a plan
    of_user, of_source = (read_lineage(ledger, LOCAL_TENANT, each) for each in (user, source))
    assert of_user is not None
    assert of_source is not None
    assert [(each.id, each.relation, each.name, each.state) for each in of_user.sources] == [
        (source, relation, "source", "queued")
    ]
    assert [(each.id, each.relation, each.name) for each in of_source.users] == [(user, relation, "user")]
    assert (of_user.users, of_source.sources) == ((), ())


def test_the_jobs_of_a_series_are_among_the_users(ledger: Engine, queued: Any) -> None:
    source, series = queued(), queued()
    comparison, piece = (queued(**from_factors(source)) for _ in range(2))
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id.in_((comparison, piece))).values(parent_id=series))
        connection.execute(update(jobs).where(jobs.c.id == piece).values(piece={"round": "collect"}))
    of_source = read_lineage(ledger, LOCAL_TENANT, source)
    assert of_source is not None
    assert [each.id for each in of_source.users] == [comparison]


def document_of(ledger: Engine, job_id: str) -> bytes:
    job = read_job(ledger, LOCAL_TENANT, job_id)
    assert job is not None
    return json.dumps(dict(job.document)).encode()


@pytest.mark.parametrize("naming", [from_factors, comparing])
def test_another_tenants_job_is_like_an_id_of_none(
    ledger: Engine, queued: Any, document: Document, stranger: str, naming: Any
) -> None:
    """Whichever way it is named: by a document of either tenant, or as the one that is asked for."""
    nowhere = new_id()
    known = []
    for each in (stranger, nowhere):
        lineage = read_lineage(ledger, LOCAL_TENANT, queued(**naming(each)))
        assert lineage is not None
        (source,) = lineage.sources
        assert source.id == each
        known.append(replace(source, id=""))
        assert read_lineage(ledger, LOCAL_TENANT, each) is None
    assert known[0] == known[1]
    # what the other tenant claims of ours is not told to us, nor is ours to them
    mine = queued()
    submit(ledger, STRANGER, document(**naming(mine)))
    ours, theirs = read_lineage(ledger, LOCAL_TENANT, mine), read_lineage(ledger, STRANGER, stranger)
    assert ours is not None
    assert theirs is not None
    assert (ours.users, theirs.users) == ((), ())


def test_factors_from_the_cache_are_a_relation_too(
    ledger: Engine, held: Callable[..., Claim], layer_frame: Any, stranger: str
) -> None:
    source, user, liar, madman = held(name="source"), held(), held(), held()
    claims = [(user, source.job_id), (liar, stranger), (madman, "'; DROP TABLE jobs; --")]
    for claim, named in claims:
        for ordinal in range(2):
            frame = layer_frame(ordinal)
            observed = {**frame.observed, "factors_from": f"{named}, key {'0' * 64}"}
            write_layer(ledger, claim, replace(frame, observed=observed))
    found = [read_lineage(ledger, LOCAL_TENANT, claim.job_id) for claim, _ in claims]
    told = [[(each.id, each.relation, each.name) for each in lineage.sources] for lineage in found if lineage]
    assert told == [[(source.job_id, "cache", "source")], [(stranger, "cache", None)], []]
    of_source, of_stranger = (
        read_lineage(ledger, *each) for each in ((LOCAL_TENANT, source.job_id), (STRANGER, stranger))
    )
    assert of_source is not None
    assert of_stranger is not None
    assert [each.id for each in of_source.users] == [user.job_id]
    assert of_stranger.users == ()


def test_a_source_that_was_deleted_is_known_by_its_id_alone(ledger: Engine, queued: Any) -> None:
    source = queued()
    user = queued(**from_factors(source))
    request_cancel(ledger, LOCAL_TENANT, source)
    delete_job(ledger, LOCAL_TENANT, source)
    lineage = read_lineage(ledger, LOCAL_TENANT, user)
    assert lineage is not None
    assert [(each.id, each.state, each.kinds) for each in lineage.sources] == [(source, None, ())]


def test_the_history_has_states_in_order(ledger: Engine, held: Callable[..., Claim]) -> None:
    job = held().job_id
    request_cancel(ledger, LOCAL_TENANT, job)
    lineage = read_lineage(ledger, LOCAL_TENANT, job)
    assert lineage is not None
    assert [each.data["state"] for each in lineage.history] == ["queued", "running", "cancelling"]
    assert [each.data.get("attempt") for each in lineage.history][:2] == [0, 1]


def test_labels_and_note_are_edited_and_the_document_stays(ledger: Engine, queued: Any) -> None:
    job = queued(labels={"project": "first", "seed": "1"})
    before = read_job(ledger, LOCAL_TENANT, job)
    assert before is not None
    assert before.labels == {"project": "first", "seed": "1"}
    after = annotate(ledger, LOCAL_TENANT, job, Annotations(labels={"project": "second"}, note="a\nb"))
    assert (after.labels, after.note) == ({"project": "second"}, "a\nb")
    assert (after.document, after.document_sha256) == (before.document, before.document_sha256)
    assert after.event_seq > before.event_seq
    for labels, there in (({"project": "second"}, [job]), ({"project": "first"}, []), ({"seed": "1"}, [])):
        page = list_jobs(ledger, LOCAL_TENANT, JobQuery(labels=tuple(labels.items())))
        assert [each.id for each in page.items] == there
    assert annotate(ledger, LOCAL_TENANT, job, Annotations()).note == "a\nb"
    request_cancel(ledger, LOCAL_TENANT, job)
    ended = annotate(ledger, LOCAL_TENANT, job, Annotations(labels={}, note=""))
    assert (ended.state, ended.labels, ended.note) == ("cancelled", {}, None)


def test_another_tenants_job_is_not_annotated(ledger: Engine, stranger: str) -> None:
    for each in (stranger, new_id(), "nonsense"):
        with pytest.raises(JobNotFound):
            annotate(ledger, LOCAL_TENANT, each, Annotations(note="mine"))
    theirs = read_job(ledger, STRANGER, stranger)
    assert theirs is not None
    assert theirs.note is None


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"note": "x" * 2001}, "/note", "at most 2,000"),
        ({"note": "clear \x1b[2J"}, "/note", "control characters"),
        ({"note": "turn \u202e"}, "/note", "control characters"),
        ({"labels": {str(number): "x" for number in range(33)}}, "/labels", "at most 32"),
        ({"labels": {"<b>": "x"}}, "/labels", "take names of A-Z"),
        ({"labels": {"a": "x" * 257}}, "/labels", "at most 256"),
        ({"labels": {"a": "\x1b[31m"}}, "/labels", "printable values"),
        ({"name": "other"}, "/name", ""),
        ({"note": 3}, "/note", ""),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_field(body: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(DocumentRefused) as refused:
        parse_record(json.dumps(body).encode(), Annotations)
    (complaint,) = refused.value.complaints
    assert complaint.pointer == field
    assert said in complaint.message
