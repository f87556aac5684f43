"""Crash signatures: whether an attempt died as the attempt before it that crashed.

A signature exists only where a live supervisor saw its child die; a lease that ran out is a plain
failure and leaves none.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Engine, select

from jobs.queue.fence import append_event, by_holder, draw_fenced
from jobs.records import Claim
from jobs.schema.database import writing
from jobs.schema.tables import job_events


@by_holder
def record_crash(engine: Engine, claim: Claim, signature: Mapping[str, Any]) -> bool:
    """Store how and where a process crashed as an event, and return whether the crash before had the same signature.

    ``LeaseLost`` if the job has another holder by now, or none.
    """
    with writing(engine) as connection:
        drawn = draw_fenced(connection, claim)
        last_two = connection.execute(
            select(job_events.c.data)
            .where(job_events.c.job_id == claim.job_id, job_events.c.type == "crash")
            .order_by(job_events.c.seq.desc())
            .limit(2)
        ).scalars()
        earlier = list(last_two)
        if earlier and earlier[0].get("attempt") == claim.attempt:
            del earlier[0]
        else:
            append_event(connection, drawn, "crash", {"attempt": claim.attempt, "signature": dict(signature)})
        return bool(earlier) and earlier[0].get("signature") == dict(signature)
