"""Read digests: what each piece has read of the data, so that pieces that were given other data are recognised.

A piece reads the data from the beginning, and drops what comes before its own examples. SHA-256 over all batches up to
where it begins must be that of the piece before it up to where that one ended::

    before(0) = SHA-256 of nothing        before(k) = after(k − 1)

So a source that shuffles anew in each process, or changes meanwhile, ends the job: some examples would be counted twice
and others never. A piece of a later round must have read what the piece of the first round with its place has. A piece
of the round `score` has these digests of its queries, and must have read all the data that the first round has.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from catalog.requests.assignment import FinishedPiece
from engine.model.batches import Batch
from worker.execution.factor_cache import enter_tree
from worker.execution.files.artifact_files import ArtifactFiles
from worker.execution.refusal import Refusal

FILE = "factors/read.json"
"""File in which a piece leaves its digests, and the notes of its loaders."""
_NOTES = "notes"


class ReadDigests:
    """The digests of the first pass of one piece that came to the piece's end."""

    def __init__(self) -> None:
        self.before: str | None = None
        """Digest of the batches before the piece."""
        self.after: str | None = None
        """Digest of those and the piece's own."""
        self.queries: int | None = None
        """Queries of an analysis with a round of its own: all, as the first round counts them, or the piece's."""
        self.data: ReadDigests | None = None
        """Those of all the data, of a piece that has a part of the queries."""

    def watch(self, batches: Iterator[Batch], begin: int, end: int) -> Iterator[Batch]:
        """Pass on the batches of a pass, and take their digests until a pass has come to the end of the piece."""
        digest, position = hashlib.sha256() if self.after is None else None, 0
        for batch in batches:
            if digest is not None:
                if position == begin:
                    self.before = digest.hexdigest()
                enter_tree(digest, (batch.inputs, batch.targets, batch.index))
                position += batch.size
                if position == end:
                    self.after = digest.hexdigest()
            yield batch

    def as_json(self, notes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the digests for the piece's file, beside the notes of its loaders."""
        data = None if self.data is None else self.data.after
        return {"before": self.before, "after": self.after, "queries": self.queries, "data": data, _NOTES: notes}


def count_queries(pieces: Sequence[FinishedPiece]) -> int:
    """Return how many queries the first piece of a job has counted."""
    return int(_read(pieces[0], "queries"))


def read_notes(pieces: Sequence[FinishedPiece]) -> Mapping[str, Any]:
    """Return the notes of a job's loaders, which are those of its first piece; none of a piece without any."""
    first = next(each for each in pieces if each.piece.round == "collect")
    found: Mapping[str, Any] = ArtifactFiles(first.path, None).load_json(FILE).get(_NOTES, {})
    return found


def require_one_pass(pieces: Sequence[FinishedPiece], what: str = "example", pointer: str = "/data") -> None:
    """Require that all pieces of a round have read the same examples, or queries, in the same order."""
    reached, last = "", None
    for each in pieces:
        before, after = _read(each, "before"), _read(each, "after")
        # one that does not follow the other is for the merge to find
        if last is not None and last.piece.end == each.piece.begin and before != reached:
            raise Refusal(
                f"are not the same in every piece: up to {what} {each.piece.begin}, {last.piece.title} of round "
                f"`{each.piece.round}` read data of the digest {reached}, and {each.piece.title} {before}; a source "
                "must give the same examples in the same order every time: seed what it shuffles by, and change no "
                "file while the job runs",
                pointer=pointer,
                code="data_differ",
            )
        reached, last = after, each


def require_same_pieces(first: Sequence[FinishedPiece], later: Sequence[FinishedPiece]) -> None:
    """Require that pieces of a later round have read what those of the first have; of `score` each all of the data."""
    for one, other in zip(first, later, strict=False):
        before, after = _read(one, "after"), _read(other, "data" if other.piece.round == "score" else "after")
        if before != after:
            raise Refusal(
                f"are not the same in every round: up to example {one.piece.end}, {one.piece.title} read data of the "
                f"digest {before} in round `{one.piece.round}`, and {after} in round `{other.piece.round}`; a source "
                "must give the same examples in the same order every time",
                pointer="/data",
                code="data_differ",
            )


def _read(piece: FinishedPiece, name: str) -> str:
    try:
        return str(ArtifactFiles(piece.path, None).load_json(FILE)[name])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(
            f"cannot be told to be the same in every piece: {piece.piece.title} of round `{piece.piece.round}` did not "
            "leave what it read, as one of an earlier version; submit the job again",
            pointer="/data",
            code="data_differ",
        ) from error
