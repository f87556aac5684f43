"""Shared folders of a worker and of jobs that run as users of their own: the rights of each.

::

    artifacts                passed through and not listed; each job enters the folder that was given to it
    all that lies in them    closed to jobs: objects, caches, locks, and what earlier versions have left of jobs
    the model store          read; a builtin model is trained by the worker, and what a job has put there is removed
"""

import os
import shutil
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from jobs.objects.artifacts import OBJECTS
from jobs.objects.local_store import LOCKS
from worker.disk.cache_folder import tenants_caches

_UMASK = 0o022
_MADE_BY_JOBS = ("builtin", "pace")
"""Folders of the model store that jobs of earlier versions filled."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_READ = stat.S_IRUSR | stat.S_IXUSR


def share_folders(artifacts: Path, models: Path) -> None:
    """Give the folders of artifacts and of models the rights above; what an earlier version wrote gets them too.

    Args:
        artifacts: The root of the artifacts.
        models: The model store.
    """
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
