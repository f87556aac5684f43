"""The progress of a divided job: the sum over the pieces of its round, written while they compute.

done = Σ size(piece) · share(piece),  total = Σ size(piece),  size = examples, layers or queries of the piece

Children write their own progress several times a second, and there may be thousands of them: the parent's row is
written once a second at the most, by whichever child comes first, from the rows of those that run, and from what the
parent has noted of those that have succeeded. It is for the eyes alone, so nothing is fenced, and what is lost comes
with the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, Row, and_, or_, select

from catalog.requests.pieces import Piece, read_piece
from jobs.lifecycle import HELD, State
from jobs.queue.fence import append_event, change, draw
from jobs.records import Claim
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import jobs

_EVERY_SECONDS = 1.0
_SUCCEEDED = "succeeded"
"""The field in which a parent's progress notes the units of pieces that have succeeded; it is never shown."""
_SPANS = {"collect": (0.0, 60.0), "decompose": (60.0, 70.0), "score": (70.0, 95.0)}
_SPANS_OF_EKFAC = {**_SPANS, "collect": (0.0, 30.0), "decompose": (30.0, 40.0), "correct": (40.0, 70.0)}
"""Per cent of the job's bar at which a round begins and ends; the analyses have the rest."""

_SHOWN = {"decompose": ("decomposition", "layers"), "score": ("score", "queries")}
"""Stage and unit of a round; of the others `collection` and `examples`."""

PieceState = tuple[Piece, State, Mapping[str, Any] | None]
"""A piece, the state of its job, and the progress of that."""


def progress_of_round(document: Mapping[str, Any], pieces: Sequence[PieceState]) -> dict[str, Any]:
    """Return the progress of a divided job: the sum over the pieces of one round."""
    sized = [(_size(piece), _share(state, progress), piece) for piece, state, progress in pieces]
    total = sum(size for size, _, _ in sized)
    succeeded = sum(size for (size, _, _), (_, state, _) in zip(sized, pieces, strict=True) if state == "succeeded")
    done = sum(size * share for size, share, _ in sized)
    return _shown(document, sized[0][2].round, (done, total), succeeded)


def _shown(document: Mapping[str, Any], name: str, counts: tuple[float, int], succeeded: int) -> dict[str, Any]:
    done, total = counts
    stage, unit = _SHOWN.get(name, ("collection", "examples"))
    spans = _SPANS_OF_EKFAC if (document.get("collection") or {}).get("ekfac") else _SPANS
    begins, ends = spans.get(name, (0.0, 70.0))
    return {
        "stage": stage,
        "done": int(done),
        "total": total,
        "unit": unit,
        "layers_done": 0,
        "layers_total": None,
        "percent": round(begins + (ends - begins) * done / total, 1),
        "eta_seconds": None,
        _SUCCEEDED: succeeded,
    }


def percent_after_pieces(progress: Mapping[str, Any] | None) -> float:
    """Return how far a job's pieces have brought it; 0 of a job that has none behind it."""
    progress = progress or {}
    return float(progress["percent"]) if _SUCCEEDED in progress else 0.0


def note_success(connection: Connection, parent: Row[Any], piece: Piece) -> None:
    """Note in its parent's progress that a piece has succeeded."""
    progress = parent.progress or {}
    if _SUCCEEDED in progress:
        noted = {**progress, _SUCCEEDED: progress[_SUCCEEDED] + _size(piece)}
        change(connection, parent, {"progress": noted})


def report_piece(engine: Engine, claim: Claim, *, begins: bool = False) -> bool:
    """Have the parent's row say how far its pieces are, unless it was said within the last second.

    The beginning of a piece is written in any case, and becomes an event of the parent; of a job that is not a piece
    nothing is written. Return whether it was.
    """
    if claim.parent_id is None or claim.piece is None:
        return False
    waiting = (jobs.c.id == claim.parent_id, jobs.c.state == "waiting")
    with reading(engine) as connection:
        seen = connection.execute(
            select(jobs.c.event_seq, jobs.c.progress, ledger_now(-_EVERY_SECONDS).label("before")).where(*waiting)
        ).one_or_none()
    if seen is None:
        return False
    written = (seen.progress or {}).get("updated_at")
    if not begins and written is not None and written > seen.before.isoformat():
        return False
    # of several that come at once one writes, and the others see that it has
    first = () if begins else (jobs.c.event_seq == seen.event_seq,)
    with writing(engine) as connection:
        drawn = draw(connection, *waiting, *first)
        if drawn is None:
            return False
        progress = _of_parent(connection, drawn, claim.piece["round"])
        change(connection, drawn, {"progress": progress | {"updated_at": drawn.now.isoformat()}})
        if begins:
            place = {name: claim.piece.get(name) for name in ("round", "index", "count")}
            data = {**place, "job": claim.job_id, "state": "running", "attempt": claim.attempt}
            append_event(connection, drawn, "piece", data)
        return True


def _of_parent(connection: Connection, parent: Row[Any], name: str) -> dict[str, Any]:
    """The progress of a round, from its running pieces; from all where an earlier version has begun it."""
    noted = parent.progress or {}
    query = select(jobs.c.piece, jobs.c.state, jobs.c.progress).where(jobs.c.parent_id == parent.id)
    if _SUCCEEDED in noted:
        # one that is queued again has what its checkpoints hold
        again = and_(jobs.c.state == "queued", jobs.c.progress.is_not(None))
        query = query.where(or_(jobs.c.state.in_(HELD), again))
    rows = connection.execute(query).all()
    of_round = [(read_piece(row.piece), row.state, row.progress) for row in rows if row.piece["round"] == name]
    if _SUCCEEDED not in noted:
        return progress_of_round(parent.document, of_round)
    running = sum(_size(piece) * _share(state, progress) for piece, state, progress in of_round)
    counts = noted[_SUCCEEDED] + running, noted["total"]
    return _shown(parent.document, name, counts, noted[_SUCCEEDED])


def _size(piece: Piece) -> int:
    if piece.layers is not None:
        return len(piece.layers)
    return (piece.end or 0) - (piece.begin or 0)


def _share(state: State, progress: Mapping[str, Any] | None) -> float:
    if state == "succeeded":
        return 1.0
    percent = (progress or {}).get("percent")
    return 0.0 if percent is None else min(float(percent), 100.0) / 100
