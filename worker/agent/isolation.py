"""Isolation: the walls between a child and its worker, measured by a child that tries, not read from settings.

::

    own_user           it runs as another user than the worker
    neighbours         memory and processes of another job are closed to it
    files              files and folders of another job, and the stores of objects and caches, are closed to it
    memory             the worker's environment and memory are closed to it
    secret_files       the files that hold the service's secrets are closed to it
    no_new_privileges  no program that it starts has more rights than it
    system_calls       a filter denies it what no computation needs
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from jobs.errors import SettingsInvalid
from jobs.objects import job_folders
from jobs.objects.artifacts import OBJECTS, ArtifactFolder
from jobs.schema.identifiers import new_id
from worker.disk.cache_folder import cache_of_tenant
from worker.process.child_process import Child, child_environment
from worker.process.confinement import Confinement
from worker.process.process_group import descendants
from worker.supervision.child_launch import secret_files

_LINE_BYTES = 10_000
_PROBE_SECONDS = 60.0
_PROBE = (sys.executable, "-P", "-m", "worker.agent.isolation_probe")
_NEIGHBOUR = (sys.executable, "-P", "-c", "import time; print('up', flush=True); time.sleep(120)")


def measure_isolation(
    confinement: Confinement, environ: Mapping[str, str], artifacts: Path, neighbour: Confinement | None = None
) -> tuple[str, ...]:
    """Start a child that tries what a hostile one would try, beside another; return the walls that hold, in order.

    The other has the limits of ``neighbour``, or for None the same. ``environ`` names the files of the service's
    secrets; in the root ``artifacts`` another job and the stores get a file for the moment. ``SettingsInvalid`` if
    children are to have a user of their own, and none can be started as that user.
    """
    files = secret_files(environ)
    passed = child_environment(environ)
    held: tuple[str, ...] = ()
    said = b""
    another = neighbour or confinement
    with (
        _files_of_others(artifacts, another.user) as foreign,
        closing(Child.start({}, subprocess.PIPE, passed, _NEIGHBOUR, another)) as beside,
    ):
        up = next(beside.output(_LINE_BYTES), b"").strip() == b"up"
        # as this process numbers them; their own namespace would have other numbers
        others = ",".join(map(str, sorted(descendants(beside.pid)))) if up else ""
        told = [str(os.getpid()), str(os.getuid()), others, str(len(foreign))]
        told += [*map(str, foreign), *files]
        with closing(Child.start({}, subprocess.PIPE, passed, (*_PROBE, *told), confinement)) as child:
            for line in child.output(_LINE_BYTES):
                said = line
            code = child.wait(_PROBE_SECONDS)
        ended = _has_ended(beside)
    if code == 0:
        held = tuple(str(each) for each in json.loads(said) if each != "neighbours" or not ended)
    if confinement.user is not None and "own_user" not in held:
        raise SettingsInvalid(
            f"KRONOSCOPE_CHILD_USER is {confinement.user}, and no process could be started as that user"
            f" ({said.decode(errors='replace').strip()[:200]}); give the worker the capabilities SETUID, SETGID and"
            " KILL, let that user read this installation, or leave the variable out"
        )
    return held


@contextmanager
def _files_of_others(artifacts: Path, user: int | None) -> Iterator[list[Path]]:
    """Put a file where another job, the objects and the caches have theirs; none where that cannot be done."""
    probe, digest = new_id(), secrets.token_hex(32)
    job, objects = artifacts / probe, artifacts / OBJECTS / probe
    cache = cache_of_tenant(artifacts, probe)
    files = [job / "1" / "artifact", objects / digest[:2] / digest, cache / digest / "entry"]
    placed = []
    try:
        with suppress(OSError):
            for file in files:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(b"another tenant's")
            if user is not None:
                # given with what is in it, as a job's own would be
                ArtifactFolder(artifacts).attempt_dir(probe, 1, user)
            placed = files
        yield placed
    finally:
        job_folders.clear(job)
        for folder in (objects, cache):
            shutil.rmtree(folder, ignore_errors=True)


def _has_ended(child: Child) -> bool:
    try:
        child.wait(0)
    except TimeoutError:
        return False
    return True
