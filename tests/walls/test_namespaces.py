"""Namespaces of jobs: the walls of a worker that is an ordinary user, and whose jobs are that user too."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, insert

from jobs.codec import parse_document
from jobs.records import LOCAL_TENANT, Job
from jobs.repository.results import layer_rows
from jobs.repository.store import read_job
from jobs.repository.submission import submit
from jobs.schema.clock import ledger_now
from jobs.schema.database import open_database, writing
from jobs.schema.tables import tenants
from tests.conftest import Databases
from tests.walls.conftest import open_to_all
from tests.walls.interpreter import PACKAGES, PROGRAMS, ROOT, environment, is_open
from tests.walls.test_further_attacks import SECRET

USER = 24_100
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"] if os.getuid() == 0 else []
"""The worker's user, which is its jobs' too: an ordinary one, whoever runs the tests."""
PROBE = [
    *AS_USER,
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "--pid",
    "--net",
    "--fork",
    "--mount-proc",
    "true",
]

pytestmark = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(PROBE, capture_output=True, check=False, cwd="/").returncode != 0
    or not is_open(ROOT)
    or not is_open(PACKAGES),
    reason="this kernel or container lets ordinary users make no namespaces, or not every user may read the project",
)

RUNNING = """
def runs(each):
    try:
        return each.stat().st_uid == os.getuid() and "State:\\tZ" not in (each / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False  # it ended meanwhile

told["running"] = [each.name for each in Path("/proc").glob("[0-9]*") if each.name != str(os.getpid()) and runs(each)]
print(json.dumps(told))
"""
"""Code that ends such a program: it lists the processes of its user that still run, and prints what was found."""
SERVICE = """
import json, os, subprocess, sys, time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from jobs.objects.artifacts import ArtifactFolder
from jobs.settings import LedgerSettings
from worker.process.child_process import Child, child_environment
from worker.process.process_group import descendants
from worker.service import trial_job, with_possible_namespaces
from worker.settings import WorkerSettings
from catalog.private_memory import hide_memory

place, secret, neighbour, attacks, packages, project = sys.argv[1:]
root = Path(place)
hide_memory()
ledger = LedgerSettings(database_url="sqlite://", artifact_root=root / "artifacts")
settings = with_possible_namespaces(WorkerSettings(ledger=ledger, model_store=root / "models", child_namespaces=True,
                                                   paths=(place,)))
(root / "closed").write_text(secret)
os.environ["KRONOSCOPE_TEST_FILE"] = str(root / "closed")
python = [sys.executable, "-P"]
told = {"artifacts": str(root / "artifacts")}

def start(confinement, *command):
    return Child.start({}, subprocess.PIPE, child_environment(os.environ), [*python, *command], confinement)

with trial_job(settings) as first, trial_job(settings) as second:
    theirs, own = Path(second.namespaces.temporary), Path(first.namespaces.temporary)
    told["job"] = own.parent.name
    kept = root / "artifacts" / "objects" / "local" / "aa" / "kept"
    kept.parent.mkdir(parents=True)
    for path in (theirs / "table.json", kept):
        path.write_text(secret)
    (own / "input").mkdir()
    os.link(kept, own / "input" / "given")
    first = replace(first, namespaces=replace(first.namespaces, read=(*first.namespaces.read, str(own / "input"))))
    with closing(start(second, neighbour, secret, str(theirs / "done"))) as beside:
        lines = beside.output(10000)
        facts = json.loads(next(lines)) | {
            "victim": max(descendants(beside.pid)), "worker": os.getpid(), "guardian": beside.pid, "secret": secret,
            "packages": packages, "project": project, "root": str(root / "artifacts"), "folder": str(theirs),
            "file": str(theirs / "table.json"), "own": str(own), "object": str(kept),
            "secret_file": str(root / "closed"), "given": str(own / "input" / "given"), "models": str(root / "models"),
            "victim_user": str(os.getuid() + 1),
        }
        (own / "facts.json").write_text(json.dumps(facts))
        with closing(start(first, attacks, str(own / "facts.json"))) as attacker:
            told["attacks"] = [line.decode() for line in attacker.output(100000)]
        told["outlived"] = (own / "outlived").exists()
        (theirs / "done").touch()
        told["neighbour"] = json.loads(next(lines))
        told["neighbour's end"] = beside.wait(60)
    told["kept"] = [path.read_text() for path in (theirs / "table.json", kept)]
"""


def owned(folder: Path) -> Path:
    """A folder of pytest's, given to the worker's user."""
    open_to_all(folder)
    if os.getuid() == 0:
        os.chown(folder, USER, USER)
    return folder


def printed(place: Path, python: str, program: str, *arguments: str) -> Any:
    """What a program of the worker's user prints last."""
    owned(place)
    command = [*AS_USER, python, "-P", "-c", program, *arguments]
    done = subprocess.run(
        command, env=environment(python), capture_output=True, text=True, timeout=300, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-5_000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, python: str) -> dict[str, Any]:
    """What some forty attacks of a job gained, and what the one beside it and the worker found afterwards."""
    place = owned(tmp_path_factory.mktemp("namespaces"))
    for name in ("neighbour.py", "attacks.py"):
        shutil.copy(PROGRAMS / name, place / name)
    arguments = [str(place), SECRET, str(place / "neighbour.py"), str(place / "attacks.py"), str(PACKAGES), str(ROOT)]
    found: dict[str, Any] = printed(place, python, SERVICE + RUNNING, *arguments)
    return found


def test_nothing_is_gained_from_the_job_beside_it(told: dict[str, Any]) -> None:
    gained = json.loads(told["attacks"][-1])
    assert len(gained) >= 30
    # of all jobs' folders it sees its own; of the neighbour it sees nothing, which is asked below
    (listed,) = gained.pop("folders_of_others")
    assert listed.endswith(f"artifacts: ['{told['job']}']")
    assert gained.pop("watch_folders") == [f"{told['artifacts']}: 1"]
    assert gained.pop("signals_by_descriptors") == ["ended the neighbour"]
    # a lease delays who opens a kept file for writing, and nobody does
    assert gained.pop("write_by_the_second_name") == ["lease: 'leased'"]
    assert {name: found for name, found in gained.items() if found} == {}


def test_the_neighbour_and_what_is_kept_are_as_before(told: dict[str, Any]) -> None:
    neighbour = {"kept": SECRET, "posix": SECRET, "shm": SECRET, "frames": "", "nice": 0, "processors": True}
    assert told["neighbour"] == neighbour
    assert told["neighbour's end"] == 0
    assert told["kept"] == [SECRET, SECRET]


def test_nothing_of_either_job_runs_on(told: dict[str, Any]) -> None:
    assert told["outlived"] is True
    assert told["running"] == []


ENDS = """
import json, os, subprocess, sys
from contextlib import closing
from pathlib import Path
from worker.process.child_process import Child, child_environment
from worker.process.confinement import Confinement
from worker.process.namespaces import Namespaces

place = sys.argv[1]
confinement = Confinement(namespaces=Namespaces(temporary=place, written=(place,), read=(*sys.path, sys.prefix)))
told = {}
for name, program in {
    "exit": "import sys; sys.exit(5)",
    "abort": "import os; os.abort()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "told to stop": "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7));"
                    "print('up', flush=True); time.sleep(600)",
    "told while deaf": "import time; print('up', flush=True); time.sleep(600)",
    "orphans": "import os, time; os.fork() or (os.setsid(), os.fork(), time.sleep(600)); print(os.getpid())",
    "cut off": "import time; print('up', flush=True); time.sleep(600)",
}.items():
    command = [sys.executable, "-P", "-S", "-c", program]
    with closing(Child.start({}, subprocess.PIPE, child_environment(os.environ), command, confinement)) as child:
        said = []
        for line in child.output(1000):
            said.append(line.decode().strip())
            if name.startswith("told"):
                child.terminate()
            if name == "cut off":
                child.kill()
        told[name] = [child.wait(60), said]
        assert list(child.frames()) == []
"""


def test_signals_reach_the_command_and_its_end_is_told_as_it_was(tmp_path: Path, python: str) -> None:
    assert printed(tmp_path, python, ENDS + RUNNING, str(tmp_path)) == {
        "exit": [5, []],
        "abort": [128 + 6, []],
        "killed": [128 + 9, []],
        "told to stop": [7, ["up"]],
        "told while deaf": [128 + 15, ["up"]],
        "orphans": [0, ["2"]],
        "cut off": [128 + 9, ["up"]],
        "running": [],
    }


REFUSED = """
import json, os, subprocess, sys
from pathlib import Path
from jobs.settings import LedgerSettings
from worker.agent.isolation import measure_isolation
from worker.service import trial_job, with_possible_namespaces
from worker.settings import WorkerSettings

ledger = LedgerSettings(database_url="sqlite://", artifact_root=Path(sys.argv[1], "artifacts"))
# one that lies in a folder which jobs are given
secret = Path(sys.argv[1], "secret")
secret.write_text("s")
os.environ["KRONOSCOPE_TEST_FILE"] = str(secret)
settings = with_possible_namespaces(WorkerSettings(ledger=ledger, child_namespaces=True, paths=(sys.argv[1],)))
with trial_job(settings) as job, trial_job(settings, 1) as neighbour:
    held = measure_isolation(job, os.environ, ledger.artifact_root, neighbour)
print(json.dumps([settings.child_namespaces, held]))
"""


@pytest.mark.parametrize("allowed", [True, False])
def test_what_the_kernel_refuses_is_measured_and_jobs_run_as_before(tmp_path: Path, python: str, allowed: bool) -> None:
    # behind the filter of a job no process may make a namespace
    behind = (
        "import subprocess, sys; from worker.process.confinement import Confinement;"
        "sys.exit(subprocess.run([sys.executable, *sys.argv[1:]], **Confinement().popen_arguments()).returncode)"
    )
    program = REFUSED if allowed else behind
    arguments = [str(tmp_path)] if allowed else ["-P", "-c", REFUSED, str(tmp_path)]
    settings, held = printed(tmp_path, python, program, *arguments)
    assert settings is allowed
    walls = {"files", "neighbours", "secret_files"}
    assert walls & set(held) == (walls if allowed else set())


HONEST = {
    "kind": ["factors", "capacity"],
    "model": {"source": "builtin", "name": "digits_mlp"},
    "data": {"source": "builtin", "name": "digits", "limit": 300},
    "task": {"type": "classification"},
    "keep": ["factors"],
    "cache": "refresh",
}
WALLS = {"files", "neighbours", "memory", "secret_files"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("artifacts", "models", "secrets"):
        (tmp_path / name).mkdir()
        owned(tmp_path / name)
    return owned(tmp_path)


@pytest.fixture
def url(databases: Databases) -> str:
    return databases.migrated("postgresql")


@pytest.fixture
def ledger(url: str) -> Iterator[Engine]:
    engine = open_database(url)
    with writing(engine) as connection:
        connection.execute(insert(tenants).values(id="other", name="other", created_at=ledger_now()))
    yield engine
    engine.dispose()


def done_by_a_worker(place: Path, url: str, python: str, **variables: str) -> str:
    """Run a worker of two devices until nothing is left to do; returns its log."""
    secret = place / "secrets" / "database"
    secret.write_text(url)
    secret.chmod(0o644)
    given = environment(python) | {
        "HOME": str(place),
        "KRONOSCOPE_DATABASE_URL_FILE": str(secret),
        "KRONOSCOPE_ARTIFACTS": str(place / "artifacts"),
        "KRONOSCOPE_MODEL_STORE": str(place / "models"),
        "KRONOSCOPE_FAKE_GPUS": "2GiB,2GiB",
        "KRONOSCOPE_THREADS": "1",
    }
    worker = [*AS_USER, python, "-P", "-m", "worker.embedded", "--until-idle"]
    done = subprocess.run(
        worker, env=given | variables, capture_output=True, text=True, timeout=600, check=False, cwd=place
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    return done.stdout + done.stderr


def submitted(ledger: Engine, tenant: str, document: dict[str, Any]) -> str:
    return submit(ledger, tenant, parse_document(json.dumps(document).encode())).job.id


def held_by(log: str) -> set[str]:
    """The walls that a worker has logged."""
    (line,) = (each for each in log.splitlines() if "isolation of jobs" in each)
    return {name for name in WALLS if f'"{name}"' in line}


def state(ledger: Engine, tenant: str, job_id: str) -> Job:
    found = read_job(ledger, tenant, job_id)
    assert found is not None
    return found


def digests(ledger: Engine, tenant: str, job_id: str) -> list[Any]:
    found = state(ledger, tenant, job_id)
    assert found.state == "succeeded", found.failure
    return [(row.kind, row.ordinal, row.sha256) for row in layer_rows(ledger, tenant, job_id).items]


@pytest.mark.parametrize(
    ("division", "kind", "of_kept"),
    [
        ({}, ["factors"], False),  # what a job is given there, one of tests/walls/test_caches.py reads as well
        pytest.param({"shards": 2}, HONEST["kind"], True, marks=pytest.mark.nightly),
        pytest.param({"world_size": 2}, HONEST["kind"], True, marks=pytest.mark.nightly),
    ],
)
def test_two_tenants_of_a_worker_get_the_numbers_of_one_without_walls(
    ledger: Engine, url: str, place: Path, python: str, division: dict[str, int], kind: list[str], of_kept: bool
) -> None:
    plain = submitted(ledger, LOCAL_TENANT, HONEST)
    log = done_by_a_worker(place, url, python, KRONOSCOPE_SHARED_WITHOUT_WALLS="1")
    assert not {"files", "neighbours"} & held_by(log)
    jobs = [
        (LOCAL_TENANT, submitted(ledger, LOCAL_TENANT, HONEST)),
        ("other", submitted(ledger, "other", HONEST | {"kind": kind} | division)),
    ]
    if of_kept:
        again = {"kind": "capacity", "factors": {"job": plain}}
        jobs.append((LOCAL_TENANT, submitted(ledger, LOCAL_TENANT, again)))
    while not all(state(ledger, *each).ended for each in jobs):
        # a worker that ends when nothing is queued does not wait for the last piece of a divided job
        log = done_by_a_worker(place, url, python, KRONOSCOPE_CHILD_NAMESPACES="1")
    assert held_by(log) == WALLS
    first, other, *kept = (digests(ledger, *each) for each in jobs)
    assert first == digests(ledger, LOCAL_TENANT, plain)
    assert all([row[:2] for row in each] == [row[:2] for row in first if row[0] == "capacity"] for each in kept)
    assert [row[:2] for row in other] == [row[:2] for row in first if row[0] in kind]
