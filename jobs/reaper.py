"""The reaper takes jobs away from holders that fell silent, and gives them to the queue again."""

from sqlalchemy import Engine, select

from jobs.claims import record_failure
from jobs.clock import ledger_now
from jobs.database import reading, writing
from jobs.fence import draw
from jobs.lifecycle import HELD
from jobs.tables import jobs

_AT_ONCE = 100

_SILENT = {
    "category": "transient",
    "code": "worker_lost",
    "message": "the worker that ran this job fell silent: it was killed, or lost its machine or the database",
    "pointer": None,
    "layer": None,
    "detail": None,
}


def reap_expired(engine: Engine) -> int:
    """Take away every job whose lease has expired; returns how many.

    It runs in every API and worker process at once: each job is taken in a transaction of its own
    whose first statement checks the lease again, so that a second reaper, or a heartbeat that came
    first, leaves it nothing to do.
    """
    expired = (jobs.c.state.in_(HELD), jobs.c.lease_expires_at < ledger_now())
    with reading(engine) as connection:
        candidates = connection.execute(select(jobs.c.id, jobs.c.fence).where(*expired).limit(_AT_ONCE)).all()
    taken = 0
    for job_id, fence in candidates:
        with writing(engine) as connection:
            drawn = draw(connection, jobs.c.id == job_id, jobs.c.fence == fence, *expired)
            if drawn is not None:
                record_failure(connection, drawn, _SILENT)
                taken += 1
    return taken
