"""Division by fork and join: an attempt divides its job into children; the end of the last one queues the job again.

::

    divide      running -> waiting    one child job per piece, in the transaction that ends the attempt
    a child     succeeded             the last one of the round: waiting -> queued
                failed for good       its siblings are cancelled: waiting -> failed, with that failure
    a cancel    of the job            waiting -> cancelling, until the last child has stopped -> cancelled

A piece is an ordinary job: claimed, leased, retried and reaped as any other. What ends it decides about its parent in
the same transaction, under the lock on the parent's row, so that of two children that end at once exactly one sees that
it is the last. To lock a job and its parent, lock the parent first, and siblings in the order of their ids.

A waiting job holds no lease and no device, and is not counted among its tenant's running jobs; its pieces are. It
counts as one of its tenant's queued jobs, and its pieces do not: so a cap on either never keeps pieces from running.
"""

import logging
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Engine, Row, and_, delete, exists, not_, null, or_, select

from catalog.frames import Divided
from catalog.record import FieldError, plain
from catalog.requests.estimate import ESTIMATE
from catalog.requests.pieces import Piece, most_pieces_of, read_piece
from jobs.lifecycle import TERMINAL, State, ending
from jobs.metrics.counters import add, add_failure
from jobs.queue.attempt_writes import kept_progress
from jobs.queue.children import (
    LEFT_TO_CHILDREN,
    alone,
    any_child,
    cancel_pieces,
    child_name,
    draw_parent,
    insert_children,
    move_again,
)
from jobs.queue.fence import append_event, by_holder, draw, draw_fenced, move, own_failure
from jobs.queue.piece_progress import note_success, progress_of_round
from jobs.queue.series import drop_factors, go_on, series_place
from jobs.records import Claim
from jobs.schema.database import reading, writing
from jobs.schema.tables import artifacts, jobs

_log = logging.getLogger("kronoscope.jobs")

_AT_ONCE = 500
_BAD = "broken_child"
_BASES = "factors/bases/"
"""Folder of the eigenbases that a job stores of its merged factors, for pieces that correct eigenvalues."""


@by_holder
def divide(engine: Engine, claim: Claim, frame: Divided, devices: int = 1) -> State:
    """End the attempt by leaving a round to child jobs, one for each piece.

    A division that was not asked for, or cannot be carried out, is a fault of the computing process, and fails the job.

    Args:
        frame: The child's last frame.
        devices: The number of devices that the child was given.

    Returns:
        The job's new state: `waiting`, `cancelled` if that was asked for, or `failed`.

    Raises:
        LeaseLost: If the job has another holder by now, or none; then its round was divided, or will be anew.
    """
    with writing(engine) as connection:
        parent = draw_parent(connection, claim.parent_id)
        drawn = draw_fenced(connection, claim)
        state = ending(drawn.state, "waiting")
        if state != "waiting":
            move(connection, drawn, state)
            tell_parent(connection, parent, drawn, state)
            return state
        try:
            pieces = _pieces_of(connection, drawn, frame, devices)
        except (FieldError, TypeError, ValueError) as error:
            message = f"the job could not be divided: {error}; this is a fault of the service, so tell its operator"
            failure = own_failure("fatal", _BAD, message)
            move(connection, drawn, "failed", {"failure": failure}, reason=_BAD)
            add_failure(connection, "fatal", _BAD, ends_job=True)
            tell_parent(connection, parent, drawn, "failed", failure)
            return "failed"
        insert_children(
            connection, drawn, [{"piece": plain(each), "name": child_name(drawn.name, each.title)} for each in pieces]
        )
        begun = progress_of_round(drawn.document, [(piece, "queued", None) for piece in pieces])
        progress = begun | {"updated_at": drawn.now.isoformat()}
        move(connection, drawn, "waiting", {"progress": progress}, reason=f"{frame.round}: {len(pieces)} pieces")
        return "waiting"


def tell_parent(
    connection: Connection,
    parent: Row[Any] | None,
    drawn: Row[Any],
    state: State,
    failure: Mapping[str, Any] | None = None,
) -> None:
    """Do to a parent what follows from the end of an attempt of its child, in the same transaction."""
    if parent is None:
        if drawn.parent_id is not None and drawn.piece is None:  # its series has ended without it
            drop_factors(connection, drawn.parent_id)
        return
    append_event(connection, parent, "piece", piece_event(drawn, state))
    if state not in TERMINAL:
        return
    if drawn.piece is None:
        go_on(connection, parent, drawn)
        return
    if state == "succeeded":
        note_success(connection, parent, read_piece(drawn.piece))
    if state == "failed" and parent.state == "waiting":
        _fail_with(connection, parent, drawn, failure or {})
    elif parent.state == "waiting" and not any_child(connection, parent.id, jobs.c.state != "succeeded"):
        progress = _whole_round(connection, parent, drawn.piece["round"])
        move_again(connection, parent, "queued", {"progress": progress}, "all pieces have succeeded")
    elif parent.state == "cancelling" and not any_child(connection, parent.id, jobs.c.state.not_in(TERMINAL)):
        move_again(connection, parent, "cancelled", {}, None)


def forget_files_of_pieces(connection: Connection, drawn: Row[Any]) -> None:
    """Delete the rows of files that only the pieces of a job needed, as it succeeds: it has merged what is in them.

    Those are the pieces' own files, and of the job itself the eigenbases that it stored for them.
    """
    if drawn.parent_id is None and drawn.document.get("shards") is not None:
        of_pieces = artifacts.c.job_id.in_(select(jobs.c.id).where(jobs.c.parent_id == drawn.id))
        for_pieces = and_(artifacts.c.job_id == drawn.id, artifacts.c.name.startswith(_BASES, autoescape=True))
        connection.execute(delete(artifacts).where(or_(of_pieces, for_pieces)))


def settle_stranded(engine: Engine) -> int:
    """Move on every divided job whose pieces have ended without it.

    The end of a piece decides about its parent in one transaction, so there is no such job, unless a process of an
    earlier version, which knows of no pieces, has ended one: as a worker that is yet to be replaced may.
    """
    piece = jobs.alias("piece")
    of_it, is_piece = piece.c.parent_id == jobs.c.id, piece.c.piece.is_not(null())
    stranded = and_(
        jobs.c.state.in_(LEFT_TO_CHILDREN),
        jobs.c.lease_owner.is_(None),
        exists().where(of_it),
        or_(
            not_(exists().where(of_it, piece.c.state.not_in(TERMINAL))),
            and_(
                jobs.c.state == "waiting",
                exists().where(of_it, is_piece, piece.c.state == "failed"),
            ),
        ),
    )
    with reading(engine) as connection:
        candidates = connection.execute(select(jobs.c.id).where(stranded).limit(_AT_ONCE)).scalars().all()
    settled = 0
    for job_id in candidates:
        with alone(job_id), writing(engine) as connection:
            parent = draw(connection, jobs.c.id == job_id, stranded)
            if parent is not None:
                _settle(connection, parent)
                settled += 1
    if settled:
        _log.warning("divided jobs whose pieces ended under an earlier version go on", extra={"jobs": settled})
    return settled


def _settle(connection: Connection, parent: Row[Any]) -> None:
    pieces = connection.execute(select(jobs).where(jobs.c.parent_id == parent.id).order_by(jobs.c.id)).all()
    failed = next((piece for piece in pieces if piece.state == "failed"), None)
    if pieces[0].piece is None:
        go_on(connection, parent)
        return
    if parent.state == "cancelling":
        move_again(connection, parent, "cancelled", {}, None)
    elif failed is not None:
        _fail_with(connection, parent, failed, failed.failure or {})
    elif all(piece.state == "succeeded" for piece in pieces):
        progress = _whole_round(connection, parent, pieces[-1].piece["round"])
        move_again(connection, parent, "queued", {"progress": progress}, "all pieces have succeeded")
    else:
        move_again(connection, parent, "cancelled", {}, "its pieces were cancelled")


def piece_event(drawn: Row[Any], state: State) -> dict[str, Any]:
    """Return the content of an event by which a parent's history describes a piece."""
    piece = drawn.piece or dict(zip(("round", "index"), series_place(drawn.idempotency_key), strict=True))
    return {**{name: piece.get(name) for name in ("round", "index", "count")}, "job": drawn.id, "state": state}


def progress_between(connection: Connection, drawn: Row[Any]) -> dict[str, Any] | None:
    """Return the progress of a job that is queued again: what its pieces have done, or its checkpoints hold, stays."""
    if drawn.parent_id is not None or drawn.document.get("shards") is None:
        return kept_progress(drawn)
    last = select(jobs.c.piece).where(jobs.c.parent_id == drawn.id).order_by(jobs.c.id.desc()).limit(1)
    piece = connection.execute(last).scalar_one_or_none()
    return kept_progress(drawn) if piece is None else _whole_round(connection, drawn, piece["round"])


def _pieces_of(connection: Connection, drawn: Row[Any], frame: Divided, devices: int) -> list[Piece]:
    """The pieces of a frame, checked: a whole round of a job that may be divided into as many, and was not before."""
    if drawn.parent_id is not None or drawn.kind == ESTIMATE:
        raise ValueError("a piece, or an estimate, cannot be divided")
    shards = drawn.document.get("shards")
    if shards is None:
        raise ValueError("its document has no `shards`")
    earlier = connection.execute(select(jobs.c.piece).where(jobs.c.parent_id == drawn.id)).scalars().all()
    most = most_pieces_of(frame.round, shards, devices, sum(piece["round"] == "collect" for piece in earlier))
    if len(frame.pieces) > most:
        raise ValueError(f"{len(frame.pieces)} pieces, where the round `{frame.round}` of this job has {most} at most")
    pieces = [read_piece(each) for each in frame.pieces]
    numbered = [(piece.round, piece.index, piece.count) for piece in pieces]
    if not pieces or numbered != [(frame.round, index, len(pieces)) for index in range(len(pieces))]:
        raise ValueError(f"the round `{frame.round}` of {len(pieces)} pieces must hold each of them once, in order")
    if any(piece["round"] == frame.round for piece in earlier):
        raise ValueError(f"the round `{frame.round}` was divided before")
    return pieces


def _fail_with(connection: Connection, parent: Row[Any], drawn: Row[Any], failure: Mapping[str, Any]) -> None:
    """Fail the parent with the failure of one piece, and have the others stop."""
    title = read_piece(drawn.piece).title
    message = f"{title} of the round `{drawn.piece['round']}` (job {drawn.id}) failed: {failure.get('message', '')}"
    cancel_pieces(connection, parent.id, reason=f"{title} failed")
    named = {**failure, "message": message}
    move_again(connection, parent, "failed", {"failure": named}, str(failure.get("code", "")))
    add(connection, "job_failures", str(failure.get("category", "fatal")))


def _whole_round(connection: Connection, parent: Row[Any], name: str) -> dict[str, Any]:
    """The parent's progress with a round behind it."""
    stored = connection.execute(select(jobs.c.piece).where(jobs.c.parent_id == parent.id)).scalars().all()
    pieces = [read_piece(piece) for piece in stored if piece["round"] == name]
    whole = progress_of_round(parent.document, [(piece, "succeeded", None) for piece in pieces])
    return whole | {"updated_at": parent.now.isoformat()}
