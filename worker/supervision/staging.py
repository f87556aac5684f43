"""Staging: what a claim's document and its earlier pieces name, laid out for the child of one attempt.

::

    <attempt>/input, against, extended/…     factors of earlier jobs
    <attempt>/uploads/model/…                an upload, by the block that names it
    <attempt>/pieces/collect-0/factors/…     the artifacts of one finished piece, by their names
    <attempt>/divided/…                      those that the divided job itself has written so far

All are brought, each verified, from the store, so that they stay if the earlier job is deleted meanwhile. A divided
job's own later attempts get the pieces of all rounds; a piece gets those of the rounds before its own.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Engine

from catalog.record import plain
from catalog.requests.assignment import ExtendedJob, FinishedPiece
from catalog.requests.pieces import ROUNDS, read_piece
from jobs.errors import ArtifactDamaged
from jobs.objects.artifacts import ArtifactFolder, object_key
from jobs.objects.uploads import Uploads
from jobs.records import Artifact, Claim
from jobs.repository.extended_documents import first_extended
from jobs.repository.pieces import PieceJob, read_pieces
from jobs.repository.results import list_artifacts
from jobs.repository.store import read_job
from jobs.scheduling.parallel_places import count_places
from worker.process.crash import failure_frame

_FACTORS = "factors/"
_INDEX = "factors/factors.index.json"
DAMAGED = "artifact_damaged"
"""The code of a failure for a file that the store has lost, or has other bytes of."""


class FactorsUnavailable(Exception):
    """The document names factors that cannot be had; `failure` says it to the caller."""

    def __init__(self, message: str, pointer: str, field: str = "job", code: str = "factors_unavailable") -> None:
        super().__init__(message)
        category: Literal["fatal", "usage"] = "fatal" if code == DAMAGED else "usage"
        self.failure = failure_frame(category, code, message, f"{pointer}/{field}")


def lay_out(engine: Engine, folder: ArtifactFolder, claim: Claim) -> dict[str, Any]:
    """Lay out all that an attempt reads of earlier jobs, and name it by fields of the assignment."""
    factors = _lay_out_factors(engine, folder, claim)
    return factors | _lay_out_pieces(engine, folder, claim) | lay_out_uploads(engine, folder, claim, factors["extends"])


def _lay_out_factors(engine: Engine, folder: ArtifactFolder, claim: Claim) -> dict[str, Any]:
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
    return {
        "factors_path": first,
        "against_path": None if against is None else second,
        "extends": _extended(engine, folder, claim, place / "extended"),
    }


def _extended(engine: Engine, folder: ArtifactFolder, claim: Claim, place: Path) -> ExtendedJob | None:
    """The job whose collection the document extends; its options are those of the first of a chain."""
    extended_id = _named(claim.document.get("extends"))
    path = _lay_out(engine, folder, claim, extended_id, (place, "/extends"))
    earlier = None if extended_id is None else read_job(engine, claim.tenant_id, extended_id)
    if path is None or earlier is None:
        return None
    manifest, first = earlier.manifest or {}, first_extended(engine, claim.tenant_id, earlier)
    if first is None:
        raise FactorsUnavailable(
            "names a job that extends another which is deleted, and with it what says how both were collected; "
            "collect all of the data in one job",
            "/extends",
        )
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
    try:
        _bring(folder, files, place)
    except ArtifactDamaged as error:
        raise FactorsUnavailable(
            f"names a job of which {error}; run that job again with `keep: [factors]`, and name the new one",
            pointer,
            code=DAMAGED,
        ) from error
    return place / "factors"


def _lay_out_pieces(engine: Engine, folder: ArtifactFolder, claim: Claim) -> dict[str, Any]:
    """Lay out what the earlier rounds of a divided job have left, and name it."""
    pieces = _earlier(engine, claim)
    place = folder.attempt_dir(claim.job_id, claim.fence)
    told = [_lay_out_piece(engine, folder, claim, each, place / "pieces") for each in pieces]
    divided = None
    if pieces:
        divided = place / "divided"
        _bring(folder, list_artifacts(engine, claim.tenant_id, claim.parent_id or claim.job_id), divided)
    chooses = claim.document.get("shards") is not None and claim.piece is None
    return {
        **({"devices": count_places(engine, claim.job_id)} if chooses else {}),
        "piece": None if claim.piece is None else read_piece(claim.piece),
        "pieces": tuple(told),
        "divided": divided,
    }


def _earlier(engine: Engine, claim: Claim) -> tuple[PieceJob, ...]:
    """The finished pieces of the rounds before this attempt."""
    if claim.parent_id is None and claim.fence == 1:
        return ()  # its first attempt: it is not divided yet
    pieces = read_pieces(engine, claim.tenant_id, claim.parent_id or claim.job_id)
    if claim.piece is None:
        return pieces
    # all pieces of an earlier round have succeeded before one of the next was made
    own = str(claim.piece["round"])
    rounds = {each.piece.round for each in pieces if each.piece.round != own and _is_over(pieces, each.piece.round)}
    return tuple(each for each in pieces if each.piece.round in rounds)


def _is_over(pieces: tuple[PieceJob, ...], name: str) -> bool:
    return name in ROUNDS and all(each.state == "succeeded" for each in pieces if each.piece.round == name)


def _lay_out_piece(
    engine: Engine, folder: ArtifactFolder, claim: Claim, finished: PieceJob, place: Path
) -> FinishedPiece:
    path = place / f"{finished.piece.round}-{finished.piece.index}"
    layers = None if claim.piece is None else claim.piece.get("layers")
    files = list_artifacts(engine, claim.tenant_id, finished.id)
    _bring(folder, files, path, None if layers is None else frozenset(layers))
    return FinishedPiece(
        piece=finished.piece,
        job=finished.id,
        path=path,
        model_sha256=finished.model_sha256,
        data_sha256=finished.data_sha256,
        examples=finished.examples,
    )


def _bring(
    folder: ArtifactFolder, files: Iterable[Artifact], place: Path, layers: frozenset[str] | None = None
) -> None:
    """Bring files of a job into a folder, which is there even where the job has none; of factors, some layers'."""
    place.mkdir(parents=True, exist_ok=True)
    unneeded: frozenset[str] = frozenset()
    # tables first: they say which file is whose
    for each in sorted(files, key=lambda file: not file.name.endswith(".json")):
        if each.name in unneeded:
            continue
        target = place / each.name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.fetch(each, target)
        except ArtifactDamaged as error:
            state = "has changed in" if folder.store.has(each.uri, each.size_bytes) else "is missing or cut off in"
            raise ArtifactDamaged(f"the file {each.name} {state} the service's store") from error
        if each.name == _INDEX and layers is not None:
            unneeded = files_of_others(json.loads(target.read_bytes()), layers)


def files_of_others(index: Mapping[str, Any], layers: frozenset[str]) -> frozenset[str]:
    """Return the files of factors that a piece of the round `decompose` does not read."""
    if (index.get("collection") or {}).get("batch_variance"):
        return frozenset()
    entries = index.get("layers") or ()
    # a head and a table of one weight are joined when the sets are opened
    wanted = [each for each in entries if each["name"] in layers or (each.get("sums") or {}).get("tied") is not None]
    kept = {each["ordinal"] for each in wanted} | {each["shared_A_with"] for each in wanted}
    return frozenset(f"factors/{each['ordinal']}.safetensors" for each in entries if each["ordinal"] not in kept)


def lay_out_uploads(
    engine: Engine, folder: ArtifactFolder, claim: Claim, extended: ExtendedJob | None = None
) -> dict[str, Path]:
    """Lay out the uploads that a claim computes with, each file verified, by fields of the assignment.

    They are those of its document, and the model of the job that it extends.
    """
    fields: dict[str, Path] = {}
    asked = claim.document["kind"]  # the claim's own kind is another for an estimate
    kinds = [asked] if isinstance(asked, str) else asked
    options = [(f"{kind}/query", (claim.document.get(kind) or {}).get("query")) for kind in kinds]
    own = [(block, claim.document.get(block)) for block in ("model", "data")]
    earlier = [] if extended is None else [("extends/model", extended.document.get("model"))]
    named = [*own, *options, *earlier]
    for pointer, source in named:
        if not isinstance(source, Mapping) or source.get("source") != "upload":
            continue
        block = pointer.rpartition("/")[2]
        uploads = Uploads(engine, folder, claim.tenant_id)
        upload = uploads.find(str(source["id"]))
        what, where = ("an upload", (f"/{pointer}", "id"))
        if pointer == "extends/model":
            what, where = ("a job with a model", ("/extends", "job"))
        if upload is None or not upload.complete:
            raise FactorsUnavailable(f"names {what} that is deleted; upload it again", *where, "not_found")
        place = fields[f"{block}_path"] = folder.attempt_dir(claim.job_id, claim.fence) / "uploads" / block
        for each in upload.files:
            (place / each.name).parent.mkdir(parents=True, exist_ok=True)
            key = object_key(claim.tenant_id, each.sha256)
            try:
                folder.store.fetch(key, place / each.name, sha256=each.sha256, size_bytes=each.size_bytes)
            except ArtifactDamaged as error:
                state = "is missing or cut off in"
                # one that this machine does not find may still be where the API looks as it is declared again
                if folder.store.has(key, each.size_bytes):
                    state = "has changed in"
                    uploads.forget(upload.id, each.name)
                message = f"names {what} whose file {each.name}, of upload {upload.id}, {state} the service's store"
                raise FactorsUnavailable(f"{message}; send it again (`submit --upload`)", *where, DAMAGED) from error
    return fields
