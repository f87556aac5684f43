"""The service of a worker process from start to end, with a broker for wake-ups or without one.

Where jobs run as users of their own, shared folders have these rights::

    artifacts                passed through and not listed; each job enters the folder that was given to it
    all that lies in them    closed to jobs: objects, caches, locks, and what earlier versions have left of jobs
    the model store          read; a builtin model is trained by the worker, and what a job has put there is removed
"""

import os
import shutil
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import structlog

from catalog.private_memory import hide_memory
from jobs.objects.artifacts import OBJECTS, ArtifactFolder
from jobs.objects.local_store import LOCKS
from jobs.queue.wakeups import WakeupSender
from jobs.schema.database import after_queueing, open_database, require_current_schema
from jobs.schema.identifiers import new_id
from jobs.service_log import configure_logging, log_last_words
from jobs.tenancy.shared_workers import require_walls
from worker.agent.agent import Agent
from worker.agent.isolation import measure_isolation
from worker.agent.maintenance import WorkerMaintenance
from worker.devices import gpus_given, process_space
from worker.disk.cache_folder import tenants_caches
from worker.lifetime import end_by_itself
from worker.process.child_process import Child, child_environment
from worker.process.confinement import Confinement
from worker.settings import WorkerSettings
from worker.supervision.child_launch import job_namespaces

_UMASK = 0o022
_MADE_BY_JOBS = ("builtin", "pace")
"""Folders of the model store that jobs of earlier versions filled."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_READ = stat.S_IRUSR | stat.S_IXUSR


def share_folders(artifacts: Path, models: Path) -> None:
    """Give the folders of artifacts and of models the rights above; what an earlier version wrote gets them too."""
    os.umask(_UMASK)
    caches = tenants_caches(artifacts)
    if caches.exists() and caches.stat().st_uid != os.getuid():
        _remove(caches)  # a job of an earlier version has made it, and could open it again
    for folder in (artifacts / OBJECTS.rstrip("/"), artifacts / LOCKS, caches):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in artifacts.iterdir():
        with suppress(OSError):  # another worker may have removed it
            if each.lstat().st_gid == os.getgid():
                _change(each, take=_OTHERS)
    _change(artifacts, take=_OTHERS)
    _change(artifacts, give=stat.S_IXUSR)
    for name in _MADE_BY_JOBS:
        folder = models / name
        if folder.exists() and {each.lstat().st_uid for each in (folder, *folder.rglob("*"))} != {os.getuid()}:
            _remove(folder)
    models.mkdir(parents=True, exist_ok=True)
    for place, _, files in os.walk(models):
        for path in (Path(place), *(Path(place, name) for name in files)):
            _change(path, give=_OTHERS_READ, take=_OTHERS_WRITE | stat.S_ISVTX)


def _remove(folder: Path) -> None:
    """Remove a folder: out of the way at once, then file by file."""
    trash = folder.with_name(f".trash-{uuid.uuid4().hex}")
    with suppress(OSError):
        folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _change(path: Path, *, give: int = 0, take: int = 0) -> None:
    """Give group and others those of an owner's rights that the owner has, and take rights; of this user's files."""
    with suppress(OSError):
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        changed = (mode | (mode & give) >> 3 | (mode & give) >> 6) & ~take
        if status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode) and changed != mode:
            path.chmod(changed)


_LINE_BYTES = 10_000
_SECONDS = 60.0
_NOTHING = (sys.executable, "-P", "-S", "-c", "")
_ROOT = "the worker is root, and so its jobs would be, whom no namespace holds; set KRONOSCOPE_CHILD_USER too"


@contextmanager
def trial_job(settings: WorkerSettings, number: int = 0) -> Iterator[Confinement]:
    """Make a folder as a job has it, and yield the limits of a child that is held to what a job of this user is."""
    held_to = settings.confinement(number)
    folder, name = ArtifactFolder(settings.ledger.artifact_root), new_id()
    place = folder.attempt_dir(name, 1, held_to.user)
    try:
        yield replace(held_to, namespaces=job_namespaces(settings, place, [place]))
    finally:
        folder.clear_attempt(name, 1)


def with_possible_namespaces(settings: WorkerSettings) -> WorkerSettings:
    """Return the settings without `KRONOSCOPE_CHILD_NAMESPACES` where no child can be started like that."""
    why = _refused(settings) if settings.child_namespaces else ""
    if not why:
        return settings
    structlog.get_logger("kronoscope.worker").warning("jobs run without namespaces of their own", why=why)
    return settings.model_copy(update={"child_namespaces": False})


def _refused(settings: WorkerSettings) -> str:
    """Why the kernel refuses; empty where it does not."""
    if os.getuid() == 0 and settings.child_user is None:
        return _ROOT
    with (
        trial_job(settings) as held_to,
        closing(Child.start({}, subprocess.PIPE, child_environment(os.environ), _NOTHING, held_to)) as child,
    ):
        said = [line.decode(errors="replace").strip() for line in child.output(_LINE_BYTES)]
        code = child.wait(_SECONDS)
    return "" if code == 0 else (said or [f"exit code {code}"])[0]


_DEVICE_NODE = Path("/dev/nvidiactl")


def describe_device(environ: Mapping[str, str] = os.environ) -> str:
    """Describe the device that this worker computes on, for its first log line.

    It is ``cpu (…)`` with the reason, or ``cuda (…)`` with the names of the GPUs, by `CUDA_VISIBLE_DEVICES` and `PATH`.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return "cpu (CUDA_VISIBLE_DEVICES hides every GPU)"
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None:
        return "cuda (names unknown)" if _DEVICE_NODE.exists() else "cpu (no NVIDIA driver)"
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=True)  # noqa: S603 - a fixed command
    except (OSError, subprocess.SubprocessError):
        return f"{_kind(visible)} (nvidia-smi does not answer)"
    names = [line.split(" (UUID")[0].strip() for line in listing.stdout.splitlines() if line.startswith("GPU ")]
    return f"cuda ({'; '.join(names)})" if names else f"{_kind(visible)} (nvidia-smi lists no GPU)"


def _kind(visible: str | None) -> str:
    """One whose GPUs do not answer takes no job until one does, instead of computing elsewhere."""
    return "cuda" if gpus_given(visible) else "cpu"


class Service:
    """Agent and maintenance over one database connection pool."""

    def __init__(self, settings: WorkerSettings, redis_url: str | None = None) -> None:
        """Open the ledger; without a broker nothing wakes other workers, nor this one."""
        began = time.monotonic()  # the machine is not lent for longer because it took long to start
        configure_logging(settings.log_level)
        log_last_words()
        log = structlog.get_logger("kronoscope.worker")
        log.info("worker starts", device=describe_device(), slots=settings.slots, wakeups=redis_url is not None)
        hide_memory()
        if settings.child_user is not None:
            share_folders(settings.ledger.artifact_root, settings.model_store)
        settings.ledger.artifact_root.mkdir(parents=True, exist_ok=True)
        settings = with_possible_namespaces(settings)
        with trial_job(settings) as job, trial_job(settings, 1) as neighbour:
            isolation = measure_isolation(job, os.environ, settings.ledger.artifact_root, neighbour)
        log.info("isolation of jobs", holds=isolation)
        self._engine = open_database(settings.ledger.database_url)
        require_current_schema(self._engine)
        self.wakeups = None if redis_url is None else WakeupSender(self._engine, redis_url)
        """Wakes the workers of this ledger; None without a broker."""
        after_queueing(self._engine, self._wake)
        self.agent = Agent(self._engine, settings, isolation=isolation)
        require_walls(self._engine, self.agent.isolation)
        self._maintenance = WorkerMaintenance(self._engine, settings.ledger, process_space(settings.node), self.wakeups)
        self._lifetime, self._began = settings.lifetime, began
        self._log = log

    def _wake(self) -> None:
        """Have this worker's agent, and then all, look for what was queued here."""
        self.agent.wake()
        if self.wakeups is not None:
            self.wakeups.wake()

    def start(self) -> None:
        """Take jobs from now on."""
        self.agent.start()
        self._maintenance.start()
        end_by_itself(self._lifetime, self.agent.idle, self._began)

    def stop(self) -> None:
        """Hand running jobs back and let go of the database."""
        drained = self.agent.drain()
        self._maintenance.stop()
        self._log.info("worker ends", drained=drained)
        self._engine.dispose()
