"""The reaper takes jobs from silent holders and dead ones, and fails queued jobs at their deadline."""

import contextlib
import logging
from typing import Any

from sqlalchemy import ColumnElement, Engine, Row, and_, delete, exists, literal, not_, select

from jobs.devices.leases import forget
from jobs.errors import LedgerUnavailable
from jobs.lifecycle import HELD
from jobs.metrics.counters import add, note_round
from jobs.queue.attempt_endings import record_failure
from jobs.queue.children import alone, draw_parent
from jobs.queue.division import settle_stranded, tell_parent
from jobs.queue.fence import draw, move, own_failure
from jobs.schema.clock import ledger_now
from jobs.schema.database import reading, writing
from jobs.schema.tables import device_leases, jobs, workers

_log = logging.getLogger("kronoscope.jobs")

_AT_ONCE = 100

_SILENT = own_failure(
    "transient",
    code="worker_lost",
    message="the worker that ran this job fell silent: it was killed, or lost its machine or the database",
)
_OVERDUE = own_failure(
    "usage",
    code="deadline_exceeded",
    message="the deadline passed while the job was in the queue; submit it again with a later one",
)
_SILENT_AND_OVERDUE = _OVERDUE | {
    "message": "the worker that ran this job fell silent, and then its deadline passed; what was done stays",
}


def reap(engine: Engine) -> int:
    """Make a round of the reaper, and record that it has succeeded; overdue jobs end even where the rest fails."""
    try:
        taken = reap_expired(engine)
    except LedgerUnavailable:
        raise
    except Exception:
        with contextlib.suppress(LedgerUnavailable):
            end_overdue(engine)
        raise
    ended = end_overdue(engine)
    note_round(engine, "reaper")
    return taken + ended


def reap_expired(engine: Engine) -> int:
    """Take every job with an expired lease from its holder, and move on divided jobs that were left behind.

    A job with a passed deadline fails; the others return to the queue. Return the number of jobs taken.

    Every API and worker process calls this: each job is taken in a transaction of its own, and its first
    statement checks the lease again, so that a second reaper, or a heartbeat that came first, leaves it
    nothing to do. A job with a locked row is left for the next round: a holder that froze in the middle
    of a write keeps its lock until the database ends its session, and must not hold up the others.
    """
    expired = (jobs.c.state.in_(HELD), jobs.c.lease_expires_at < ledger_now())
    with reading(engine) as connection:
        candidates = connection.execute(
            select(jobs.c.id, jobs.c.fence, jobs.c.parent_id)
            .where(*expired)
            .limit(_AT_ONCE)
            .with_for_update(skip_locked=True)
        ).all()
    taken = sum(_take_away(engine, row, *expired) for row in candidates)
    settle_stranded(engine)
    return taken


def reap_ended_worker(engine: Engine, worker_id: str, process_space: str) -> int:
    """Take every job from a worker that has ended with all its guardians, forget it, and return the number of jobs.

    Its device leases go with it, but for those of which this machine, in its process space, sees the processes:
    `free_drained` frees them when the last one is gone.
    """
    of_worker = and_(device_leases.c.job_id == jobs.c.id, device_leases.c.fence == jobs.c.fence)
    held = (jobs.c.state.in_(HELD), exists().where(of_worker, device_leases.c.worker_id == worker_id))
    with reading(engine) as connection:
        candidates = connection.execute(select(jobs.c.id, jobs.c.fence, jobs.c.parent_id).where(*held)).all()
    taken = sum(_take_away(engine, row, *held) for row in candidates)
    seen = and_(device_leases.c.process_space == process_space, device_leases.c.guardian_pid.is_not(None))
    with writing(engine) as connection:
        forget(connection, device_leases.c.worker_id == worker_id, device_leases.c.draining_at.is_not(None), not_(seen))
        connection.execute(delete(workers).where(workers.c.id == worker_id))
    return taken


def _take_away(engine: Engine, seen: Any, *conditions: ColumnElement[bool]) -> bool:  # noqa: ANN401 - part of a row
    """Take one job from its holder, unless a condition or the fence does not hold any more, or its parent is locked."""
    drawn = None
    with alone(seen.id):
        drawn = _taken(engine, seen, *conditions)
    if drawn is None:
        return False
    fields = {"job": drawn.id, "attempt": drawn.attempt, "fence": drawn.fence, "owner": drawn.lease_owner}
    _log.warning("lease reaped", extra=fields)
    return True


def _taken(engine: Engine, seen: Any, *conditions: ColumnElement[bool]) -> Row[Any] | None:  # noqa: ANN401 - part of a row
    with writing(engine) as connection:
        parent = draw_parent(connection, seen.parent_id, skip_locked=True)
        drawn = draw(connection, jobs.c.id == seen.id, jobs.c.fence == seen.fence, *conditions)
        if drawn is None:
            return None
        overdue = drawn.deadline_at is not None and drawn.deadline_at <= drawn.now
        failure = _SILENT_AND_OVERDUE if overdue else _SILENT
        state = record_failure(connection, drawn, failure)
        tell_parent(connection, parent, drawn, state, failure)
        add(connection, "reaped")
        return drawn


def end_overdue(engine: Engine) -> int:
    """Fail every queued job with a passed deadline, without counting a failed attempt, and return their number.

    The deadlines of running jobs are for their workers to keep.
    """
    # in the statement's text, for the index that holds queued jobs with a deadline alone
    overdue = (jobs.c.state == literal("queued", literal_execute=True), jobs.c.deadline_at <= ledger_now())
    with reading(engine) as connection:
        candidates = connection.execute(select(jobs.c.id, jobs.c.parent_id).where(*overdue).limit(_AT_ONCE)).all()
    ended = 0
    for job_id, parent_id in candidates:
        with alone(job_id), writing(engine) as connection:
            parent = draw_parent(connection, parent_id, skip_locked=True)
            drawn = draw(connection, jobs.c.id == job_id, *overdue)
            if drawn is not None:
                move(connection, drawn, "failed", {"failure": _OVERDUE}, reason=str(_OVERDUE["code"]))
                tell_parent(connection, parent, drawn, "failed", _OVERDUE)
                add(connection, "job_failures", "usage")
                ended += 1
    return ended
