"""The assignment of a child: one JSON object on its standard input, written by its parent and read by the child."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from catalog.record import option, record
from catalog.record_reader import Reader
from catalog.requests.pieces import DecomposeRound, Piece

_MAX_BYTES = 16 * 2**20


@record
class Allowed:
    """Code and folders of the machine that a document may name."""

    factories: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()


@record
class FinishedPiece:
    """A piece of a divided job that a child job has computed."""

    piece: Piece
    job: str
    """Id of the child job, or the name of its folder in a foreground run."""
    path: Path
    """The folder with its artifacts."""
    model_sha256: str | None = None
    """Digest of the model that it measured; None in a round over layers."""
    data_sha256: str | None = None
    """Digest of its examples."""
    examples: int | None = None
    """How many it has."""


@record
class ExtendedJob:
    """The job whose collection is extended, where the parent knows it: in a service, by its id."""

    path: Path
    """The folder with its factors."""
    document: Mapping[str, Any]
    """The document that says what was collected: of a job that extends another, the first one's."""
    model_sha256: str | None = None
    """Digest of the model that it measured."""
    data_sha256: str | None = None
    """Digest of its data."""


@record
class Assignment:
    """One job, one attempt."""

    document: Any
    """The document as it was sent: the child judges it."""
    artifacts: Path
    """Where artifacts go."""
    store: Path = option(lambda: Path.home() / ".cache" / "kronoscope")
    """The model store."""
    completed: tuple[tuple[Any, ...], ...] = ()
    """Kind and ordinal of each row that stands already."""
    threads: int | None = None
    """Computing threads; None takes those of the plan, else torch's own number."""
    choose_threads: bool = False
    """Whether a first attempt may take fewer of them, where this machine computes faster so."""
    plan: Mapping[str, Any] | None = None
    """The plan of the first attempt of the job, or of the job that this is a piece of."""
    paths: tuple[Path, ...] = ()
    allowed: Allowed = option(Allowed)
    offline: bool = True
    factors_path: Path | None = None
    against_path: Path | None = None
    """The folder of the factors that a comparison names, where the parent laid it out."""
    model_path: Path | None = None
    """The folder of an upload that the document names as its model."""
    data_path: Path | None = None
    """The same of its data."""
    query_path: Path | None = None
    """The same of the query of an influence."""
    cache: Path | None = None
    """The folder in which the parent lays out cached factors that it is asked for; None where it has none."""
    cache_bytes: int = 0
    """What the cache may hold."""
    scratch: Path
    """Where finished factors wait, and checkpoints stand, for this attempt and the next."""
    earlier: tuple[Path, ...] = ()
    """The same of earlier attempts, the newest first."""
    checkpoint_seconds: float = 0
    """Between two checkpoints; 0 makes none."""
    estimate: bool = False
    """Plan the job, and do nothing of it."""
    device: Literal["cpu", "cuda"] | None = None
    """What an estimate is planned for; None is what this machine computes on."""
    bounds: Mapping[str, int] = option(dict)
    """Fields of the memory budget that was leased for it: more may be free, and is others'."""
    leased: str | None = None
    """The kind of device that was; None where nobody leases."""
    piece: Piece | None = None
    """The part of a divided job that this child job computes; None of a job that has no parent."""
    pieces: tuple[FinishedPiece, ...] = ()
    """What the earlier rounds of the divided job have computed, in the order of rounds and pieces."""
    devices: int = 1
    """Devices that may take pieces of this job, as far as the parent knows; how it is divided depends on them."""
    decompose_round: DecomposeRound = "auto"
    """Whether decompositions of a divided job are divided too."""
    extends: ExtendedJob | None = None
    """The job that the document extends by its id; None where it names a folder, or none."""
    divided: Path | None = None
    """The folder with the artifacts that the divided job itself has written so far; None before the first round."""

    @property
    def numerics(self) -> dict[str, Any] | None:
        """Numerics that the first attempt computed with."""
        return (self.plan or {}).get("numerics")


def read_assignment(raw: bytes) -> Assignment:
    """Read the assignment that the parent wrote."""
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"an assignment of {len(raw):,} bytes; at most {_MAX_BYTES:,} are read")
    try:
        stated = {name: value for name, value in json.loads(raw).items() if value is not None}
        stated.setdefault("scratch", Path(stated["artifacts"]) / ".waiting")
    except (KeyError, TypeError, AttributeError) as error:
        message = f"not an assignment: {error!r}"
        raise ValueError(message) from error
    return Reader(strict=False).read(Assignment, stated, "")  # type: ignore[no-any-return] # by its annotation
