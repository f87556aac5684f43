"""The Agent: slots, wake-ups, the poll that makes wake-ups dispensable, and the drain."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import insert, update

from jobs.codec import parse_document
from jobs.errors import LedgerUnavailable
from jobs.queue.claims import claim
from jobs.records import LOCAL_TENANT
from jobs.repository.store import read_job, request_cancel
from jobs.repository.submission import submit
from jobs.scheduling.placement import next_places
from jobs.schema.clock import ledger_now
from jobs.schema.database import after_queueing, writing
from jobs.schema.tables import jobs, tenants
from worker.agent import agent as agent_module
from worker.agent.agent import Agent
from worker.agent.maintenance import WorkerMaintenance

pytestmark = pytest.mark.real_programs


@pytest.fixture
def agent(ledger: Any, settings: Any, scripted: Any) -> Iterator[Any]:
    """An Agent, drained after the test."""
    made = []

    def start(*steps: Any, poll: Any = True, **changes: Any) -> Any:
        chosen = settings(**changes)
        new = Agent(ledger, chosen, scripted(*steps))
        made.append(new)
        if poll:
            new.start()
        return new

    yield start
    assert all(each.drain(240) for each in made)


def test_a_job_is_found_without_any_wakeup(agent: Any, submitted: Any, job: Any, eventually: Any) -> None:
    job_id = submitted()
    agent(["finish"])
    eventually(lambda: job(job_id).state == "succeeded")


def test_its_pulse_goes_on_while_the_database_is_away_and_ends_with_it(
    agent: Any, eventually: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    def away(*_: Any) -> Any:
        raise LedgerUnavailable

    pulse = tmp_path / "pulse"
    monkeypatch.setattr(agent_module, "next_places", away)
    beating = agent(pulse_file=pulse)
    eventually(pulse.exists)
    pulse.unlink()
    eventually(pulse.exists)
    assert beating.drain(240)
    pulse.unlink()
    time.sleep(0.3)
    assert not pulse.exists()


def test_a_slot_takes_a_job_and_without_one_the_next_stays(
    agent: Any, submitted: Any, job: Any, eventually: Any, tmp_path: Any
) -> None:
    first, second = submitted(), submitted()
    chosen = agent(["wait_for", str(tmp_path / "go")], ["finish"], poll=False)
    assert chosen.take()
    assert not chosen.take()  # no slot
    assert (job(first).state, job(second).state) == ("running", "queued")
    (tmp_path / "go").touch()
    eventually(lambda: job(first).state == "succeeded")
    eventually(chosen.take)
    eventually(lambda: job(second).state == "succeeded")


def test_a_wakeup_for_nothing_costs_a_look(
    agent: Any, submitted: Any, job: Any, eventually: Any, monkeypatch: Any
) -> None:
    looks = []
    monkeypatch.setattr(agent_module, "next_places", lambda *given: looks.append(1) or next_places(*given))
    chosen = agent(["finish"], poll_seconds=3600)
    eventually(lambda: looks)
    heard = len(looks)
    chosen.wake()
    eventually(lambda: len(looks) > heard)
    assert len(looks) == heard + 1
    job_id = submitted()
    chosen.wake()
    eventually(lambda: job(job_id).state == "succeeded")


def test_without_a_free_slot_a_wakeup_costs_nothing_and_loses_nothing(
    agent: Any, submitted: Any, job: Any, eventually: Any, monkeypatch: Any, tmp_path: Any
) -> None:
    looks = []
    watched = Agent._look_after_devices
    monkeypatch.setattr(Agent, "_look_after_devices", lambda self: looks.append(1) or watched(self))
    first = submitted()
    chosen = agent(["wait_for", str(tmp_path / "go")], ["finish"], poll_seconds=3600)
    eventually(lambda: job(first).state == "running" and chosen._supervisors)
    second = submitted()
    for _ in range(100):
        chosen.wake()
    time.sleep(0.3)
    assert len(looks) == 1  # at its start
    (tmp_path / "go").touch()
    eventually(lambda: job(second).state == "succeeded")


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_a_claim_of_which_every_reply_was_lost_is_found_again_and_counts_no_failure(
    agent: Any, submitted: Any, job: Any, eventually: Any, monkeypatch: Any
) -> None:
    lost = []

    def claim_unheard(*given: Any, **named: Any) -> Any:
        held = claim(*given, **named)
        if len(lost) < 4:
            lost.append(held)
            raise LedgerUnavailable
        return held

    monkeypatch.setattr(agent_module, "claim", claim_unheard)
    monkeypatch.setattr(agent_module, "_RETRY_SECONDS", 0.1)
    job_id = submitted()
    agent(["finish"], poll_seconds=0.1)
    eventually(lambda: job(job_id).ended)
    assert (job(job_id).state, job(job_id).attempt, job(job_id).failures) == ("succeeded", 1, 0)


@pytest.mark.parametrize("error", [LedgerUnavailable, RuntimeError])
def test_a_look_that_failed_is_repeated_soon_however_rare_the_others_are(
    agent: Any, submitted: Any, job: Any, eventually: Any, monkeypatch: Any, error: type[Exception]
) -> None:
    """It may have been for a wake-up, and none is sent again."""
    failing = [error, error]

    def away_twice(*given: Any) -> Any:
        if failing:
            raise failing.pop()
        return next_places(*given)

    monkeypatch.setattr(agent_module, "_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(agent_module, "next_places", away_twice)
    job_id = submitted()
    agent(["finish"], poll_seconds=3600)
    eventually(lambda: job(job_id).state == "succeeded")


def test_many_wakeups_of_one_tenant_do_not_overtake_another(
    ledger: Any, agent: Any, job: Any, events: Any, submitted: Any, eventually: Any, tmp_path: Any
) -> None:
    """While the first job runs wake-ups come for all of its tenant's backlog; then another tenant gets the slot."""
    backlog = [submitted() for _ in range(5)]
    chosen = agent(["wait_for", str(tmp_path / "go")], ["finish"], poll_seconds=3600, slots=2)
    eventually(lambda: [job(each).state for each in backlog[:2]] == ["running", "running"])
    with writing(ledger) as connection:
        connection.execute(insert(tenants).values(id="late", name="late", created_at=ledger_now()))
    late = submit(ledger, "late", parse_document(json.dumps(job(backlog[0]).document).encode())).job.id
    for _ in backlog * 3:
        chosen.wake()
    (tmp_path / "go").touch()
    eventually(lambda: all(job(each).ended for each in backlog) and read_job(ledger, "late", late).ended)
    claimed = {each: job(each).started_at for each in backlog} | {late: read_job(ledger, "late", late).started_at}
    assert sorted(claimed, key=claimed.get)[2] == late


def test_two_slots_run_two_jobs_at_once(agent: Any, submitted: Any, job: Any, eventually: Any, tmp_path: Any) -> None:
    ids = [submitted() for _ in range(3)]
    agent(["wait_for", str(tmp_path / "go")], ["finish"], slots=2)
    eventually(lambda: [job(each).state for each in ids] == ["running", "running", "queued"])
    (tmp_path / "go").touch()
    eventually(lambda: all(job(each).state == "succeeded" for each in ids))


def test_a_drain_hands_everything_back(
    agent: Any, submitted: Any, job: Any, events: Any, eventually: Any, ended: Any
) -> None:
    ids = [submitted() for _ in range(2)]
    chosen = agent(["pids"], ["wait_for_sigterm"], slots=2)
    eventually(lambda: all(events(each, "log") for each in ids))
    assert chosen.drain(240)
    assert [(job(each).state, job(each).attempt) for each in ids] == [("queued", 0)] * 2
    assert not chosen.take()
    pids = [pid for each in ids for line in events(each, "log") for pid in json.loads(line.data["message"])]
    assert ended(pids, 0)


def test_nothing_looks_into_the_queue_after_a_drain(agent: Any) -> None:
    running = agent(["finish"])
    running.drain(240)
    assert "poller" not in {thread.name for thread in threading.enumerate()}


def test_begin_drain_alone_is_enough(agent: Any, submitted: Any, job: Any, events: Any, eventually: Any) -> None:
    job_id = submitted()
    chosen = agent(["pids"], ["wait_for_sigterm"])
    eventually(lambda: events(job_id, "log"))
    chosen.begin_drain()
    eventually(lambda: job(job_id).state == "queued")


def test_a_poison_job_ends_and_others_go_on(
    agent: Any, submitted: Any, job: Any, eventually: Any, tmp_path: Any
) -> None:
    poison = submitted()
    agent(["wait_for", str(tmp_path / "go")], ["kill_self"])
    (tmp_path / "go").touch()
    eventually(lambda: job(poison).state == "failed")
    assert job(poison).failures == 2
    other = submitted()
    eventually(lambda: job(other).state == "failed")


def test_cancelled_before_it_is_claimed_it_never_runs(ledger: Any, agent: Any, submitted: Any, job: Any) -> None:
    job_id = submitted()
    request_cancel(ledger, LOCAL_TENANT, job_id)
    assert not agent(["finish"], poll=False).take()
    assert job(job_id).state == "cancelled"


def test_the_maintenance_takes_jobs_from_the_silent(
    ledger: Any, settings: Any, submitted: Any, job: Any, eventually: Any
) -> None:
    job_id = submitted()
    assert claim(ledger, job_id, "gone", "token", 0.5) is not None
    woken: list[int] = []
    after_queueing(ledger, lambda: woken.append(1))
    maintenance = WorkerMaintenance(ledger, settings().ledger)
    maintenance.start()
    try:
        eventually(lambda: job(job_id).state == "queued")
        assert job(job_id).failures == 1
        eventually(lambda: woken == [1])
    finally:
        maintenance.stop()


def test_the_maintenance_archives_what_has_ended_if_it_is_told_to(
    ledger: Any, settings: Any, submitted: Any, job: Any, eventually: Any
) -> None:
    job_id = submitted()
    request_cancel(ledger, LOCAL_TENANT, job_id)
    chosen = settings().ledger
    for days, files in ((None, "keep"), (0, "drop")):
        maintenance = WorkerMaintenance(
            ledger, chosen.model_copy(update={"retention_days": days, "retention_files": files})
        )
        maintenance.start()
        try:
            if days is not None:
                eventually(lambda: job(job_id).archived_at is not None)
        finally:
            maintenance.stop()
        assert (job(job_id).archived_at is None) == (days is None)


def test_a_store_that_is_silent_holds_up_no_rescue(
    ledger: Any, settings: Any, submitted: Any, job: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = threading.Event()
    monkeypatch.setattr("worker.agent.maintenance.sweep_scratch", lambda *_: silent.wait() and 0)
    maintenance = WorkerMaintenance(ledger, settings().ledger)
    maintenance.start()
    try:
        lost = submitted()
        assert claim(ledger, lost, "gone", "token", 0.3) is not None
        eventually(lambda: job(lost).state == "queued")
        assert not silent.is_set()
    finally:
        silent.set()
        maintenance.stop()


def test_the_maintenance_ends_what_waits_past_its_deadline(
    ledger: Any, settings: Any, submitted: Any, job: Any, eventually: Any
) -> None:
    job_id = submitted()
    with writing(ledger) as connection:
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(deadline_at=ledger_now(0.3)))
    maintenance = WorkerMaintenance(ledger, settings().ledger)
    maintenance.start()
    try:
        eventually(lambda: job(job_id).ended)
    finally:
        maintenance.stop()
    assert (job(job_id).attempt, job(job_id).failure["code"]) == (0, "deadline_exceeded")
