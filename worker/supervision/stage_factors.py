"""Factors of earlier jobs, and uploads, laid out for the child of a later one.

They are brought, each verified, from the store into one folder inside the later attempt's, so that
they stay if the earlier job is deleted meanwhile.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from catalog.frames import Failed
from catalog.record import plain
from catalog.requests.assignment import ExtendedJob
from jobs.objects.artifacts import ArtifactFolder, object_key
from jobs.objects.uploads import Uploads
from jobs.records import Claim
from jobs.repository.results import list_artifacts
from jobs.repository.store import read_job

_FACTORS = "factors/"
_INDEX = "factors/factors.index.json"


class FactorsUnavailable(Exception):
    """The document names factors that cannot be had; `failure` says it to the caller."""

    def __init__(self, message: str, pointer: str, field: str = "job", code: str = "factors_unavailable") -> None:
        super().__init__(message)
        self.failure = Failed(
            category="usage",
            code=code,
            message=message,
            pointer=f"{pointer}/{field}",
            layer=None,
            detail=None,
        )


@dataclass(frozen=True, kw_only=True)
class LaidOutFactors:
    """Folders with the factors of the earlier jobs that a document names; None where it names none."""

    factors: Path | None = None
    """Folder of `factors`."""
    against: Path | None = None
    """Folder of `compare_curvature.against`."""
    extends: ExtendedJob | None = None


def lay_out_factors(engine: Engine, folder: ArtifactFolder, claim: Claim) -> LaidOutFactors:
    """Lay out the factors of the jobs that the claim's document names; a job named twice is laid out once."""
    document = claim.document
    factors = _named(document.get("factors"))
    of_kinds = ((kind, _named((document.get(kind) or {}).get("against"))) for kind in claim.kinds)
    comparing, against = next(((kind, job) for kind, job in of_kinds if job is not None), ("", None))
    place = folder.attempt_dir(claim.job_id, claim.fence)
    first = _lay_out(engine, folder, claim, factors, (place / "input", "/factors"))
    second = first
    if against != factors:
        second = _lay_out(engine, folder, claim, against, (place / "against", f"/{comparing}/against"))
    return LaidOutFactors(
        factors=first,
        against=None if against is None else second,
        extends=_extended(engine, folder, claim, place / "extended"),
    )


def _extended(engine: Engine, folder: ArtifactFolder, claim: Claim, place: Path) -> ExtendedJob | None:
    """The job whose collection the document extends; its options are those of the first of a chain."""
    extended_id = _named(claim.document.get("extends"))
    path = _lay_out(engine, folder, claim, extended_id, (place, "/extends"))
    earlier = None if extended_id is None else read_job(engine, claim.tenant_id, extended_id)
    if path is None or earlier is None:
        return None
    manifest, first = earlier.manifest or {}, earlier
    while (before := _named(first.document.get("extends"))) is not None:
        found = read_job(engine, claim.tenant_id, before)
        if found is None:
            raise FactorsUnavailable(
                "names a job that extends another which is deleted, and with it what says how both were collected; "
                "collect all of the data in one job",
                "/extends",
            )
        first = found
    digests = {name: manifest.get(name) for name in ("model_sha256", "data_sha256")}
    return ExtendedJob(path=path, document=plain(first.document), **digests)


def _named(reference: Mapping[str, Any] | None) -> str | None:
    """The job that a reference names."""
    named = (reference or {}).get("job")
    return None if named is None else str(named)


def _lay_out(
    engine: Engine, folder: ArtifactFolder, claim: Claim, earlier_id: str | None, where: tuple[Path, str]
) -> Path | None:
    """The factors of one job, for one field of the document."""
    place, pointer = where
    if earlier_id is None:
        return None
    earlier = read_job(engine, claim.tenant_id, earlier_id)
    if earlier is None:
        raise FactorsUnavailable("names no job of yours; give the id of a job that kept its factors", pointer)
    if earlier.state != "succeeded":
        raise FactorsUnavailable(f"names a job that is {earlier.state}; give one that has succeeded", pointer)
    files = [each for each in list_artifacts(engine, claim.tenant_id, earlier.id) if each.name.startswith(_FACTORS)]
    if not any(each.name == _INDEX for each in files):
        raise FactorsUnavailable("names a job that kept no factors; run it again with `keep: [factors]`", pointer)
    for each in files:
        target = place / each.name
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.fetch(each, target)
    return place / "factors"


def lay_out_uploads(engine: Engine, folder: ArtifactFolder, claim: Claim) -> dict[str, Path]:
    """Lay out the uploads that the claim's document names, each file verified, by fields of the assignment."""
    fields: dict[str, Path] = {}
    asked = claim.document["kind"]  # the claim's own kind is another for an estimate
    kinds = [asked] if isinstance(asked, str) else asked
    options = [(f"{kind}/query", (claim.document.get(kind) or {}).get("query")) for kind in kinds]
    named = [*((block, claim.document.get(block)) for block in ("model", "data")), *options]
    for pointer, source in named:
        if not isinstance(source, Mapping) or source.get("source") != "upload":
            continue
        block = pointer.rpartition("/")[2]
        upload = Uploads(engine, folder, claim.tenant_id).find(str(source["id"]))
        if upload is None or not upload.complete:
            raise FactorsUnavailable(
                "names an upload that is deleted; upload it again", f"/{pointer}", "id", "not_found"
            )
        place = fields[f"{block}_path"] = folder.attempt_dir(claim.job_id, claim.fence) / "uploads" / block
        for each in upload.files:
            (place / each.name).parent.mkdir(parents=True, exist_ok=True)
            key = object_key(claim.tenant_id, each.sha256)
            folder.store.fetch(key, place / each.name, sha256=each.sha256, size_bytes=each.size_bytes)
    return fields
