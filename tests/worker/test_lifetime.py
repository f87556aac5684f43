"""When a worker ends by itself: what the settings say, and when there is nothing left to do."""

import signal
import threading
import time
from typing import Any

import pytest
from sqlalchemy import update

from jobs.errors import SettingsInvalid
from jobs.queue.claims import claim
from jobs.schema.database import writing
from jobs.schema.tables import jobs
from worker.agent.agent import Agent
from worker.devices import host
from worker.lifetime import ENDING_SECONDS, Lifetime, LifetimeSettings, end_by_itself

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"SLURM_JOB_END_TIME": "1800003600"}, None),  # Slurm's word alone asks for nothing
        ({"SLURM_JOB_END_TIME": "1800003600", "KRONOSCOPE_DRAIN_BEFORE": "10m"}, 3000),
        ({"KRONOSCOPE_WALL": "4h", "KRONOSCOPE_DRAIN_BEFORE": "90s"}, 14_310),
        ({"KRONOSCOPE_WALL": "1.5h"}, 5400),
        ({"KRONOSCOPE_WALL": "1d", "SLURM_JOB_END_TIME": "soon"}, 86_400),  # what the operator says counts
    ],
)
def test_it_ends_so_long_before_its_machine_is_taken_away(environ: Any, seconds: Any) -> None:
    lifetime = LifetimeSettings.from_environment(environ).lifetime(NOW)
    assert lifetime.seconds == (None if seconds is None else seconds - ENDING_SECONDS)
    assert not lifetime.until_idle


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"KRONOSCOPE_DRAIN_BEFORE": "10m"}, "KRONOSCOPE_WALL, such as 4h"),
        ({"KRONOSCOPE_DRAIN_BEFORE": "10"}, "KRONOSCOPE_DRAIN_BEFORE is not a duration.* 10m"),
        ({"KRONOSCOPE_WALL": "-4h"}, "KRONOSCOPE_WALL is not a duration"),
        ({"KRONOSCOPE_WALL": "04:00:00"}, "KRONOSCOPE_WALL is not a duration"),
        ({"KRONOSCOPE_WALL": "9m", "KRONOSCOPE_DRAIN_BEFORE": "10m"}, "540 s away; .* 600 s"),
        ({"SLURM_JOB_END_TIME": "1799999999", "KRONOSCOPE_DRAIN_BEFORE": "1s"}, "-1 s away"),
        ({"SLURM_JOB_END_TIME": "tomorrow", "KRONOSCOPE_DRAIN_BEFORE": "1s"}, "SLURM_JOB_END_TIME is not a number"),
        ({"KRONOSCOPE_UNTIL_IDLE": "yes"}, "KRONOSCOPE_UNTIL_IDLE is neither 0 nor 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(environ: Any, said: str) -> None:
    with pytest.raises(SettingsInvalid, match=said):
        LifetimeSettings.from_environment(environ).lifetime(NOW)


def test_it_is_idle_when_the_queue_is_empty_and_its_last_job_has_ended(
    ledger: Any, settings: Any, scripted: Any, submitted: Any, job: Any, eventually: Any, tmp_path: Any
) -> None:
    ids = [submitted() for _ in range(3)]
    chosen = settings(slots=2, lifetime=Lifetime(until_idle=True))
    agent = Agent(ledger, chosen, scripted(["wait_for", str(tmp_path / "go")], ["finish"]))
    agent.start()
    eventually(lambda: [job(each).state for each in ids] == ["running", "running", "queued"])
    assert not agent.idle.wait(0.5)
    (tmp_path / "go").touch()
    assert agent.idle.wait(240)
    assert [job(each).state for each in ids] == ["succeeded"] * 3
    late = submitted()
    assert not agent.take()
    assert agent.drain(240)
    assert job(late).state == "queued"


def test_a_free_slot_beside_a_running_job_is_not_idle(
    ledger: Any, settings: Any, scripted: Any, submitted: Any, job: Any, eventually: Any, tmp_path: Any
) -> None:
    first = submitted()
    chosen = settings(slots=2, lifetime=Lifetime(until_idle=True))
    agent = Agent(ledger, chosen, scripted(["wait_for", str(tmp_path / "go")], ["finish"]))
    agent.start()
    eventually(lambda: job(first).state == "running")
    assert not agent.idle.wait(0.5)
    second = submitted()
    eventually(lambda: job(second).state == "running")
    (tmp_path / "go").touch()
    assert agent.idle.wait(240)
    assert agent.drain(240)


def test_another_workers_job_is_not_waited_for(ledger: Any, settings: Any, scripted: Any, submitted: Any) -> None:
    assert claim(ledger, submitted(), "elsewhere", "token", 600) is not None
    agent = Agent(ledger, settings(lifetime=Lifetime(until_idle=True)), scripted(["finish"]))
    agent.start()
    assert agent.idle.wait(240)
    assert agent.drain(240)


def test_a_job_that_others_leave_no_room_for_is_not_waited_for(
    ledger: Any, settings: Any, scripted: Any, submitted: Any, job: Any
) -> None:
    """It would fit on this machine, were nothing else running there."""
    job_id = submitted()
    with writing(ledger) as connection:
        connection.execute(update(jobs).values(needs_bytes=host("node").capacity_bytes))
    agent = Agent(ledger, settings(lifetime=Lifetime(until_idle=True)), scripted(["finish"]))
    agent.start()
    assert agent.idle.wait(240)
    assert agent.drain(240)
    assert job(job_id).state == "queued"


def test_without_being_asked_to_it_never_says_so(ledger: Any, settings: Any, scripted: Any) -> None:
    agent = Agent(ledger, settings(), scripted(["finish"]))
    agent.start()
    assert not agent.idle.wait(0.5)
    assert agent.drain(240)


def test_what_starting_took_is_part_of_its_life(eventually: Any) -> None:
    told = []
    before = signal.signal(signal.SIGTERM, lambda *_: told.append("end"))
    try:
        end_by_itself(Lifetime(seconds=3600), threading.Event(), time.monotonic() - 3600)
        eventually(lambda: told)
    finally:
        signal.signal(signal.SIGTERM, before)
