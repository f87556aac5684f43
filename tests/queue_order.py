"""The order of the queue as any worker could claim from it, whatever devices there are."""

from sqlalchemy import Engine, and_, null

from jobs.scheduling.candidate_slots import NEEDS
from jobs.scheduling.fair_share import fair_order, is_due
from jobs.schema.database import reading


def next_claimable(engine: Engine, limit: int = 20, free_bytes: int | None = None) -> list[str]:
    """Return the ids of the next queued jobs that may be claimed, those alone that fit into ``free_bytes`` if given."""
    claimable = is_due() if free_bytes is None else and_(is_due(), free_bytes >= NEEDS)
    with reading(engine) as connection:
        return list(connection.execute(fair_order(connection.dialect.name, limit, claimable, null())).scalars())
