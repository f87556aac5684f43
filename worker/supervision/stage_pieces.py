"""The pieces of a divided job, laid out for the attempt that goes on with them.

::

    <attempt>/pieces/collect-0/factors/…     the artifacts of one finished piece, by their names
    <attempt>/divided/…                      those that the divided job itself has written so far

The job's own later attempts get the pieces of all rounds; a piece gets those of the rounds before its own. They are
brought, each verified, as the factors of an earlier job are.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from catalog.requests.assignment import FinishedPiece
from catalog.requests.pieces import ROUNDS, read_piece
from jobs.objects.artifacts import ArtifactFolder
from jobs.records import Claim
from jobs.repository.pieces import PieceJob, read_pieces
from jobs.repository.results import list_artifacts
from jobs.scheduling.parallel_places import count_places

_INDEX = "factors/factors.index.json"


def lay_out_pieces(engine: Engine, folder: ArtifactFolder, claim: Claim) -> dict[str, Any]:
    """Lay out what the earlier rounds of a divided job have left, and name it."""
    pieces = _earlier(engine, claim)
    place = folder.attempt_dir(claim.job_id, claim.fence)
    told = [_lay_out_piece(engine, folder, claim, each, place / "pieces") for each in pieces]
    divided = None
    if pieces:
        divided = place / "divided"
        _bring(engine, folder, claim, claim.parent_id or claim.job_id, divided)
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
    _bring(engine, folder, claim, finished.id, path, None if layers is None else frozenset(layers))
    return FinishedPiece(
        piece=finished.piece,
        job=finished.id,
        path=path,
        model_sha256=finished.model_sha256,
        data_sha256=finished.data_sha256,
        examples=finished.examples,
    )


def _bring(
    engine: Engine,
    folder: ArtifactFolder,
    claim: Claim,
    job_id: str,
    place: Path,
    layers: frozenset[str] | None = None,
) -> None:
    """Bring all files of a job into a folder, which is there even where the job has none; of factors, some layers'."""
    place.mkdir(parents=True, exist_ok=True)
    files = list_artifacts(engine, claim.tenant_id, job_id)
    unneeded: frozenset[str] = frozenset()
    # tables first: they say which file is whose
    for each in sorted(files, key=lambda file: not file.name.endswith(".json")):
        if each.name in unneeded:
            continue
        target = place / each.name
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.fetch(each, target)
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
