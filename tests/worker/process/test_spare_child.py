"""The child that was prepared: the same job as ever, behind the same walls, and one that is not there costs nothing."""

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from catalog.frames import Failed, Finished, LayerDone, Progress, Started, Stopped
from tests.chaos.stack.processes import gone
from tests.machine.stopwatch import until
from tests.walls import interpreter
from tests.walls.interpreter import everybodys_python
from worker.execution.spare import imported_files, unfit
from worker.process import spare_child
from worker.process.child_process import EXECUTION, Child, Hold, child_environment
from worker.process.confinement import Confinement
from worker.process.guardian import NOT_STARTED, node_seconds
from worker.process.namespaces import Namespaces
from worker.process.process_group import descendants
from worker.process.spare_child import SpareChild

pytestmark = pytest.mark.real_programs

ROOT = Path(__file__).parents[3]
EXIT_STOPPED = 5
SECONDS = 240
USER = 24_300
MODEL = """
import json, os, sys
from pathlib import Path
import torch
from torch import nn

FACTS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs", "Seccomp", "SigBlk", "Umask")


def model():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    given = ("CUDA_VISIBLE_DEVICES", "HOME", "TMPDIR", "HF_HOME", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "USER")
    print("FACTS " + json.dumps({
        "status": {name: status[name].split() for name in FACTS},
        "limits": Path("/proc/self/limits").read_text(),
        "environment": {name: os.environ.get(name) for name in given},
        "descriptors": sorted(int(each.name) for each in Path("/proc/self/fd").iterdir() if each.exists()),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "spaces": [os.readlink(f"/proc/self/ns/{each}") for each in ("user", "pid", "net", "mnt", "ipc")],
        "cuda": torch.cuda.is_initialized(),
        "prepared": "worker.execution.spare" in " ".join(sys.orig_argv),
    }), flush=True)
    if Path("DIE").exists():
        os.kill(os.getpid(), 9)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that every user may execute."""
    path = everybodys_python(tmp_path_factory.mktemp("interpreter"))
    time.sleep(0.5)  # a file that changed as the imports began counts as changed
    return path


@pytest.fixture
def environment(tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "kronoscope_test_seen.py").write_text(MODEL.replace("DIE", str(tmp_path / "die")))
    monkeypatch.setattr(spare_child, "SPARE", (python, *spare_child.SPARE[1:]))
    given = child_environment(os.environ) | interpreter.environment(python)
    return given | {"OPENBLAS_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def spare(environment: dict[str, str]) -> Iterator[SpareChild]:
    with contextlib.closing(SpareChild(environment)) as made:
        yield made


@pytest.fixture
def assignment(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """``assignment("a")``: one job, with a folder of that name."""

    def make(name: str) -> dict[str, Any]:
        artifacts = tmp_path / name
        artifacts.mkdir(mode=0o777)
        artifacts.chmod(0o777)
        return {
            "document": {
                "kind": "factors",
                "model": {"source": "factory", "factory": "kronoscope_test_seen:model"},
                "data": {"source": "synthetic", "shape": [12], "examples": 64, "classes": 3},
                "task": {"type": "classification"},
                "collection": {"batch_size": 16},
            },
            "artifacts": str(artifacts),
            "scratch": str(artifacts / ".waiting"),
            "threads": 1,
            "paths": [str(tmp_path)],
            "allowed": {"factories": ["*"], "directories": []},
            "store": str(tmp_path / "store"),
        }

    return make


def hold() -> Hold:
    return Hold(until=node_seconds() + SECONDS)


@functools.cache
def kernel_shows_what_sleeps() -> bool:
    """Whether the kernel tells where a process sleeps: asked of a thread of ours, which reads from an empty pipe."""
    read, write = os.pipe()
    reader = threading.Thread(target=os.read, args=(read, 1))
    reader.start()
    place = Path(f"/proc/self/task/{reader.native_id}")
    try:
        until(lambda: (place / "stat").read_text().rpartition(")")[2].split()[0] == "S", SECONDS, "a reader sleeps")
        return "pipe_read" in (place / "wchan").read_text()
    finally:
        os.write(write, b"1")
        reader.join()
        os.close(read)
        os.close(write)


def waits(spare: SpareChild) -> None:
    """Wait for the spare's imports, after which it sleeps in a read of its pipe; where the kernel shows that."""
    guardian = spare.pid
    assert guardian is not None

    def reads() -> bool:
        below = descendants(guardian)
        if len(below) != 1 or not kernel_shows_what_sleeps():
            return len(below) == 1
        with contextlib.suppress(OSError):
            return "pipe_read" in (Path("/proc") / str(below.pop()) / "wchan").read_text()
        return False

    until(reads, SECONDS, "the spare child waits")


def ended(child: Child) -> tuple[list[Any], dict[str, Any], int]:
    """Frames, what the job's code saw, and the exit code."""
    with contextlib.closing(child):
        frames = list(child.frames())
        said = [line.decode(errors="replace") for line in child.output(100_000)]
        code = child.wait(SECONDS)
    facts = [json.loads(line.removeprefix("FACTS ")) for line in said if line.startswith("FACTS ")]
    assert facts, (said, frames)
    return frames, facts[0], code


def rows(frames: list[Any]) -> list[Mapping[str, Any]]:
    return [
        {name: frame.outcome["record"][name] for name in ("digest_A", "digest_G")}
        for frame in frames
        if isinstance(frame, LayerDone)
    ]


PROBE = [
    "setpriv",
    f"--reuid={USER}",
    f"--regid={USER}",
    "--clear-groups",
    "unshare",
    "--user",
    "--mount",
    "--pid",
    "--net",
]
SPACES = ("user", "pid", "net", "mnt", "ipc")
WALLS = ("namespaces", "user", "same user")


def held_to(walls: str, folder: Path, python: str) -> Confinement:
    """Limits of a job whose folders lie in this one; skips where this machine cannot set them."""
    if walls == "same user":
        return Confinement(files=512)
    if os.getuid() != 0 or not interpreter.is_open(ROOT) or not interpreter.is_open(interpreter.PACKAGES):
        pytest.skip("changing the user asks for root, and for a project that every user may read")
    for each in (folder, *folder.parents, Path(python).parents[2]):
        if each.stat().st_uid == os.getuid() and str(each).startswith("/tmp/"):
            each.chmod(0o777 if each == folder else 0o755)
    if walls == "user":
        return Confinement(user=USER, files=512, processes=256)
    if subprocess.run([*PROBE, "--fork", "true"], capture_output=True, check=False, cwd="/").returncode != 0:
        pytest.skip("this kernel or container lets ordinary users make no namespaces")
    home = folder / "home"
    home.mkdir(exist_ok=True)
    home.chmod(0o777)
    spaces = Namespaces(
        temporary=str(home), written=(str(folder),), read=(*filter(None, sys.path), str(Path(python).parents[1]))
    )
    return Confinement(user=USER, files=512, processes=256, namespaces=spaces)


@pytest.mark.part(of=32, by=())  # the walls of Compose are those of tests/walls/test_spare_child.py, in each landing
@pytest.mark.parametrize("walls", WALLS)
@pytest.mark.part(of=2, law="a prepared child is as good as a new one")
def test_a_prepared_child_is_behind_the_same_walls_and_computes_the_same(
    spare: SpareChild, environment: dict[str, str], assignment: Any, walls: str, tmp_path: Path, python: str
) -> None:
    confinement = held_to(walls, tmp_path, python)
    variables = environment | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "HF_HOME": str(tmp_path)}
    spare.prepare(None)
    waits(spare)
    prepared = spare.take(assignment("prepared"), variables, confinement, hold())
    assert prepared is not None
    frames, seen, code = ended(prepared)
    program = (python, *EXECUTION[1:])
    fresh = Child.start(assignment("fresh"), subprocess.PIPE, variables, program, confinement, hold())
    their_frames, expected, their_code = ended(fresh)
    assert (code, their_code) == (0, 0)
    assert isinstance(frames[0], Started)
    assert isinstance(frames[-1], Finished)
    assert frames[-1] == their_frames[-1]
    assert rows(frames) == rows(their_frames) != []
    assert (seen.pop("prepared"), expected.pop("prepared")) == (True, False)
    assert len(seen.pop("descriptors")) <= len(expected.pop("descriptors"))
    ours = {str((Path("/proc/self/ns") / each).readlink()) for each in SPACES}
    for each in (seen, expected):
        assert len(ours & set(each.pop("spaces"))) == (0 if walls == "namespaces" else len(SPACES))
    assert seen == expected


@pytest.mark.skipif(os.getuid() != 0, reason="its memory is closed to other processes of its user")
def test_what_waits_has_opened_no_device_and_started_no_thread_that_hears_signals(spare: SpareChild) -> None:
    spare.prepare(None)
    waits(spare)
    assert spare.pid is not None
    (waiting,) = descendants(spare.pid)
    place = Path("/proc") / str(waiting)
    opened = [str(each.readlink()) for each in (place / "fd").iterdir()] + (place / "maps").read_text().split()
    assert "libtorch" in " ".join(opened)
    assert [each for each in opened if each.startswith(("/dev/nvidia", "/dev/dri", "/dev/kfd"))] == []
    # of a thread that ends at this moment the kernel tells no signals
    until(lambda: not any(hears(each) for each in (place / "task").iterdir()), 30, "no thread hears signals")


def hears(task: Path) -> bool:
    """Whether a thread, by its folder in /proc, would be woken by SIGTERM."""
    try:
        status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
    except OSError:
        return False
    return not int(status["SigBlk"], 16) & 1 << (signal.SIGTERM - 1)


@pytest.mark.part(of=32, by=())
@pytest.mark.parametrize("walls", WALLS)
@pytest.mark.part(of=2, law="a prepared child is as good as a new one")
def test_a_crash_is_that_of_the_job(
    spare: SpareChild, environment: dict[str, str], assignment: Any, walls: str, tmp_path: Path, python: str
) -> None:
    confinement = held_to(walls, tmp_path, python)
    (tmp_path / "die").touch()
    spare.prepare(None)
    child = spare.take(assignment("job"), environment, confinement, hold())  # while it imports
    assert child is not None
    frames, seen, code = ended(child)
    assert seen["prepared"]
    assert code == 128 + signal.SIGKILL
    assert not any(isinstance(each, (Finished, Failed)) for each in frames)


@pytest.mark.part(of=2, law="a prepared child is as good as a new one")
def test_a_stop_reaches_the_job(spare: SpareChild, environment: dict[str, str], assignment: Any) -> None:
    long = assignment("job")
    long["document"]["data"]["examples"] = 200_000
    long["document"]["collection"]["batch_size"] = 1
    spare.prepare(None)
    child = spare.take(long, environment, Confinement(), hold())
    assert child is not None
    with contextlib.closing(child):
        frames = child.frames()
        assert any(isinstance(each, Progress) and each.stage == "collection" for each in frames)
        child.terminate()
        assert list(frames)[-1] == Stopped()
        assert child.wait(SECONDS) == EXIT_STOPPED


@pytest.mark.part(of=32, by=())  # what does not fit is asked of `unfit` below
@pytest.mark.parametrize(("name", "value"), [("CUDA_VISIBLE_DEVICES", "GPU-none"), ("OPENBLAS_NUM_THREADS", "1")])
@pytest.mark.part(of=2, law="a prepared child is as good as a new one")
def test_what_the_imports_do_not_fit_is_computed_by_a_new_program(
    spare: SpareChild, environment: dict[str, str], assignment: Any, name: str, value: str
) -> None:
    """Another environment, or a GPU that CUDA does not show in the fork."""
    spare.prepare(None)
    child = spare.take(assignment("job"), environment | {name: value}, Confinement(), hold())
    assert child is not None
    frames, seen, code = ended(child)
    assert (code, seen["prepared"], seen["environment"][name]) == (0, False, value)
    assert isinstance(frames[-1], Finished)


def test_a_file_that_changed_since_it_was_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kronoscope_test_changing.py"
    source.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torch", "kronoscope_test_changing"):
        importlib.import_module(name)
    files = imported_files()
    later = time.time() + 60
    assert str(source) in files
    assert unfit({}, files, later) == ""
    assert unfit({"B": "1", "A": None}, files, later) == "the job's environment has another A, B"
    source.write_text("")
    assert unfit({}, files, later) == f"{source} has changed"
    source.unlink()
    assert str(source) in unfit({}, files, later)


@pytest.mark.part(of=32, by=())  # either takes the other with it; of the importer's death alone is the test below
@pytest.mark.parametrize("killed", ["guardian", "importer"])
def test_one_that_was_killed_begins_nothing_and_the_next_is_there(
    spare: SpareChild, environment: dict[str, str], assignment: Any, killed: str
) -> None:
    spare.prepare(None)
    guardian = spare.pid
    assert guardian is not None
    until(lambda: descendants(guardian), SECONDS, "its importer runs")
    os.kill(guardian if killed == "guardian" else descendants(guardian).pop(), signal.SIGKILL)
    assert gone([guardian], SECONDS)
    assert spare.take(assignment("none"), environment, Confinement(), hold()) is None
    spare.prepare(None)
    assert spare.pid not in (None, guardian)
    child = spare.take(assignment("job"), environment, Confinement(), hold())
    assert child is not None
    frames, seen, _ = ended(child)
    assert isinstance(frames[-1], Finished)
    assert seen["prepared"]


def test_one_that_died_as_its_order_came_was_never_begun(
    spare: SpareChild, environment: dict[str, str], assignment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look whether it lives and its first step: the attempt is handed back, not counted."""
    spare.prepare(None)
    guardian = spare.pid
    assert guardian is not None
    until(lambda: descendants(guardian), SECONDS, "its importer runs")
    begin = Child.begin

    def too_late(child: Child, *given: Any) -> None:
        os.kill(guardian, signal.SIGSTOP)
        importer = descendants(guardian).pop()
        os.kill(importer, signal.SIGKILL)
        assert gone([importer], SECONDS)
        begin(child, *given)
        os.kill(guardian, signal.SIGCONT)

    monkeypatch.setattr(Child, "begin", too_late)
    child = spare.take(assignment("job"), environment, Confinement(), hold())
    assert child is not None
    with contextlib.closing(child):
        assert list(child.frames()) == []
        assert child.wait(SECONDS) == NOT_STARTED


def test_no_orphan_is_left_of_a_worker_that_was_killed_or_that_closed_it(spare: SpareChild) -> None:
    code = (
        "import os, time; from worker.process.spare_child import SpareChild; spare = SpareChild(dict(os.environ)); "
        "spare.prepare(None); print(spare.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as worker:
        assert worker.stdout is not None
        theirs = int(worker.stdout.readline())
        spare.prepare(None)
        own = spare.pid
        assert own is not None
        for each in (theirs, own):
            until(lambda each=each: descendants(each), SECONDS, "its importer runs")  # type: ignore[misc]
        pids = [theirs, own, *descendants(theirs), *descendants(own)]
        worker.kill()
        spare.close()
    assert gone(pids, SECONDS)
    spare.prepare(None)
    assert spare.pid is None
