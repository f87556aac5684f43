"""The pieces of a divided job as others read them: for its page, and for the attempts that go on with their files.

They are in the order of rounds and pieces, in which their results are merged.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Engine, null, select

from catalog.record import record
from catalog.requests.pieces import ROUNDS, Piece, read_piece
from jobs.lifecycle import HELD, State
from jobs.queue.series import OVERLAP, series_place
from jobs.records import Job
from jobs.repository.row_records import job_record, read_row
from jobs.schema.database import reading
from jobs.schema.identifiers import is_id
from jobs.schema.tables import jobs

_COLUMNS = (
    *(jobs.c.id, jobs.c.piece, jobs.c.state, jobs.c.lease_owner, jobs.c.attempt, jobs.c.failures, jobs.c.progress),
    *(jobs.c.manifest["model_sha256"].label("model_sha256"), jobs.c.manifest["data_sha256"].label("data_sha256")),
    jobs.c.manifest["examples"].label("examples"),
)


@record
class PieceJob:
    """One child job of a divided job."""

    id: str
    """The child job."""
    piece: Piece
    """The part that it computes."""
    state: State
    worker: str | None
    """The process that holds it; None while none does."""
    attempt: int
    failures: int
    progress: Mapping[str, Any] | None
    model_sha256: str | None
    """Digest of its model; None before it has succeeded."""
    data_sha256: str | None
    """Digest of its examples."""
    examples: int | None
    """The number of examples that it has measured; None before it has succeeded."""


def read_pieces(engine: Engine, tenant_id: str, parent_id: str) -> tuple[PieceJob, ...]:
    """Return a job's pieces of all rounds, in order; none if it was not divided, or is not the tenant's."""
    if not is_id(parent_id):
        return ()
    of_job = (jobs.c.tenant_id == tenant_id, jobs.c.parent_id == parent_id)
    query = select(*_COLUMNS).where(*of_job, jobs.c.piece.is_not(null()))  # the jobs of a series are no pieces
    with reading(engine, tenant_id) as connection:
        rows = connection.execute(query).all()
    return tuple(sorted(map(_record, rows), key=lambda each: (ROUNDS.index(each.piece.round), each.piece.index)))


def read_series(engine: Engine, tenant_id: str, parent_id: str) -> tuple[list[Job], list[tuple[int, Job]]]:
    """Return the jobs of a series.

    Those of its checkpoints in order, and the comparisons of neighbours, each with the place of the later one.
    """
    query = select(jobs).where(jobs.c.tenant_id == tenant_id, jobs.c.parent_id == parent_id)
    with reading(engine, tenant_id) as connection:
        rows = connection.execute(query).all()
    placed = sorted(((series_place(row.idempotency_key), job_record(row)) for row in rows), key=lambda each: each[0][1])
    pairs = [(place, job) for (part, place), job in placed if part == OVERLAP]
    return [job for (part, _), job in placed if part != OVERLAP], pairs


def _record(row: Any) -> PieceJob:  # noqa: ANN401 - a row of the columns above
    worker = row.lease_owner if row.state in HELD else None
    return read_row(PieceJob, row, piece=read_piece(row.piece), worker=worker)
