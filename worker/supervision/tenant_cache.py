"""The tenant's cache of factors, as the supervisor of one attempt serves it."""

from pathlib import Path

from sqlalchemy import Engine

from catalog.frames import CacheAnswer, CacheAsked, CacheFilled
from catalog.requests.cached_factors import FILLED, reason_uncached
from catalog.requests.estimate import ESTIMATE
from jobs.errors import ArtifactDamaged
from jobs.objects import job_folders
from jobs.objects.artifacts import ArtifactFolder
from jobs.objects.cached_entries import CachedEntries, place_of
from jobs.records import Claim
from worker.disk.cache_folder import CacheFolder, Filling, cache_of_tenant, tenants_caches
from worker.settings import WorkerSettings


class TenantCache:
    """The cache of the tenant of one claim; what another tenant has collected is neither found nor noticed."""

    def __init__(
        self, engine: Engine, claim: Claim, folder: ArtifactFolder, limit_bytes: int, group: int | None
    ) -> None:
        """Set up the cache; nothing is read yet."""
        self._engine = engine
        self._claim = claim
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._group = group

    def answer(self, asked: CacheAsked) -> CacheAnswer:
        """Verify the entry that a child asks for, and lay it out."""
        try:
            view = self._folder.new_view(self._claim.job_id, self._claim.fence, self._group)
            return self._entries().answer(asked.key, view)
        except OSError as error:
            why = error.strerror or error
            return CacheAnswer(job=None, warning=f"cached factors cannot be used here: {why}; collected again")

    def take(self, filled: CacheFilled) -> str | None:
        """Publish what a child has left; it is its claim, and serves jobs of its tenant alone."""
        claim, folder = self._claim, self._folder
        filling = Filling(
            key=filled.key,
            job=claim.job_id,
            files=filled.files,
            open=lambda name: folder.staged(claim.job_id, claim.fence, f"{FILLED}/{name}"),
            replace=claim.document.get("cache") == "refresh",
        )
        try:
            return self._entries().take(filling)
        except (ArtifactDamaged, OSError) as error:
            return str(error)

    def clear_filled(self) -> None:
        """Remove what the child has left, which counts among the bytes of its attempt."""
        job_folders.clear(self._folder.attempt_dir(self._claim.job_id, self._claim.fence) / FILLED)

    def _entries(self) -> CacheFolder:
        root: Path = self._folder.root
        rows = CachedEntries(self._engine, self._claim.tenant_id, place_of(tenants_caches(root)))
        return CacheFolder(cache_of_tenant(root, self._claim.tenant_id), rows, self._limit_bytes)


def cache_bytes_of(claim: Claim, settings: WorkerSettings) -> int:
    """Return what the cache of a claim's tenant may hold."""
    keyless = claim.piece is not None or claim.kinds == (ESTIMATE,) or reason_uncached(claim.document) is not None
    return 0 if keyless else settings.ledger.cache_bytes
