"""Divided jobs beside others, under requests that come at once, and beside processes of an earlier version."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, insert

from catalog.frames import Failed
from catalog.requests.job import JobDocument
from jobs.errors import LeaseLost
from jobs.queue import attempt_endings, reaper
from jobs.records import LOCAL_TENANT
from jobs.repository.store import delete_job, read_job, request_cancel
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import writing
from jobs.schema.tables import tenants
from tests.jobs.queue.test_division import claimed, seen, states
from tests.queue_order import next_claimable

OTHER = "01900000-0000-7000-8000-00000000000a"


def test_a_job_of_many_pieces_holds_up_no_other_tenant(
    ledger: Engine, divided: Callable[..., Any], document: Callable[..., JobDocument]
) -> None:
    """Of 64 pieces that wait one is served before the other tenant's job at most, and of the same tenant's later jobs
    the more urgent come before them."""
    _, ids = divided(64)
    with writing(ledger) as connection:
        connection.execute(insert(tenants).values(id=OTHER, name="other", created_at=ledger_now()))
    theirs = submit(ledger, OTHER, document()).job.id
    urgent = submit(ledger, LOCAL_TENANT, document(schedule={"priority": 5})).job.id
    order = []
    for _ in range(4):
        order.append(next_claimable(ledger)[0])
        claimed(ledger, order[-1])
    assert theirs in order[:2]
    assert urgent in order[:2]
    assert set(order[2:]) <= set(ids)


def test_cancels_and_deletes_at_once_leave_the_whole_job_or_nothing(
    ledger: Engine, divided: Callable[..., Any], at_once: Callable[..., list[Any]]
) -> None:
    for _ in range(4):
        mine, ids = divided(4)
        first, second = (claimed(ledger, each) for each in ids[:2])
        acts: list[Callable[[], Any]] = [
            lambda mine=mine: request_cancel(ledger, LOCAL_TENANT, mine.job_id),
            lambda ids=ids: request_cancel(ledger, LOCAL_TENANT, ids[3]),
            lambda mine=mine: delete_job(ledger, LOCAL_TENANT, mine.job_id),
            lambda first=first: attempt_endings.hand_back(ledger, first),
            lambda second=second: attempt_endings.finish(ledger, second),
            lambda mine=mine: delete_job(ledger, LOCAL_TENANT, mine.job_id),
        ]
        done = at_once(len(acts), lambda n, acts=acts: acts[n]())
        faults = {type(each).__name__ for each in done if isinstance(each, BaseException)}
        assert faults <= {"JobStillActive", "JobNotFound", "LeaseLost"}, done
        for each in (first, second):
            with contextlib.suppress(LeaseLost):
                attempt_endings.hand_back(ledger, each)
        parent = read_job(ledger, LOCAL_TENANT, mine.job_id)
        left = [read_job(ledger, LOCAL_TENANT, each) for each in ids]
        assert [each is None for each in left] == [parent is None] * 4
        if parent is not None:
            for each in (
                ids[0],
                ids[3],
            ):  # one may have been handed back before the cancel came, and was cancelled then
                assert seen(ledger, each).ended
            assert parent.state == "cancelled"
            delete_job(ledger, LOCAL_TENANT, mine.job_id)
        assert next_claimable(ledger) == []


@pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled"])
def test_a_job_whose_pieces_an_earlier_version_has_ended_is_not_left_behind(
    ledger: Engine, divided: Callable[..., Any], failure: Callable[..., Failed], end: str
) -> None:
    """That one ends a piece as any job, and tells no parent."""
    mine, ids = divided(3)
    other, _ = divided(2)
    claims = [claimed(ledger, each) for each in ids[:2]]
    if end == "cancelled":
        request_cancel(ledger, LOCAL_TENANT, mine.job_id)
        for each in claims:
            attempt_endings.hand_back(ledger, dataclasses.replace(each, parent_id=None))
    elif end == "failed":
        attempt_endings.fail(ledger, dataclasses.replace(claims[1], parent_id=None), failure("usage"))
    else:
        for each in (*claims, claimed(ledger, ids[2])):
            attempt_endings.finish(ledger, dataclasses.replace(each, parent_id=None))
    assert seen(ledger, mine.job_id).state == ("cancelling" if end == "cancelled" else "waiting")
    assert reaper.reap_expired(ledger) == 0
    parent = seen(ledger, mine.job_id)
    assert parent.state == {"succeeded": "queued"}.get(end, end)
    assert seen(ledger, other.job_id).state == "waiting"
    if end == "failed":
        assert parent.failure is not None
        assert parent.failure["message"].startswith("piece 2 of 3")
        assert states(ledger, mine.job_id) == ["cancelling", "failed", "cancelled"]
    assert reaper.reap_expired(ledger) == 0
    assert seen(ledger, mine.job_id).state == parent.state
