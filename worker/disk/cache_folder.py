"""The folder of cached factors of one tenant: entries named by their keys, the longest unused leaving first.

An entry is a folder that was filled under a temporary name and renamed when it was complete, so whoever sees a key
sees everything. Its ``entry.json`` holds the digests of its files, and is touched at every use. Whoever fills a folder
holds a lock on it, which the kernel takes back from a process that is gone.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
import uuid
from pathlib import Path

ENTRY = "entry.json"
_KEY = re.compile(r"[0-9a-f]{64}")
_PART, _TRASH = ".part-", ".trash-"
_LEFT_SECONDS = 60.0
"""After which a folder that nobody has locked is left of whoever was killed, and not just about to be locked."""
_STALE_SECONDS = 86_400.0
"""Nobody fills an entry for so long: after it, one is removed on a file system without locks too."""


def cache_of_tenant(artifact_root: Path, tenant_id: str) -> Path:
    """Return the folder of one tenant's entries.

    Args:
        artifact_root: The folder of the artifacts.
        tenant_id: The tenant, of which only a digest is in the path.

    Returns:
        The folder, which need not exist.
    """
    return tenants_caches(artifact_root) / hashlib.sha256(tenant_id.encode()).hexdigest()[:32]


def tenants_caches(artifact_root: Path) -> Path:
    """Return the folder that holds the caches of all tenants.

    Args:
        artifact_root: The folder of the artifacts.

    Returns:
        The folder, which need not exist.
    """
    return artifact_root / ".factor-cache"


def sweep_tenants(artifact_root: Path, limit_bytes: int) -> int:
    """Sweep the cache of every tenant.

    Args:
        artifact_root: The folder of the artifacts.
        limit_bytes: The bytes that each tenant may keep.

    Returns:
        How many entries were removed.
    """
    root = tenants_caches(artifact_root)
    return sum(sweep(each, limit_bytes) for each in root.iterdir()) if root.is_dir() else 0


def part(folder: Path) -> Path:
    """Return a new place to fill an entry in.

    Args:
        folder: The tenant's cache.

    Returns:
        A path that nothing else uses; it is not made.
    """
    return folder / f"{_PART}{uuid.uuid4().hex}"


def claim(place: Path) -> int:
    """Make the place in which an entry is filled, and lock it.

    Args:
        place: A path from `part`.

    Returns:
        The descriptor that holds the lock until it is closed.

    Raises:
        OSError: If it cannot be made.
    """
    place.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def publish(filled: Path, folder: Path, key: str, *, replace: bool) -> None:
    """Make a filled place the entry of a key; of two that fill it at once the first wins.

    Args:
        filled: The complete place.
        folder: The tenant's cache.
        key: The entry's key, a SHA-256 in hexadecimal.
        replace: Whether an entry that is there already gives way.

    Raises:
        OSError: If it cannot be renamed for another reason.
    """
    target = folder / key
    if replace or not (target / ENTRY).is_file():
        # a folder that lost its manifest is no entry, and would be in the way of one
        discard(target)
    try:
        filled.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(filled, ignore_errors=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(entry: Path) -> None:
    """Remove an entry: out of sight at once, then file by file.

    Args:
        entry: Its folder; one that is not there is no error.
    """
    trash = entry.parent / f"{_TRASH}{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):
        entry.rename(trash)
    _clear(trash)


def sweep(folder: Path, limit_bytes: int) -> int:
    """Remove what was left half done, and the longest unused entries beyond the limit.

    What is being filled counts. A job that reads an entry has its own links to the files, so that nothing is taken
    from under it.

    Args:
        folder: The tenant's cache.
        limit_bytes: The bytes that may stay, places being filled included.

    Returns:
        How many entries and places were removed.
    """
    if not folder.is_dir():
        return 0
    removed, entries, total = 0, [], 0
    for each in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if each.name.startswith((_PART, _TRASH)):
                if _left(each):
                    _clear(each)
                    removed += 1
                else:
                    total += _size(each)
            elif _KEY.fullmatch(each.name) and each.is_dir():
                entries.append((_used(each), _size(each), each))
    for _, size, entry in sorted(entries, key=lambda found: -found[0]):
        total += size
        if total > limit_bytes:
            discard(entry)
            removed += 1
    return removed


def _used(entry: Path) -> float:
    """When it was last used; never, where it is no entry."""
    manifest = entry / ENTRY
    return manifest.stat().st_mtime if manifest.is_file() else 0.0


def _clear(place: Path) -> None:
    """Remove what stands there, a folder or not."""
    shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):
        place.unlink()


def _left(place: Path) -> bool:
    """Whether nobody fills, or clears, a place any more."""
    idle = time.time() - _touched(place)
    if idle <= _LEFT_SECONDS or idle > _STALE_SECONDS:
        return idle > _STALE_SECONDS
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # somebody's, or a file system without locks
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _touched(folder: Path) -> float:
    return max(each.stat().st_mtime for each in (folder, *folder.rglob("*")))


def _size(entry: Path) -> int:
    return sum(each.stat().st_size for each in entry.rglob("*") if each.is_file())
