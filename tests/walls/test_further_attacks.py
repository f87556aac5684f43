"""Some forty further attacks of a job, beside another one, under a worker with the rights that Compose gives it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.walls.conftest import open_to_all
from tests.walls.interpreter import PACKAGES, ROOT, WORKER, as_worker, environment, is_open

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not is_open(ROOT) or not is_open(PACKAGES),
    reason="only root may start a worker with these rights, on a project that every user may read",
)

FIRST = 23_100
"""Nobody else's: a job that ends every process of its user would end another test's too."""
SECRET = "canary-of-a-tenant"
NEIGHBOUR = """
import ctypes, json, os, sys, time
from worker.execution.ranks.rank_hub import RankHub
secret = sys.argv[1].encode()
libc = ctypes.CDLL(None)
kept = ctypes.create_string_buffer(secret)
posix = f"/dev/shm/kronoscope-test-{os.getpid()}"
with open(os.open(posix, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
    file.write(secret)
shm, sem, queue = libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600)
libc.shmat.restype = ctypes.c_void_p
place = libc.shmat(shm, None, 0)
ctypes.memmove(place, secret, len(secret))
read, write = os.pipe()
os.set_blocking(read, False)
hub = RankHub(2, write)
print(json.dumps({"victim": os.getpid(), "address": ctypes.addressof(kept), "posix": posix, "shm": shm, "sem": sem,
                  "queue": queue, "victim_user": str(os.getuid())}), flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
try:
    frames = os.read(read, 100).decode()
except BlockingIOError:
    frames = ""
print(json.dumps({"kept": kept.value.decode(), "posix": open(posix).read(), "frames": frames,
                  "shm": ctypes.string_at(place, len(secret)).decode(), "nice": os.getpriority(os.PRIO_PROCESS, 0),
                  "processors": len(os.sched_getaffinity(0)) == os.cpu_count()}), flush=True)
"""
SERVICE = """
import hashlib, json, os, subprocess, sys, time
from contextlib import closing
from pathlib import Path
from jobs.objects.artifacts import ArtifactFolder
from jobs.records import Artifact
from worker.agent.shared_folders import share_folders
from worker.process.child_process import Child, child_environment
from worker.process.confinement import Confinement
from catalog.private_memory import hide_memory

place, first, attacks_as, secret, neighbour, attacks, packages, project = sys.argv[1:]
root, first, attacks_as = Path(place), int(first), int(attacks_as)
hide_memory()
job, other = (f"01a00000-0000-7000-8000-00000000000{number}" for number in (1, 2))
share_folders(root / "artifacts", root / "models")
folder = ArtifactFolder(root / "artifacts")
theirs, own = folder.attempt_dir(other, 1, first + 1), folder.attempt_dir(job, 1, first)
(root / "closed").mkdir(mode=0o700)
(root / "closed" / "secret").write_text(secret)
(theirs / "table.json").write_text(secret)
sha256 = hashlib.sha256(secret.encode()).hexdigest()
uri = folder.publish("local", other, 1, "table.json", sha256=sha256, size_bytes=len(secret))
kept = Artifact(job_id=job, name="a", uri=uri, sha256=sha256, size_bytes=len(secret), media_type="text/plain")
(own / "input").mkdir()
folder.fetch(kept, own / "input" / "table.json")
done = theirs / "done"
given = child_environment(os.environ)
python = [sys.executable, "-P"]
told = {}

def start(user, *command):
    return Child.start({}, subprocess.PIPE, given, [*python, *command], Confinement(user=user))

with closing(start(first + 1, neighbour, secret, str(done))) as beside:
    lines = beside.output(10000)
    facts = json.loads(next(lines)) | {
        "worker": os.getpid(), "guardian": beside.pid, "secret": secret, "packages": packages, "project": project,
        "root": str(folder.root), "folder": str(theirs), "file": str(theirs / "table.json"), "own": str(own),
        "object": str(folder.root / uri), "secret_file": str(root / "closed" / "secret"),
        "given": str(own / "input" / "table.json"), "models": str(root / "models"),
    }
    (root / "facts.json").write_text(json.dumps(facts))
    with closing(start(attacks_as, attacks, str(root / "facts.json"))) as attacker:
        said = [line.decode() for line in attacker.output(100000)]
        left = own / "outlived"
    told["attacks"] = said
    if attacks_as != first:
        # it has become its neighbour, who may never go on
        print(json.dumps(told), flush=True)
        os._exit(0)
    told["outlived"] = left.exists()
    done.touch()
    told["neighbour"] = json.loads(next(lines))
    told["neighbour's end"] = beside.wait(60)
told["running"] = [
    each.name for each in Path("/proc").glob("[0-9]*")
    if each.stat().st_uid in (first, first + 1) and "State:\\tZ" not in (each / "status").read_text()
]
told["object"] = (folder.root / uri).read_text()
told["file"] = (theirs / "table.json").read_text()
told["link"] = facts["given"] and (own / "input" / "table.json").read_text()
print(json.dumps(told))
"""


def attacked(tmp_path_factory: pytest.TempPathFactory, python: str, attacks_as: int) -> dict[str, Any]:
    """What the attacks of a user gained, and what the neighbour and the service found afterwards."""
    place = tmp_path_factory.mktemp("further")
    open_to_all(place)
    os.chown(place, WORKER, WORKER)
    (place / "neighbour.py").write_text(NEIGHBOUR)
    attacks = Path(__file__).parent / "attacks.py"
    users = [str(FIRST), str(attacks_as)]
    arguments = [str(place), *users, SECRET, str(place / "neighbour.py"), str(attacks), str(PACKAGES), str(ROOT)]
    command = as_worker(python, "-P", "-c", SERVICE, *arguments)
    done = subprocess.run(command, env=environment(python), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-5_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"gained": json.loads(found["attacks"][-1])}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, python: str) -> dict[str, Any]:
    """The attacks of a job that is a user of its own."""
    return attacked(tmp_path_factory, python, FIRST)


def test_nothing_is_gained(told: dict[str, Any]) -> None:
    assert len(told["gained"]) >= 30
    assert {name: found for name, found in told["gained"].items() if found} == {}


def test_between_jobs_of_one_user_the_same_attacks_gain_much(
    tmp_path_factory: pytest.TempPathFactory, python: str
) -> None:
    gained = attacked(tmp_path_factory, python, FIRST + 1)["gained"]
    assert {
        "roots_of_processes",
        "descriptors_of_others",
        "folders_of_others",
        "shared_memory",
        "who_is_killed_first",
        "abstract_sockets",
    } <= {name for name, found in gained.items() if found}


def test_the_neighbour_and_what_is_kept_are_as_before(told: dict[str, Any]) -> None:
    neighbour = {"kept": SECRET, "posix": SECRET, "shm": SECRET, "frames": "", "nice": 0, "processors": True}
    assert told["neighbour"] == neighbour
    assert told["neighbour's end"] == 0
    assert (told["object"], told["file"], told["link"]) == (SECRET, SECRET, SECRET)


def test_nothing_of_either_job_runs_on(told: dict[str, Any]) -> None:
    assert told["outlived"] is True
    assert told["running"] == []
