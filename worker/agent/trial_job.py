"""Trial jobs: limits and a folder as a job has them, to measure at a worker's start what holds for those that come."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import structlog

from jobs.objects.artifacts import ArtifactFolder
from jobs.schema.identifiers import new_id
from worker.process.child_process import Child, child_environment
from worker.process.confinement import Confinement
from worker.settings import WorkerSettings
from worker.supervision.job_namespaces import job_namespaces

_LINE_BYTES = 10_000
_SECONDS = 60.0
_NOTHING = (sys.executable, "-P", "-S", "-c", "")
_ROOT = "the worker is root, and so its jobs would be, whom no namespace holds; set KRONOSCOPE_CHILD_USER too"


@contextmanager
def trial_job(settings: WorkerSettings, number: int = 0) -> Iterator[Confinement]:
    """Make a folder as a job has it, for a child that is to be held to what a job is.

    Args:
        settings: The worker's settings.
        number: Which of the users for jobs it has.

    Yields:
        The limits.
    """
    held_to = settings.confinement(number)
    folder, name = ArtifactFolder(settings.ledger.artifact_root), new_id()
    place = folder.attempt_dir(name, 1, held_to.user)
    try:
        yield replace(held_to, namespaces=job_namespaces(settings, place, [place]))
    finally:
        folder.clear_attempt(name, 1)


def with_possible_namespaces(settings: WorkerSettings) -> WorkerSettings:
    """Return the settings without `KRONOSCOPE_CHILD_NAMESPACES` where no child can be started like that.

    Args:
        settings: The operator's choice.
    """
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
