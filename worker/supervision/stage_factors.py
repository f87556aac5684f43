"""Factors of an earlier job, laid out for the child of a later one.

They are brought, each verified, from the store into one folder inside the later attempt's, so that
they stay if the earlier job is deleted meanwhile.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from catalog.frames import Failed
from jobs.objects.artifacts import ArtifactFolder
from jobs.records import Claim
from jobs.repository.results import list_artifacts
from jobs.repository.store import read_job

_FACTORS = "factors/"
_INDEX = "factors/factors.index.json"


class FactorsUnavailable(Exception):
    """The document names factors that cannot be had; `failure` says it to the caller."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.failure = Failed(
            category="usage",
            code="factors_unavailable",
            message=message,
            pointer="/factors/job",
            layer=None,
            detail=None,
        )


def lay_out_factors(engine: Engine, folder: ArtifactFolder, claim: Claim) -> Path | None:
    """Return a folder with the factors that the claim's document names.

    Args:
        engine: The ledger's connections.
        folder: The folder or bucket of the artifacts.
        claim: The job.

    Returns:
        The folder; None where the document names no job's factors.

    Raises:
        FactorsUnavailable: If there is no such job, it has not succeeded, or it kept no factors.
        ArtifactDamaged: If a file is not what was recorded.
    """
    reference: Mapping[str, Any] = claim.document.get("factors") or {}
    earlier_id = reference.get("job")
    if earlier_id is None:
        return None
    earlier = read_job(engine, claim.tenant_id, str(earlier_id))
    if earlier is None:
        raise FactorsUnavailable("names no job of yours; give the id of a job that kept its factors")
    if earlier.state != "succeeded":
        raise FactorsUnavailable(f"names a job that is {earlier.state}; give one that has succeeded")
    files = [each for each in list_artifacts(engine, claim.tenant_id, earlier.id) if each.name.startswith(_FACTORS)]
    if not any(each.name == _INDEX for each in files):
        raise FactorsUnavailable("names a job that kept no factors; run it again with `keep: [factors]`")
    place = folder.attempt_dir(claim.job_id, claim.fence) / "input"
    for each in files:
        target = place / each.name
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.fetch(each, target)
    return place / "factors"
