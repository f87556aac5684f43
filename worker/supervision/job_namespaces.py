"""Job namespaces: which folders of the machine a job sees, of the worker's settings and what the job was given."""

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from worker.process.namespaces import Namespaces
from worker.settings import WorkerSettings

_SECRETS = ("KRONOSCOPE_", "DATABASE_", "REDIS_", "AWS_")
_KEPT_BY_USERS = (".aws", ".docker", ".gnupg", ".kube", ".netrc", ".pgpass", ".ssh")
"""Folders and files of a home in which programs keep keys and passwords."""
_FOLDERS_OF_LIBRARIES = ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "LD_LIBRARY_PATH", "PYTHONPATH", "SCIKIT_LEARN_DATA")


def job_namespaces(
    settings: WorkerSettings, home: Path, written: Sequence[Path], read: Sequence[str] = ()
) -> Namespaces | None:
    """Return what the processes of a job see.

    Args:
        settings: The worker's settings.
        home: The job's folder for whatever its libraries write.
        written: The folders that it writes to.
        read: The folders that it reads; `*` stands for all.

    Returns:
        The namespaces; None where jobs are started without any.
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
