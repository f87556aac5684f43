"""An honest job of thousands of pieces slows nobody else: what concerns them all takes a few statements."""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event

from catalog.frames import Divided
from catalog.requests.schedule import Schedule
from jobs.queue import attempt_endings, attempt_writes
from jobs.queue.claims import claim
from jobs.queue.division import divide
from jobs.queue.piece_progress import report_piece
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.pieces import read_pieces
from jobs.repository.results import events_after
from jobs.repository.store import read_job, request_cancel, reschedule

PIECES = 2_000


@contextlib.contextmanager
def statements(ledger: Engine) -> Iterator[list[str]]:
    """The statements that are sent meanwhile; one that is executed for many rows is one."""
    sent: list[str] = []

    def note(*given: Any) -> None:
        sent.append(given[2])

    event.listen(ledger, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(ledger, "before_cursor_execute", note)


def claimed(ledger: Engine, job_id: str) -> Claim:
    made = claim(ledger, job_id, "worker", secrets.token_hex(8), 3600)
    assert made is not None
    return made


@pytest.fixture
def divided(ledger: Engine, submitted: Callable[..., str]) -> tuple[str, list[str]]:
    """A job of many pieces, and their ids."""
    job_id = submitted(shards=PIECES)
    whole = {"round": "collect", "count": PIECES, "total": PIECES}
    pieces = tuple({**whole, "index": each, "begin": each, "end": each + 1} for each in range(PIECES))
    assert divide(ledger, claimed(ledger, job_id), Divided(round="collect", pieces=pieces)) == "waiting"
    return job_id, [each.id for each in read_pieces(ledger, LOCAL_TENANT, job_id)]


def test_cancel_progress_and_schedule_take_a_few_statements(ledger: Engine, divided: tuple[str, list[str]]) -> None:
    job_id, ids = divided
    first, second = claimed(ledger, ids[0]), claimed(ledger, ids[1])
    attempt_endings.finish(ledger, first)
    attempt_writes.write_progress(ledger, second, {"stage": "collection", "percent": 50.0})
    with statements(ledger) as sent:
        assert report_piece(ledger, second, begins=True)
    assert len(sent) < 15
    progress = read_job(ledger, LOCAL_TENANT, job_id)
    assert progress is not None
    assert progress.progress is not None
    assert (progress.progress["done"], progress.progress["total"]) == (1, PIECES)
    assert progress.progress["percent"] == round(60 * 1.5 / PIECES, 1)

    with statements(ledger) as sent:
        reschedule(ledger, LOCAL_TENANT, job_id, Schedule(priority=3))
    assert len(sent) < 40

    with statements(ledger) as sent:
        assert request_cancel(ledger, LOCAL_TENANT, job_id).state == "cancelling"
    assert len(sent) < 60
    states = [each.state for each in read_pieces(ledger, LOCAL_TENANT, job_id)]
    assert states == ["succeeded", "cancelling", *["cancelled"] * (PIECES - 2)]
    told = [(each.type, each.data.get("state")) for each in events_after(ledger, LOCAL_TENANT, ids[7], 0)]
    assert told == [("state", "queued"), ("schedule", None), ("state", "cancelled")]
    assert attempt_endings.hand_back(ledger, second) == "cancelled"
    ended = read_job(ledger, LOCAL_TENANT, job_id)
    assert ended is not None
    assert ended.state == "cancelled"
