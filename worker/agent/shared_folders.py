"""Shared folders of a worker and of jobs that run as other users of its group: the rights of each.

::

    objects, their lock      closed: no job goes there
    artifacts, caches        entered and not listed: a job comes to the folders that it was told, and guesses no other
    builtin models, the hub  read; a builtin model is trained by the worker, and what a job has trained is removed
    the rest                 written by jobs, and used by this process
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

_UMASK = 0o007
_CLOSED = (OBJECTS.rstrip("/"), LOCKS)
_TRAINED = "builtin"
_READ = (_TRAINED, "hub")
_OTHERS_READ_OR_WRITE = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def share_folders(artifacts: Path, models: Path) -> None:
    """Give the folders of artifacts and of models the rights above; what an earlier version wrote gets them too.

    Args:
        artifacts: The root of the artifacts.
        models: The model store.
    """
    os.umask(_UMASK)
    for name in _CLOSED:
        (artifacts / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        _change(artifacts / name, take=stat.S_IRWXG | stat.S_IRWXO)
    caches = tenants_caches(artifacts)
    if caches.exists() and caches.stat().st_uid != os.getuid():
        _remove(caches)  # a job of an earlier version has made it, and could open it again
    caches.mkdir(exist_ok=True)
    for name in _READ:
        _close_to_writers(models / name)
    for root in (artifacts, models):
        for place, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in (*_CLOSED, *_READ)]
            for path in (Path(place), *(Path(place, name) for name in files)):
                _change(path, give=stat.S_IRWXU)
    # jobs make folders there, and move away nobody else's
    _change(models, add=stat.S_ISVTX)
    for unlisted in (artifacts, caches):
        _change(unlisted, give=stat.S_IXUSR, take=_OTHERS_READ_OR_WRITE)


def _close_to_writers(folder: Path) -> None:
    """Let jobs read a folder of models; what one of theirs has trained is no model of the service."""
    if folder.name == _TRAINED and folder.exists():
        owners = {each.lstat().st_uid for each in (folder, *folder.rglob("*"))}
        if owners != {os.getuid()}:
            _remove(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for place, _, files in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in files)):
            _change(path, give=stat.S_IRUSR | stat.S_IXUSR, take=_OTHERS_WRITE)


def _remove(folder: Path) -> None:
    """Remove a folder: out of the way at once, then file by file."""
    trash = folder.with_name(f".trash-{uuid.uuid4().hex}")
    with suppress(OSError):
        folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _change(path: Path, *, give: int = 0, take: int = 0, add: int = 0) -> None:
    """Give the group those of an owner's rights that the owner has, take and add others; of this user's files alone."""
    with suppress(OSError):  # another worker may have removed it
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        changed = (mode | (mode & give) >> 3 | add) & ~take
        if status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode) and changed != mode:
            path.chmod(changed)
