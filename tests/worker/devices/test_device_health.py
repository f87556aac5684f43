"""A worker that is not fit to begin a job: no job pays for it, others do it, and it comes back when it is well."""

import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from jobs.devices.registry import list_devices
from jobs.schema.database import reading, writing
from jobs.schema.tables import device_leases, jobs, workers
from tests.queue_order import next_claimable
from worker import devices as device_health_module
from worker.agent.agent import Agent
from worker.agent.registration import Registration
from worker.devices import LONGEST_REST_SECONDS, WITHHELD_SECONDS, DeviceHealth, fake_gpu
from worker.process import child_process as child_module
from worker.supervision import supervisor as supervisor_module


@pytest.fixture
def agent(ledger: Engine, settings: Any) -> Iterator[Any]:
    """``agent(command, poll=False, node="b")``: an Agent, drained after the test."""
    made = []

    def start(command: Any, *, poll: bool = True, **changes: Any) -> Agent:
        made.append(Agent(ledger, settings(**{"fake_gpus": (2**34,)} | changes), command))
        if poll:
            made[-1].start()
        return made[-1]

    yield start
    assert all(each.drain(240) for each in made)


@pytest.fixture
def returned(events: Any) -> Callable[[str], list[str]]:
    """``returned(id)``: why the job went back into the queue, each time."""

    def read(job_id: str) -> list[str]:
        return [each.data["reason"] for each in events(job_id, "state") if "reason" in each.data]

    return read


SQLITE = pytest.mark.parametrize("dialect", ["sqlite"])


def leases(ledger: Engine) -> list[Any]:
    with reading(ledger) as connection:
        return list(connection.execute(select(device_leases)).all())


def test_rests_grow_to_a_minute_and_begin_anew_with_the_first_start() -> None:
    now = [0.0]
    device_health = DeviceHealth(lambda: now[0])
    assert not device_health.resting()
    rests = []
    for _ in range(7):
        rests.append(device_health.not_started())
        now[0] += 1
        assert device_health.not_started() == rests[-1] - 1  # of several slots at once: one rest
        assert device_health.resting()
        now[0] += rests[-1] - 1
        assert not device_health.resting()
    assert rests == [5, 10, 20, 40, 60, 60, LONGEST_REST_SECONDS]
    device_health.started()
    assert device_health.not_started() == 5


def test_a_withheld_device_is_not_offered_until_its_time_is_over(
    ledger: Engine, settings: Any, eventually: Any
) -> None:
    now = [0.0]
    device_health = DeviceHealth(lambda: now[0])
    well, sick = fake_gpu("node", 0, 2**34), fake_gpu("node", 1, 2**35)
    registration = Registration(ledger, settings(lease_seconds=600), lambda: (well, sick), device_health)

    def offered() -> set[str]:
        return {each.uuid for each in list_devices(ledger) if not each.stale}

    def seen_at() -> Any:
        with reading(ledger) as connection:
            return connection.execute(select(workers.c.seen_at)).scalar_one()

    registration.start()
    eventually(lambda: offered() == {well.uuid, sick.uuid})
    device_health.withhold(sick.uuid)
    registration.ensure()  # as it is before each look into the queue
    assert offered() == {well.uuid}
    before = seen_at()
    eventually(lambda: seen_at() > before)
    assert offered() == {well.uuid}
    now[0] = WITHHELD_SECONDS + 1
    eventually(lambda: offered() == {well.uuid, sick.uuid})
    registration.end()


@SQLITE
def test_a_job_whose_device_does_not_come_up_is_done_by_another_worker(  # noqa: PLR0917 - it takes what it needs
    ledger: Engine, submitted: Any, agent: Any, scripted: Any, eventually: Any, job: Any, events: Any,
    returned: Any, log_lines: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(supervisor_module, "_SICK_PAUSE_SECONDS", 900.0)
    job_id = submitted()
    sick = agent(scripted(["fail", "transient", "device_lost"]), node="sick", slots=2)
    eventually(lambda: returned(job_id))
    eventually(lambda: [each.stale for each in list_devices(ledger)] == [True])
    assert (job(job_id).state, job(job_id).attempt, job(job_id).failures) == ("queued", 0, 0)
    assert next_claimable(ledger) == []  # for some seconds, in which nobody tries it
    assert events(job_id, "crash") == []
    (said,) = [line for line in log_lines() if "did not come up" in line["event"]]
    assert (list(said["devices"]), said["seconds"]) == ([fake_gpu("sick", 0, 1).uuid], WITHHELD_SECONDS)
    assert "CUDA_VISIBLE_DEVICES" in said["event"]
    with writing(ledger) as connection:
        connection.execute(update(jobs).values(not_before=None))
    assert next_claimable(ledger) == [job_id]
    assert not sick.take()
    agent(scripted(["finish"]), node="well")
    eventually(lambda: job(job_id).ended)
    assert (job(job_id).state, job(job_id).attempt, job(job_id).failures) == ("succeeded", 1, 0)
    assert returned(job_id) == ["device_lost"]


@SQLITE
def test_a_worker_of_failed_devices_alone_takes_one_job_once_and_no_other(
    ledger: Engine, submitted: Any, agent: Any, scripted: Any, eventually: Any, job: Any, returned: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(supervisor_module, "_SICK_PAUSE_SECONDS", 0.0)
    ids = [submitted() for _ in range(3)]
    sick = agent(scripted(["fail", "transient", "device_lost"]), poll=False)
    assert sick.take()
    eventually(lambda: any(map(returned, ids)) and leases(ledger) == [] and sick._slots._value)
    assert set(next_claimable(ledger)) == set(ids)
    assert not sick.take()
    assert [(job(each).state, job(each).failures) for each in ids] == [("queued", 0)] * 3
    assert sum(len(returned(each)) for each in ids) == 1


def program(path: Path, *arguments: str) -> None:
    """Put a program there, whole at once."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    new.write_text(f'#!/bin/sh\nexec {sys.executable} {" ".join(arguments)} "$@"\n')
    new.chmod(0o755)
    new.rename(path)


@SQLITE
@pytest.mark.part(of=24, by=())
@pytest.mark.parametrize("missing", ["the guardian's interpreter", "the child's interpreter", "a module"])
def test_while_its_installation_is_replaced_a_worker_loses_no_job(  # noqa: PLR0917 - it takes what it needs
    missing: str, submitted: Any, agent: Any, scripted: Any, eventually: Any, job: Any, returned: Any,
    log_lines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(device_health_module, "FIRST_REST_SECONDS", 0.1)
    monkeypatch.setattr(device_health_module, "LONGEST_REST_SECONDS", 0.2)
    python = tmp_path / "python"
    _, *child = scripted(["started"], ["finish"])
    if missing == "the guardian's interpreter":
        monkeypatch.setattr(child_module, "_GUARDIAN", (str(python), "-P", "-m", "worker.process.guardian"))
        command = [sys.executable, *child]
    else:
        command = [str(python), *child]
    if missing == "a module":
        program(python, "-c", "'import kronoscope_that_is_being_copied'")
    ids = [submitted() for _ in range(2)]
    agent(command)
    eventually(lambda: sum(len(returned(each)) for each in ids) >= 6)  # more than a job may fail
    assert [job(each).failures for each in ids] == [0, 0]
    said = next(line for line in log_lines() if "no computing process can be started" in line["event"])
    assert {"a module": "kronoscope_that_is_being_copied"}.get(missing, "") in said["why"]
    program(python)
    eventually(lambda: all(job(each).ended for each in ids))
    assert [(job(each).state, job(each).attempt, job(each).failures) for each in ids] == [("succeeded", 1, 0)] * 2
    assert {reason for each in ids for reason in returned(each)} == {"not_started"}


@SQLITE
@pytest.mark.parametrize("refused", ["job-", "lease-", "child-output", "reaper-"])
def test_without_threads_a_job_is_handed_back_at_once_and_none_is_taken(  # noqa: PLR0917 - it takes what it needs
    refused: str, ledger: Engine, submitted: Any, agent: Any, scripted: Any, eventually: Any, job: Any,
    returned: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(device_health_module, "FIRST_REST_SECONDS", 600.0)
    monkeypatch.setattr(device_health_module, "LONGEST_REST_SECONDS", 600.0)
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name.startswith(refused):
            raise RuntimeError("can't start new thread")
        start(thread)

    job_id = submitted()
    chosen = agent(scripted(["pids"], ["sleep", 600]), poll=False)
    monkeypatch.setattr(threading.Thread, "start", refusing)
    if refused == "job-":
        with pytest.raises(RuntimeError, match="new thread"):
            chosen.take()
    else:
        assert chosen.take()
        eventually(lambda: returned(job_id))
    monkeypatch.setattr(threading.Thread, "start", start)
    eventually(lambda: leases(ledger) == [] and chosen._slots._value)
    assert (job(job_id).state, job(job_id).attempt, job(job_id).failures) == ("queued", 0, 0)
    assert returned(job_id) == ["not_started"]
    assert next_claimable(ledger) == [job_id]
    assert not chosen.take()


@SQLITE
def test_files_of_a_job_that_cannot_be_laid_out_are_its_own_failure_and_are_tried_later(
    ledger: Engine, submitted: Any, agent: Any, scripted: Any, settings: Any, eventually: Any, job: Any,
    returned: Any,
) -> None:  # fmt: skip
    broken, other = submitted(), submitted()
    root = settings().ledger.artifact_root
    root.mkdir(parents=True)
    (root / broken).touch()  # where its folder is to be
    agent(scripted(["finish"]), disk_pause_seconds=900)
    eventually(lambda: job(other).ended and returned(broken))
    assert (job(other).state, returned(broken)) == ("succeeded", ["machine"])
    assert (job(broken).state, job(broken).failures) == ("queued", 1)
    assert next_claimable(ledger) == []
