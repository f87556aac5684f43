"""Counters say how often something happened, whatever becomes of the rows and of who counted."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Engine, select, update
from sqlalchemy.exc import SQLAlchemyError

from jobs.devices.registry import Device, Worker, register
from jobs.metrics.counters import (
    OPERATOR_CODES,
    SHARDS,
    add,
    add_failure,
    note_refused,
    note_round,
    read_counters,
    seconds_since_round,
)
from jobs.metrics.snapshot import take_snapshot
from jobs.queue.attempt_endings import fail, finish, hand_back
from jobs.queue.reaper import end_overdue, reap_expired
from jobs.records import LOCAL_TENANT, Claim
from jobs.repository.store import delete_job, request_cancel
from jobs.schema.clock import ledger_now
from jobs.schema.database import migration_config, open_database, reading, upgrade_schema, writing
from jobs.schema.tables import counters as table
from jobs.schema.tables import jobs

Held = Callable[..., Claim]


def counted(engine: Engine) -> dict[Any, dict[str, int]]:
    with reading(engine) as connection:
        return read_counters(connection)


def test_a_job_s_life_is_counted_and_outlives_it(ledger: Engine, held: Held, failure: Any, expire: Any) -> None:
    drained = held()
    assert hand_back(ledger, drained) == "queued"
    assert fail(ledger, held(drained.job_id), failure("transient")) == "queued"
    silent = held(drained.job_id)
    expire(silent.job_id)
    assert reap_expired(ledger) == 1
    assert finish(ledger, held(drained.job_id)) == "succeeded"
    assert fail(ledger, held(), failure("fatal")) == "failed"
    expected = {
        "moves": {"running": 5, "queued": 3, "succeeded": 1, "failed": 1},
        "drains": {"": 1},
        "reaped": {"": 1},
        "attempt_failures": {"transient out_of_memory": 1, "transient worker_lost": 1, "fatal out_of_memory": 1},
        "job_failures": {"fatal": 1},
    }
    assert counted(ledger) == expected
    delete_job(ledger, LOCAL_TENANT, drained.job_id)
    assert counted(ledger) == expected


def test_cancelling_is_no_failure_and_no_drain(ledger: Engine, held: Held, queued: Any, failure: Any) -> None:
    request_cancel(ledger, LOCAL_TENANT, queued())
    for end in (hand_back, lambda engine, mine: fail(engine, mine, failure("fatal"))):
        mine = held()
        request_cancel(ledger, LOCAL_TENANT, mine.job_id)
        assert end(ledger, mine) == "cancelled"
    assert counted(ledger) == {"moves": {"running": 2, "cancelling": 2, "cancelled": 3}}


def test_a_job_that_ends_in_the_queue_failed(ledger: Engine, queued: Any) -> None:
    job_id = queued()
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(deadline_at=ledger_now(-1)))
    assert end_overdue(ledger) == 1
    assert counted(ledger) == {"moves": {"failed": 1}, "job_failures": {"usage": 1}}


def test_what_is_rolled_back_is_not_counted(ledger: Engine) -> None:
    def break_off() -> None:
        with writing(ledger) as connection:
            add(connection, "reaped")
            raise SQLAlchemyError

    with pytest.raises(SQLAlchemyError):
        break_off()
    assert counted(ledger) == {}


def test_eight_at_once_lose_no_count(ledger: Engine, at_once: Any) -> None:
    answers = at_once(8, lambda _: [note_refused(ledger) for _ in range(5)])
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    assert counted(ledger) == {"refused_writes": {"": 40}}
    with reading(ledger) as connection:
        assert 1 < len(connection.execute(select(table)).all()) <= SHARDS


def test_codes_are_a_closed_set(ledger: Engine) -> None:
    with writing(ledger) as connection:
        for code in ("crashed", "sent\nby a model", "x" * 4_000):
            add_failure(connection, "fatal", code, ends_job=False)
    assert counted(ledger) == {"attempt_failures": {"fatal crashed": 1, "fatal other": 2}}


def test_what_ends_an_attempt_from_outside_is_counted_by_name() -> None:
    """The codes that supervisor, crash and reaper write, as their sources have them."""
    here = Path(__file__).resolve().parents[3]
    sources = [
        (here / name).read_text()
        for name in ("worker/supervision/supervisor.py", "worker/process/crash.py", "jobs/queue/reaper.py")
    ]
    code = re.compile(r'(?:code=|"code": |_failure\("\w+", |^[A-Z_]+ = )"(\w+)"', re.MULTILINE)
    written = {found for source in sources for found in code.findall(source)}
    assert {"worker_lost", "oom", "not_started"} <= written
    assert written <= OPERATOR_CODES


def test_a_refusal_that_cannot_be_counted_is_no_other_error(tmp_path: Any) -> None:
    unreachable = open_database("postgresql://nobody@127.0.0.1:1/x")
    note_refused(unreachable)
    unreachable.dispose()


def test_rounds_leave_their_time(ledger: Engine) -> None:
    with reading(ledger) as connection:
        assert seconds_since_round(connection) == {}
    note_round(ledger, "reaper")
    for least in (0, 100):
        with writing(ledger) as connection:
            old = {"changed_at": ledger_now(-least)}
            connection.execute(update(table).where(table.c.label == "reaper").values(old))
        with reading(ledger) as connection:
            assert least <= seconds_since_round(connection)["reaper"] < least + 60


def test_the_snapshot_of_a_ledger(ledger: Engine, held: Held, queued: Any, expire: Any, failure: Any) -> None:
    empty = take_snapshot(ledger)
    assert empty.active_jobs == {"queued": 0, "running": 0, "cancelling": 0, "waiting": 0}
    assert (empty.queue_oldest_seconds, empty.leases_expired) == (0, 0)
    _, second, _ = queued(), queued(), queued()
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == second).values(queued_at=ledger_now(-500)))
    silent, cancelling = held(), held()
    expire(silent.job_id)
    request_cancel(ledger, LOCAL_TENANT, cancelling.job_id)
    finish(ledger, held())
    host = Device(uuid="host-1", kind="host", name="host", capacity_bytes=100, used_bytes=30)
    for name, seconds in (("a", 60), ("b", 60), ("gone", -1)):
        here = Worker(id=name, node="n", process_space="p", version="1", slots=2, factories=())
        register(ledger, here, [host] if name == "a" else [], seconds)
    seen = take_snapshot(ledger)
    # the silent job's slot is free, or its worker is gone
    assert (seen.workers, seen.slots, seen.slots_busy) == (2, 4, 1)
    assert [(each.uuid, each.free_bytes) for each in seen.devices] == [("host-1", 70)]
    assert seen.active_jobs == {"queued": 3, "running": 1, "cancelling": 1, "waiting": 0}
    assert 500 <= seen.queue_oldest_seconds < 560
    assert seen.leases_expired == 1
    assert seen.counters["moves"] == {"running": 3, "cancelling": 1, "succeeded": 1}


def test_jobs_that_had_ended_before_there_were_counters_count(ledger: Engine, ledger_url: str, held: Held) -> None:
    for _ in range(3):
        finish(ledger, held())
    with writing(ledger) as connection:
        command.downgrade(migration_config(connection), "0005")
    upgrade_schema(ledger_url)
    assert counted(ledger) == {"moves": {"succeeded": 3}}
    finish_one_more = held()
    finish(ledger, finish_one_more)
    assert counted(ledger)["moves"]["succeeded"] == 4
