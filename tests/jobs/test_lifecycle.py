"""Whatever is done to a job in whatever order, its history follows the table of legal moves."""

import itertools
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, select, update

from catalog.frames import Failed
from catalog.requests.job import JobDocument
from jobs.errors import LeaseLost
from jobs.lifecycle import HELD, LEGAL_MOVES, STATES, TERMINAL, ending
from jobs.queue.attempt_endings import fail, finish, hand_back
from jobs.queue.claims import claim, heartbeat
from jobs.queue.fence import draw, move
from jobs.queue.reaper import end_overdue, reap_expired
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.results import events_after
from jobs.repository.store import read_job, request_cancel
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.identifiers import is_id, new_id
from jobs.schema.tables import jobs
from tests.jobs.conftest import POSTGRESQL_OFTEN

ACTS = (
    "claim",
    "finish",
    "fatal",
    "transient",
    "hand_back",
    "cancel",
    "expire",
    "reap",
    "overdue",
    "heartbeat",
    "zombie",
)


def test_the_table_is_closed_and_every_state_can_end() -> None:
    assert {target for moves in LEGAL_MOVES.values() for target in moves} <= set(STATES)
    assert {"succeeded", "failed", "cancelled"} == TERMINAL
    for state in STATES:
        reached, todo = set(), [state]
        while todo:
            here = todo.pop()
            reached.add(here)
            todo += [there for there in LEGAL_MOVES[here] if there not in reached]
        assert reached & TERMINAL
    for state, wanted in itertools.product(HELD, ("queued", "succeeded", "failed")):
        assert ending(state, wanted) in LEGAL_MOVES[state]  # type: ignore[arg-type]


@pytest.mark.parametrize("dialect", POSTGRESQL_OFTEN)
def test_no_other_move_passes(ledger: Engine, queued: Callable[..., str]) -> None:
    for state, target in itertools.product(STATES, STATES):
        if target in LEGAL_MOVES[state]:
            continue
        job_id = queued()
        with writing(ledger) as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(state=state))
        with writing(ledger) as connection:
            drawn = draw(connection, jobs.c.id == job_id)
            assert drawn is not None
            with pytest.raises(ValueError, match=f"no job goes from {state} to {target}"):
                move(connection, drawn, target)


@pytest.mark.parametrize("dialect", POSTGRESQL_OFTEN)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(ACTS), min_size=1, max_size=14))
def test_every_history_is_legal(
    ledger: Engine, document: Callable[..., JobDocument], woken: Callable[[], int], acts: list[str]
) -> None:
    with writing(ledger) as connection:  # what the histories before this one left must not be reaped in it
        left = jobs.c.state.in_(HELD)
        connection.execute(update(jobs).where(left).values(lease_expires_at=ledger_now(86_400)))
    woken()
    job_id = submit(ledger, LOCAL_TENANT, document()).job.id
    claims: list[Claim] = []
    for act in acts:
        perform(ledger, job_id, act, claims)
    job = read_job(ledger, LOCAL_TENANT, job_id)
    assert job is not None
    events = events_after(ledger, LOCAL_TENANT, job_id)
    history = [event.data["state"] for event in events if event.type == "state"]
    assert history[0] == "queued"
    assert history[-1] == job.state
    for here, there in itertools.pairwise(history):
        assert there in LEGAL_MOVES[here]
    assert job.fence == history.count("running")
    assert job.failures <= job.max_failures
    assert (job.finished_at is not None) == (job.state in TERMINAL)
    assert (job.failure is not None) == (job.state == "failed")
    with reading(ledger) as connection:
        row = connection.execute(select(jobs).where(jobs.c.id == job_id)).one()
    assert woken() == history.count("queued")
    assert (row.lease_expires_at is not None) == (row.claim_token is not None) == (job.state in HELD)
    assert [event.seq for event in events] == sorted({event.seq for event in events})


def perform(engine: Engine, job_id: str, act: str, claims: list[Claim]) -> None:
    if act == "claim":
        made = claim(engine, job_id, "w", secrets.token_hex(8), 3600)
        if made is not None:
            claims.append(made)
    elif act == "cancel":
        request_cancel(engine, LOCAL_TENANT, job_id)
    elif act == "reap":
        reap_expired(engine)
        end_overdue(engine)
    elif act == "overdue":
        with writing(engine) as connection:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(deadline_at=ledger_now(-1)))
    elif act == "expire":
        with writing(engine) as connection:
            connection.execute(
                update(jobs).where(jobs.c.id == job_id, jobs.c.state.in_(HELD)).values(lease_expires_at=ledger_now(-1))
            )
    elif claims:
        held_writes: dict[str, Callable[[Claim], Any]] = {
            "finish": lambda mine: finish(engine, mine),
            "zombie": lambda mine: finish(engine, mine),
            "hand_back": lambda mine: hand_back(engine, mine),
            "heartbeat": lambda mine: heartbeat(engine, mine, 3600),
            "fatal": lambda mine: fail(engine, mine, said("fatal")),
            "transient": lambda mine: fail(engine, mine, said("transient")),
        }
        current = read_job(engine, LOCAL_TENANT, job_id)
        assert current is not None
        mine = claims[0] if act == "zombie" else claims[-1]
        holds = current.state in HELD and current.fence == mine.fence
        if holds:
            held_writes[act](mine)
        else:
            with pytest.raises(LeaseLost):
                held_writes[act](mine)


def said(category: Any) -> Failed:
    return Failed(category=category, code="c", message="m", pointer=None, layer=None, detail=None)


def test_ids_are_of_version_7_and_follow_the_clock() -> None:
    before = datetime.now(UTC).timestamp()
    ids = [new_id() for _ in range(1000)]
    after = datetime.now(UTC).timestamp()
    assert len(set(ids)) == 1000
    assert all(is_id(each) for each in ids)
    stamps = [int(each.replace("-", "")[:12], 16) / 1000 for each in ids]
    assert before - 0.001 <= min(stamps) <= max(stamps) <= after
    assert stamps == sorted(stamps)
    assert not any(is_id(text) for text in ("", ids[0].upper(), ids[0] + "0", "x" + ids[0][1:], ids[0] + "\n"))
