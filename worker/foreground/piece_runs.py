"""The pieces of a divided job in the foreground: one child after another, each in a folder below ``.pieces/``.

A piece that has ended leaves ``piece.json`` beside its artifacts, so a killed run goes on with the next one, and with
the checkpoint of the one that was under way. Every piece follows the plan of the job's first attempt: what it computes
does not depend on what was free when its turn came.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from catalog.frames import (
    ArtifactWritten,
    CacheAnswer,
    CacheAsked,
    Divided,
    Failed,
    Finished,
    Frame,
    LogLine,
    Progress,
    Stopped,
)
from catalog.record import plain
from catalog.record_reader import read
from catalog.requests.assignment import Assignment, FinishedPiece
from catalog.requests.pieces import Piece, read_piece
from worker.foreground.child_run import trouble
from worker.foreground.output_folder import OutputFolder, replace_whole, require_artifact
from worker.process.attended_child import Last, Sink
from worker.process.crash import BROKEN_CHILD, failure_frame

_RECORD = "piece.json"

Attempt = Callable[[Assignment, Sink], Last | Divided]
"""Runs one child by its assignment, and hands its frames over."""


class PieceRuns:
    """The rounds of one job."""

    def __init__(self, folder: OutputFolder, assignment: Assignment, attempt: Attempt) -> None:
        """Set up the rounds; nothing runs before ``run``."""
        self._folder = folder
        self._assignment = assignment
        self._attempt = attempt

    def run(self) -> Failed | Stopped | None:
        """Compute every piece that has not ended yet, in the order of rounds and pieces."""
        for place, each in enumerate(self._folder.pieces):
            piece = read_piece(each)
            if self._record(piece) is not None:
                continue
            # those of its own round are under way
            known = [other for other in self._folder.pieces[:place] if other["round"] != piece.round]
            last = self._compute(piece, known)
            if isinstance(last, Failed):
                return replace(last, message=f"{piece.title} of round `{piece.round}`: {last.message}")
            if isinstance(last, Stopped):
                return last
        return None

    def finished(self) -> dict[str, Any]:
        """Return what the job's next attempt is given of its pieces; nothing before the first division."""
        return self._known(self._folder.pieces)

    def _known(self, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        if not pieces:
            return {}
        records = (self._record(read_piece(each)) for each in pieces)
        return {"pieces": tuple(filter(None, records)), "divided": self._folder.artifacts}

    def _compute(self, piece: Piece, known: list[dict[str, Any]]) -> Failed | Stopped | None:
        place = self._place(piece)
        artifacts = place / "artifacts"
        try:
            if artifacts.exists():
                shutil.rmtree(artifacts)
            artifacts.mkdir(parents=True)
        except OSError as error:
            return trouble(error)
        assignment = replace(
            self._assignment,
            **self._known(known),
            piece=piece,
            artifacts=artifacts,
            scratch=place / "scratch",
            plan=self._folder.plan,
        )

        last = self._attempt(assignment, partial(self._take, piece, artifacts))
        if isinstance(last, Divided):
            message = f"{piece.title} was divided itself, which no piece may be"
            return failure_frame("fatal", BROKEN_CHILD, message)
        if isinstance(last, Finished):
            try:
                self._write(piece, last)
            except OSError as error:
                return trouble(error)
            return None
        return last

    def _take(self, piece: Piece, artifacts: Path, frame: Frame, answer: Callable[[CacheAnswer], None]) -> None:
        if isinstance(frame, ArtifactWritten):
            require_artifact(artifacts, frame)
        elif isinstance(frame, LogLine):
            self._folder.echo(replace(frame, message=f"{piece.title}: {frame.message}"))
        elif isinstance(frame, Progress):
            self._folder.echo(frame)
        elif isinstance(frame, CacheAsked):
            answer(CacheAnswer(job=None))  # no piece is cached

    def _place(self, piece: Piece) -> Path:
        return self._folder.piece_folders / f"{piece.round}-{piece.index}"

    def _record(self, piece: Piece) -> FinishedPiece | None:
        """Return the record of the piece's end; None where it has not ended, or another piece stands in its place."""
        try:
            record: FinishedPiece = read(FinishedPiece, json.loads((self._place(piece) / _RECORD).read_bytes()), "")
        except (OSError, ValueError):
            return None
        return record if record.piece == piece else None

    def _write(self, piece: Piece, last: Finished) -> None:
        place = self._place(piece)
        digests = {"model_sha256": last.model_sha256, "data_sha256": last.data_sha256}
        record = FinishedPiece(piece=piece, job=place.name, path=place / "artifacts", examples=last.examples, **digests)
        replace_whole(place / _RECORD, json.dumps(plain(record)).encode())
