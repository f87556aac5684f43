"""The assignment of a child: one JSON object on its standard input."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from catalog.requests.pieces import DecomposeRound, Piece, read_piece
from engine.memory.budget import MemoryBudget
from engine.memory.plan import Chosen

_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class FinishedPiece:
    """A piece of a divided job that a child job has computed."""

    piece: Piece
    job: str
    """Id of the child job, or the name of its folder in a foreground run."""
    path: Path
    """The folder with its artifacts."""
    model_sha256: str | None
    """Digest of the model that it measured; None in a round over layers."""
    data_sha256: str | None
    """Digest of its examples."""
    examples: int | None
    """How many it has."""


@dataclass(frozen=True, kw_only=True)
class ExtendedJob:
    """The job whose collection is extended, where the parent knows it: in a service, by its id."""

    path: Path
    """The folder with its factors."""
    document: dict[str, Any]
    """The document that says what was collected: of a job that extends another, the first one's."""
    model_sha256: str | None
    """Digest of the model that it measured."""
    data_sha256: str | None
    """Digest of its data."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One job, one attempt."""

    document: dict[str, Any]
    artifacts: Path
    """Where artifacts go."""
    store: Path
    """The model store."""
    completed: frozenset[tuple[str, int]]
    threads: int | None
    chosen: Chosen | None
    """What the first attempt's plan chose."""
    plan: Mapping[str, Any] | None
    """The plan of the first attempt of the job, or of the job that this is a piece of."""
    numerics: dict[str, Any] | None
    """What it computed with."""
    paths: tuple[Path, ...]
    factories: tuple[str, ...]
    directories: tuple[str, ...]
    offline: bool
    factors_path: Path | None
    against_path: Path | None
    """The folder of the factors that a comparison names, where the parent laid it out."""
    cache: Path | None
    """The folder in which the parent lays out cached factors that it is asked for; None where it has none."""
    cache_bytes: int
    """What the cache may hold."""
    scratch: Path
    """Where finished factors wait, and checkpoints stand, for this attempt and the next."""
    earlier: tuple[Path, ...]
    """The same of earlier attempts, the newest first."""
    checkpoint_seconds: float
    """Between two checkpoints; 0 makes none."""
    estimate: bool
    """Plan the job, and do nothing of it."""
    device: Literal["cpu", "cuda"] | None
    """What an estimate is planned for; None is what this machine computes on."""
    bounds: MemoryBudget
    """What was leased for it: more may be free, and is others'."""
    leased: str | None
    """The kind of device that was; None where nobody leases."""
    piece: Piece | None
    """The part of a divided job that this child job computes; None of a job that has no parent."""
    pieces: tuple[FinishedPiece, ...]
    """What the earlier rounds of the divided job have computed, in the order of rounds and pieces."""
    devices: int
    """Devices that may take pieces of this job, as far as the parent knows; how it is divided depends on them."""
    decompose_round: DecomposeRound
    """Whether decompositions of a divided job are divided too."""
    extends: ExtendedJob | None
    """The job that the document extends by its id; None where it names a folder, or none."""
    divided: Path | None
    """The folder with the artifacts that the divided job itself has written so far; None before the first round."""


def read_assignment(raw: bytes) -> Assignment:
    """Read the assignment that the parent wrote."""
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"an assignment of {len(raw):,} bytes; at most {_MAX_BYTES:,} are read")
    try:
        value = json.loads(raw)
        allowed = value.get("allowed") or {}
        factors_path, against_path = value.get("factors_path"), value.get("against_path")
        artifacts = Path(value["artifacts"])
        return Assignment(
            document=value["document"],
            artifacts=artifacts,
            store=Path(value.get("store") or Path.home() / ".cache" / "kronoscope"),
            completed=frozenset((str(kind), int(ordinal)) for kind, ordinal in value.get("completed") or ()),
            threads=value.get("threads"),
            chosen=Chosen.read(value["plan"]) if value.get("plan") else None,
            plan=value.get("plan") or None,
            numerics=(value.get("plan") or {}).get("numerics"),
            paths=tuple(Path(path) for path in value.get("paths") or ()),
            factories=tuple(allowed.get("factories") or ()),
            directories=tuple(allowed.get("directories") or ()),
            offline=bool(value.get("offline", True)),
            factors_path=Path(factors_path) if factors_path else None,
            against_path=Path(against_path) if against_path else None,
            cache=Path(value["cache"]) if value.get("cache") else None,
            cache_bytes=int(value.get("cache_bytes") or 0),
            scratch=Path(value.get("scratch") or artifacts / ".waiting"),
            earlier=tuple(Path(path) for path in value.get("earlier") or ()),
            checkpoint_seconds=float(value.get("checkpoint_seconds") or 0),
            estimate=bool(value.get("estimate", False)),
            device=value.get("device"),
            leased=value.get("leased"),
            bounds=replace(MemoryBudget.unlimited(), **(value.get("bounds") or {})),
            piece=read_piece(value["piece"]) if value.get("piece") else None,
            pieces=tuple(_finished_piece(each) for each in value.get("pieces") or ()),
            extends=_extended_job(value["extends"]) if value.get("extends") else None,
            devices=int(value.get("devices") or 1),
            decompose_round=_decompose_round(value.get("decompose_round") or "auto"),
            divided=Path(value["divided"]) if value.get("divided") else None,
        )
    except (KeyError, TypeError, AttributeError) as error:
        message = f"not an assignment: {error!r}"
        raise ValueError(message) from error


def _decompose_round(value: str) -> DecomposeRound:
    if value not in get_args(DecomposeRound):
        raise ValueError(f"`decompose_round` must be one of {', '.join(get_args(DecomposeRound))} (got {value!r})")
    return value  # type: ignore[return-value] # one of its words


def _finished_piece(value: dict[str, Any]) -> FinishedPiece:
    return FinishedPiece(
        piece=read_piece(value["piece"]),
        job=str(value["job"]),
        path=Path(value["path"]),
        model_sha256=value.get("model_sha256"),
        data_sha256=value.get("data_sha256"),
        examples=value.get("examples"),
    )


def _extended_job(value: dict[str, Any]) -> ExtendedJob:
    return ExtendedJob(
        path=Path(value["path"]),
        document=value["document"],
        model_sha256=value.get("model_sha256"),
        data_sha256=value.get("data_sha256"),
    )
