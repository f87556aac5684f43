"""A queue meets a fresh Slurm: workers come, do all jobs, and leave, whatever is killed in between."""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from jobs.autoscale.launcher import NewMachine
from jobs.autoscale.slurm import Slurm
from jobs.codec import parse_document
from jobs.errors import LauncherFailed
from jobs.records import LOCAL_TENANT
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, reading, writing
from jobs.schema.identifiers import new_id
from jobs.schema.tables import device_leases, jobs, layer_results, machines, workers
from tests.chaos.stack.documents import FACTORIES, Pace, document
from tests.chaos.stack.processes import Part
from tests.machine.stopwatch import until
from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

GIB = 2**30
CEILING = {"small": 2, "large": 1}
PACE = Pace(batches=10, batch_seconds=0.2, row_seconds=0.1)
CLASSES = """
worker = "{python} -P -m worker.embedded"

[[class]]
name = "small"
device = "fake"
device_bytes = "2GiB"
ceiling = {small}
cooldown = "1s"
wall = "30m"
factories = ["*"]
template = '''#!/bin/bash
#SBATCH --ntasks=1 --output={folder}/%x.log
export KRONOSCOPE_NODE={{{{ machine }}}} KRONOSCOPE_FAKE_GPUS=2GiB
exec {{{{ worker }}}}
'''

[[class]]
name = "large"
device = "fake"
device_bytes = "8GiB"
ceiling = {large}
cooldown = "1s"
wall = "30m"
factories = ["*"]
template = '''#!/bin/bash
#SBATCH --ntasks=1 --output={folder}/%x.log
export KRONOSCOPE_NODE={{{{ machine }}}} KRONOSCOPE_FAKE_GPUS=8GiB
exec {{{{ worker }}}}
'''
"""


@pytest.fixture
def ledger_url(databases: Any) -> str:
    return str(databases.migrated("postgresql"))


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Engine]:
    engine = open_database(ledger_url)
    yield engine
    engine.dispose()


@pytest.fixture
def submitted(ledger: Engine) -> Callable[..., list[str]]:
    """``submitted(8, GIB)``: the ids of new jobs, which their rows say to need so much."""

    def make(count: int, needs_bytes: int) -> list[str]:
        asked = parse_document(json.dumps(document(0, PACE)).encode())
        ids = [submit(ledger, LOCAL_TENANT, asked).job.id for _ in range(count)]
        with writing(ledger) as connection:
            connection.execute(update(jobs).where(jobs.c.id.in_(ids)).values(needs_bytes=needs_bytes))
        return ids

    return make


@pytest.fixture
def autoscale(cluster: SlurmCluster, ledger_url: str, tmp_path: Path) -> Iterator[Part]:
    """The command, as an operator runs it; it is not started yet."""
    place = tmp_path / "classes.toml"
    place.write_text(CLASSES.format(python=sys.executable, folder=tmp_path, **CEILING))
    settings = {
        "DATABASE_URL": ledger_url, "ARTIFACTS": str(tmp_path / "artifacts"), "MODEL_STORE": str(tmp_path / "models"),
        "FACTORY_PATH": str(FACTORIES), "ALLOW_FACTORIES": "*", "HEARTBEAT_SECONDS": "1", "LEASE_SECONDS": "15",
        "THREADS": "1", "REAPER_SECONDS": "1",
    }  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KRONOSCOPE_")}
    environment |= {f"KRONOSCOPE_{name}": value for name, value in settings.items()}
    environment |= {"SLURM_CONF": str(cluster.configuration), "OMP_NUM_THREADS": "1"}
    program = "from kronoscope.cli import main; main()"
    words = ["autoscale", "--launcher", "slurm", "--classes", str(place), "--every", "1s"]
    part = Part("autoscale", [sys.executable, "-P", "-c", program, *words], environment, tmp_path)
    yield part
    part.terminate()
    part.ended(120)


class Held:
    """A running job that has rows already, and what it runs on."""

    def __init__(self, row: Any) -> None:
        self.job_id: str = row.id
        self.slurm_job: str = row.handle
        self.pid = int(row.lease_owner.rpartition(":")[2])


class Watch:
    """What is true at every look: no class has more allocations than its ceiling."""

    def __init__(self, cluster: SlurmCluster, ledger: Engine) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self.numbers: set[str] = set()

    def queue(self) -> list[tuple[str, str, str]]:
        queue = self._cluster.queue()
        there = Counter(name.split("-")[1] for _, _, name in queue)
        assert all(there[name] <= ceiling for name, ceiling in CEILING.items()), queue
        self.numbers |= {number for number, _, _ in queue}
        return queue

    def held(self, wanted: list[str]) -> Held | None:
        """One of these jobs that is in the middle."""
        self.queue()
        query = (
            select(jobs.c.id, jobs.c.lease_owner, machines.c.handle)
            .join(device_leases, (device_leases.c.job_id == jobs.c.id) & (device_leases.c.fence == jobs.c.fence))
            .join(workers, workers.c.id == device_leases.c.worker_id)
            .join(machines, machines.c.id == workers.c.machine_id)
            .where(jobs.c.state == "running", jobs.c.id.in_(wanted), machines.c.handle.is_not(None))
            .where(select(layer_results.c.job_id).where(layer_results.c.job_id == jobs.c.id).exists())
        )
        with reading(self._ledger) as connection:
            row = connection.execute(query).first()
        return None if row is None else Held(row)


def states(ledger: Engine) -> Counter[str]:
    with reading(ledger) as connection:
        return Counter(connection.execute(select(jobs.c.state)).scalars())


def rows_of(ledger: Engine, job_id: str) -> list[tuple[Any, ...]]:
    columns = (layer_results.c.kind, layer_results.c.ordinal, layer_results.c.sha256)
    with reading(ledger) as connection:
        query = select(*columns).where(layer_results.c.job_id == job_id).order_by(*columns)
        return [tuple(row) for row in connection.execute(query)]


def claims(ledger: Engine) -> dict[str, int]:
    """How often each job was claimed: the fence counts, while an attempt that was handed back is given back."""
    with reading(ledger) as connection:
        return {row.id: row.fence for row in connection.execute(select(jobs.c.id, jobs.c.fence))}


def test_a_queue_of_two_classes_is_done_and_killed_allocations_lose_nothing(
    cluster: SlurmCluster, ledger: Engine, submitted: Any, autoscale: Part
) -> None:
    small, large = submitted(8, GIB), submitted(4, 6 * GIB)
    watch = Watch(cluster, ledger)
    autoscale.start()
    # an allocation is taken away by the cluster, and a worker is killed inside another
    cancelled = until(lambda: watch.held(small), 240, lambda: f"a small job computes; {autoscale.tail()}")
    assert cancelled is not None
    cluster.run("scancel", cancelled.slurm_job)
    killed = until(lambda: watch.held(large), 240, lambda: f"a large job computes; {autoscale.tail()}")
    assert killed is not None
    os.kill(killed.pid, signal.SIGKILL)

    until(lambda: watch.queue() is not None and states(ledger) == {"succeeded": 12}, 600, autoscale.tail)
    until(lambda: not watch.queue(), 120, "the workers leave")
    rows = {job_id: rows_of(ledger, job_id) for job_id in (*small, *large)}
    undisturbed = [job_id for job_id, number in claims(ledger).items() if number == 1]
    assert claims(ledger)[cancelled.job_id] >= 2
    assert claims(ledger)[killed.job_id] >= 2
    assert len(undisturbed) >= 8
    assert len(rows[undisturbed[0]]) == 12
    assert all(each == rows[undisturbed[0]] for each in rows.values())
    # two for what was killed, and none for a job that another allocation has taken
    assert sum(CEILING.values()) <= len(watch.numbers) <= 12
    autoscale.terminate()
    assert autoscale.ended(120) == 0
    with reading(ledger) as connection:
        # the entry of the killed one is not counted on any more, and goes later
        present = select(workers.c.id).where(workers.c.expires_at > ledger_now())
        assert connection.execute(present).all() == []
        assert set(connection.execute(select(machines.c.state)).scalars()) <= {"ended", "running", "ending"}


def test_what_sbatch_refuses_is_said(cluster: SlurmCluster, monkeypatch: Any) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
    script = "#!/bin/sh\n#SBATCH --partition=nowhere\nsleep 600\n"
    with pytest.raises(LauncherFailed, match=r"`sbatch --parsable` ended with code 1: .*invalid partition"):
        Slurm().start(NewMachine(id=new_id(), class_name="small", script=script, wall_seconds=60.0))
