"""The launch of a child: its environment, the assignment that it reads, its start, and what it says beside frames."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog
from sqlalchemy import Engine
from structlog.typing import FilteringBoundLogger

from catalog.frames import LogLine
from catalog.record import plain
from catalog.requests.assignment import Allowed, Assignment
from catalog.requests.cached_factors import reason_uncached
from catalog.requests.estimate import ESTIMATE
from jobs.objects import job_folders
from jobs.objects.artifacts import view_of
from jobs.objects.scratch import Scratch
from jobs.queue.attempt_writes import write_log_line
from jobs.records import Claim
from worker.devices import devices_of, gpus_given, host
from worker.process.child_process import EXECUTION, RANKS, Child, Hold, child_environment
from worker.process.confinement import Confinement, DiskLimit
from worker.process.namespaces import Namespaces
from worker.process.spare_child import SpareChild
from worker.settings import WorkerSettings
from worker.supervision.lease_monitor import LeaseWatch

_SPARE_FREE_BYTES = 4 * 2**30
"""Host memory that must be free for a child to be prepared."""
_SPARE_BYTES = 2**29
"""Host memory of one that waits: 270 MB with torch for CPUs, and room for that of CUDA."""
_KEPT_LINES = 40
_HOME = ".home"
"""Folder in an attempt's folder for whatever a job's libraries write; no artifact has such a name."""
_SECRETS = ("KRONOSCOPE_", "DATABASE_", "REDIS_", "AWS_")
_KEPT_BY_USERS = (".aws", ".docker", ".gnupg", ".kube", ".netrc", ".pgpass", ".ssh")
"""Folders and files of a home in which programs keep keys and passwords."""
_FOLDERS_OF_LIBRARIES = ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "LD_LIBRARY_PATH", "PYTHONPATH", "SCIKIT_LEARN_DATA")
_PACKAGED = Path(__file__).parents[1] / "execution" / "models" / "trained"
_TRAINING_SECONDS = 120.0
_POLL_SECONDS = 0.05


def keeps_spare_child(settings: WorkerSettings) -> bool:
    """Return whether this worker prepares a child for the next job, where memory allows it."""
    if settings.spare_child != "auto":
        return settings.spare_child == "always"
    return not settings.fake_gpus and gpus_given(os.environ.get("CUDA_VISIBLE_DEVICES")) > 0


def spare_child(settings: WorkerSettings, command: Sequence[str]) -> SpareChild | None:
    """Return the place of the child that waits for the next job; None where this worker keeps none."""
    if command != EXECUTION or not keeps_spare_child(settings):
        return None
    # what it imports finds no GPU to open
    return SpareChild(_environment(settings.computing_threads()) | {"CUDA_VISIBLE_DEVICES": ""})


def start(
    told: Assignment,
    claim: Claim,
    settings: WorkerSettings,
    command: Sequence[str],
    hold: Hold,
    slots: int = 1,
    spare: SpareChild | None = None,
) -> Child:
    """Start the child of a claim, within the worker's limits; the one that waits becomes it where there is one."""
    if claim.world_size > 1 and command == EXECUTION:
        command = RANKS
    confinement = _confinement(told, claim, settings, slots)
    variables = environment(claim, told.threads or 1)
    if confinement.apart:
        # libraries keep locks, caches and what they unpack where no other job can come to
        home = str(told.artifacts / _HOME)
        variables |= {"HOME": home, "TMPDIR": home, "HF_HOME": home}
        variables.pop("HF_DATASETS_CACHE", None)
    if spare is None or command != EXECUTION:
        return Child.start(plain(told), subprocess.PIPE, variables, command, confinement, hold)
    child = spare.take(plain(told), variables, confinement, hold)
    if child is None:
        child = Child.start(plain(told), subprocess.PIPE, variables, command, confinement, hold)
    machine = host(settings.node)
    if machine.capacity_bytes - machine.used_bytes >= _SPARE_FREE_BYTES:
        spare.prepare(hold.lock)
    return child


def _confinement(told: Assignment, claim: Claim, settings: WorkerSettings, slots: int) -> Confinement:
    """The limits, and of the machine's folders those that the assignment names."""
    attempt = told.artifacts
    # all attempts' checkpoints together: a later one links what an earlier one has left
    written = (attempt, told.scratch.parent)
    # files there are second names of those of the cache
    view = [] if told.cache is None else [str(told.cache)]
    read = (*view, *settings.directories_of(claim.tenant_id), *_inputs(told))
    if settings.child_namespaces:
        for each in (*written, *map(Path, view)):
            each.mkdir(parents=True, exist_ok=True)
    namespaces = job_namespaces(settings, attempt / _HOME, written, read)
    held = settings.confinement(claim.user_number, claim.world_size)
    return replace(held, namespaces=namespaces, disk=_disk_limit(settings, attempt.parent, slots))


def _inputs(told: Assignment) -> list[str]:
    """Folders in the attempt's with links to what is kept, which stays as it is."""
    named = (told.factors_path, told.against_path, told.divided, told.model_path, told.data_path, told.query_path)
    paths = *named, *(each.path for each in (told.extends, *told.pieces) if each is not None)
    return [str(each) for each in paths if each is not None]


def _disk_limit(settings: WorkerSettings, folder: Path, slots: int) -> DiskLimit:
    """Return the disk limit of a job's attempts; below the floor the volume is closed to jobs."""
    return DiskLimit(
        folder=str(folder),
        total_bytes=settings.child_disk_bytes,
        total_files=settings.child_disk_files,
        parts=max(slots, settings.slots),
        floor_bytes=settings.disk_floor_bytes,
    )


def environment(claim: Claim, threads: int) -> dict[str, str]:
    """Return the child's environment, in which only the leased GPUs can be seen."""
    passed = _environment(threads)
    if claim.lease is not None:
        passed["CUDA_VISIBLE_DEVICES"] = ",".join(claim.lease.device_uuids) if claim.lease.kind == "cuda" else ""
    return passed


def _environment(threads: int) -> dict[str, str]:
    passed = child_environment(os.environ)
    # else each library that brings its own starts a thread for every core, in every slot
    passed.setdefault("OPENBLAS_NUM_THREADS", str(threads))
    # its user may stand in no table of users, and libraries ask for a name
    return passed | {"USER": "kronoscope-job", "LOGNAME": "kronoscope-job"}


def computing_threads(claim: Claim, settings: WorkerSettings) -> tuple[int, bool]:
    """Return the threads of each rank of an attempt, and whether the child may take fewer, as nobody has said how many.

    A later attempt computes with the threads of the first.
    """
    own = settings.computing_threads()
    if claim.lease is None or claim.lease.kind == "host":
        own = max(1, own // claim.world_size)
    # a job over stored factors announces no plan
    environment = (claim.manifest or {}).get("environment") or {}
    earlier = (claim.plan or {}).get("threads") or environment.get("threads")
    return int(earlier or own), settings.threads is None and earlier is None


def cache_bytes_of(claim: Claim, settings: WorkerSettings) -> int:
    """Return what the cache of a claim's tenant may hold; 0 where its job can have none."""
    keyless = claim.piece is not None or claim.kinds == (ESTIMATE,) or reason_uncached(claim.document) is not None
    return 0 if keyless else settings.ledger.cache_bytes


def assignment(claim: Claim, settings: WorkerSettings, artifacts: Path, scratch: Scratch) -> Assignment:
    """Return the assignment that `catalog.requests.assignment` reads, without what is staged for the attempt."""
    user = settings.confinement(claim.user_number).user
    if user is not None:
        scratch.give(claim.job_id, claim.fence, user)
        job_folders.give_new(artifacts / _HOME, user)
    elif settings.child_namespaces:
        (artifacts / _HOME).mkdir(exist_ok=True)
    cache_bytes = cache_bytes_of(claim, settings)
    threads, may_choose = computing_threads(claim, settings)
    return Assignment(
        document=plain(claim.document),
        artifacts=artifacts,
        completed=tuple(claim.completed),
        threads=threads,
        choose_threads=may_choose,
        paths=tuple(map(Path, settings.paths)),
        allowed=Allowed(
            factories=tuple(settings.factories_of(claim.tenant_id)),
            directories=tuple(settings.directories_of(claim.tenant_id)),
        ),
        store=settings.model_store,
        plan=claim.plan,
        estimate=claim.kinds == (ESTIMATE,),
        # one that could have no key is not given a cache
        cache=view_of(artifacts) if cache_bytes else None,
        cache_bytes=cache_bytes,
        scratch=scratch.attempt_folder(claim.job_id, claim.fence),
        earlier=tuple(scratch.before(claim.job_id, claim.fence)),
        checkpoint_seconds=settings.checkpoint_seconds,
        decompose_round=settings.decompose_round,
        bounds=_bounds(claim, settings),
        leased=None if claim.lease is None else claim.lease.kind,
    )


def _bounds(claim: Claim, settings: WorkerSettings) -> dict[str, int]:
    """Return the bounds of its plan: the leased bytes, and beside a GPU its part of the host's memory."""
    leased = claim.lease
    if leased is None or leased.bound_bytes is None:
        return {}
    if leased.kind != "cuda":
        return {"host_bytes": leased.bound_bytes}
    # a later attempt does what the first one's plan says
    part = {} if claim.plan is not None else _part_of_host(settings, claim.world_size)
    return {"device_bytes": leased.bound_bytes, **part}


def _part_of_host(settings: WorkerSettings, ranks: int) -> dict[str, int]:
    """An equal part for each slot, and of it for each rank: it is not leased, and all would take what is free now.

    A job that holds several GPUs keeps as many other jobs from running, so it gets their parts too.
    """
    if settings.slots == 1 and ranks == 1:
        return {}
    capacity = host(settings.node).capacity_bytes - (_SPARE_BYTES if keeps_spare_child(settings) else 0)
    others = settings.slots - 1
    if ranks > 1:
        others = min(others, len(devices_of(settings.node, settings.fake_gpus)()) - ranks)
    part = (capacity - max(0, others) * (capacity // settings.slots)) // ranks
    return {"host_bytes": part, "host_shared_by": max(settings.slots, ranks)}


class ChildOutput:
    """Reads in a thread of its own, so that a talkative child never blocks on a full pipe."""

    def __init__(self, lines: Iterable[bytes], log: FilteringBoundLogger) -> None:
        self._lines = lines
        self._log = log
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._read, name="child-output", daemon=True)
        self._thread.start()

    def tail(self) -> str | None:
        """The last lines, once the child has ended."""
        self._thread.join()
        return "\n".join(self._kept) or None

    def _read(self) -> None:
        for line in self._lines:
            text = line.decode(errors="replace").rstrip().replace("\0", "")
            if text:
                self._kept.append(text)
                self._log.debug("child says", text=text)


def job_logger(**bound: object) -> FilteringBoundLogger:
    """Return a logger whose lines carry the job's facts."""
    logger: FilteringBoundLogger = structlog.get_logger("kronoscope.worker").bind(**bound)
    return logger


def job_namespaces(
    settings: WorkerSettings, home: Path, written: Sequence[Path], read: Sequence[str] = ()
) -> Namespaces | None:
    """Return what a job's processes see, its ``home`` for whatever libraries write; `*` in ``read`` stands for all.

    None where jobs are started without any.
    """
    if not settings.child_namespaces:
        return None
    libraries = [each for name in _FOLDERS_OF_LIBRARIES for each in os.environ.get(name, "").split(os.pathsep)]
    installed = (*sys.path, sys.prefix, sys.base_prefix, *libraries)
    return Namespaces(
        temporary=os.path.realpath(home),
        closed=_paths((settings.ledger.artifact_root, *secret_files(os.environ), *_of_user())),
        written=_paths(written),
        read=_paths(
            (settings.model_store, *settings.paths, *installed, *("/" if each == "*" else each for each in read))
        ),
    )


def secret_files(environ: Mapping[str, str]) -> list[str]:
    """Return the files that hold a service's secrets."""
    return [
        path for name, path in sorted(environ.items()) if name.endswith("_FILE") and name.startswith(_SECRETS) and path
    ]


def _of_user() -> list[Path]:
    """Return the folders of keys and sockets of the worker's user."""
    places = [Path("/run/user", str(os.getuid()))]
    with contextlib.suppress(RuntimeError):  # a user without a home
        places += [Path.home() / name for name in _KEPT_BY_USERS]
    return places


def _paths(paths: Iterable[str | Path]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.realpath(each) for each in paths if str(each)))


def train_builtin(engine: Engine, claim: Claim, settings: WorkerSettings, watch: LeaseWatch) -> None:
    """Train the builtin model of a job that cannot write to the store, by a process that runs our code alone.

    Where that does not succeed, the job trains the model for itself.
    """
    model = claim.document.get("model") or {}
    name, store = str(model.get("name")), settings.model_store
    apart = settings.child_namespaces or settings.confinement(claim.user_number).apart
    if not apart or claim.kinds == (ESTIMATE,) or model.get("source") != "builtin":
        return
    if any(any(folder.glob(f"{name}-*.json")) for folder in (_PACKAGED, store / "builtin")):
        return
    text = f"training the builtin model {name} for this service: once, for all jobs"
    write_log_line(engine, claim, LogLine(level="info", message=text))
    command = [sys.executable, "-P", "-m", "worker.execution.models.builtin", name, "--store", str(store)]
    until = time.monotonic() + _TRAINING_SECONDS
    with contextlib.suppress(OSError), _started(command) as process:
        while process.poll() is None:
            if watch.reason is not None or watch.lost.is_set() or time.monotonic() > until:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)


def _started(command: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 - our own module, and a name that the document's schema lists
        command, env=child_environment(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
