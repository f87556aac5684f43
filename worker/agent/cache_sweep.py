"""The sweep of all tenants' cached factors in one folder: by bytes, and of whatever has no row or no folder."""

from pathlib import Path

from sqlalchemy import Engine

from jobs.objects.cached_entries import CachedEntries, forget_unused, list_tenants, place_of
from worker.disk.cache_folder import CacheFolder, cache_of_tenant, tenants_caches


def sweep_caches(engine: Engine, artifact_root: Path, limit_bytes: int) -> int:
    """Sweep the cache of every tenant."""
    root = tenants_caches(artifact_root)
    if not root.is_dir():
        return 0
    place = place_of(root)
    forget_unused(engine)
    tenants = {cache_of_tenant(artifact_root, each): each for each in list_tenants(engine)}
    # without entries in the ledger there may be folders, and the other way round
    known = [each for each in tenants if each.is_dir()]
    named = [cache_of_tenant(artifact_root, each) for each in list_tenants(engine, place)]
    return sum(
        CacheFolder(folder, CachedEntries(engine, tenants[folder], place), limit_bytes).sweep()
        for folder in dict.fromkeys((*known, *named))
        if folder in tenants
    )
