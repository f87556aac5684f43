"""Job users: a user number for each job, for all its attempts on all machines.

Workers and machines that share a folder must agree about it, and a slot is another job's a moment later. So the ledger
gives the number with the job's first claim. The `USERS` numbers follow one another; a number is given again only when
every job that had it has ended.
"""

from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select

from jobs.lifecycle import TERMINAL
from jobs.schema.tables import job_users, jobs

USERS = 40_000
"""User numbers for jobs; they fit into the 65,536 that a container with a user namespace has."""


def user_number(connection: Connection, job: Row[Any]) -> int:
    """Return the number of a job's user, and give it one at its first claim."""
    own = connection.execute(select(job_users.c.number).where(job_users.c.job_id == job.id)).scalar_one_or_none()
    while own is None:
        given = insert(job_users).values(job_id=job.id, tenant_id=job.tenant_id).returning(job_users.c.number)
        own = connection.execute(given).scalar_one()
        if _is_taken(connection, own):
            connection.execute(delete(job_users).where(job_users.c.number == own))
            own = None
    return int(own) % USERS


def _is_taken(connection: Connection, number: int) -> bool:
    """Whether a job that has yet to end has the same user, by a number that was given rounds ago."""
    earlier = list(range(number % USERS, number, USERS))
    if not earlier:
        return False
    found = select(jobs.c.id).join(job_users, job_users.c.job_id == jobs.c.id)
    taken = found.where(job_users.c.number.in_(earlier), jobs.c.state.not_in(TERMINAL)).limit(1)
    return connection.execute(taken).one_or_none() is not None
