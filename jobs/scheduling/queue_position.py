"""The position of a queued job: how many jobs would be claimed before it on the devices that could hold it.

It is read by the query of the claim itself (`jobs.scheduling.candidate_slots`), as if those devices were empty. So
fair share, priorities, pauses, the cap of each tenant and the sizes of devices count as they will. The jobs of other
tenants are a number here: neither an id nor a tenant leaves this module.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row

from catalog.record import record
from jobs.scheduling.fleet import FleetDevice, offered_by
from jobs.scheduling.free_places import FreePlace, find_candidates, free_places

_MOST = 100
"""The most jobs that are counted: reading more would take longer the more there are."""


@record
class QueuePosition:
    """The number of jobs that go before a queued one."""

    own: int
    """Jobs of its tenant."""
    others: int
    """Jobs of other tenants."""
    is_exact: bool
    """False where there are more than were counted."""


def queue_position(
    connection: Connection, fleet: Sequence[FleetDevice], job: Row[Any], most_running: int
) -> QueuePosition | None:
    """Count the jobs that would be claimed before a queued one.

    Args:
        connection: A connection that sees the jobs of all tenants, with an open transaction.
        fleet: Every known device.
        job: The job's row.
        most_running: Cap on the running jobs of a tenant; 0 sets none.

    Returns:
        The numbers; None where it could not be claimed even if every job before it were done.
    """
    places = _places_once_empty([each for each in fleet if each.could_hold(job, live=True, taking=True)])
    if not places:
        return None
    # no smaller devices: what is left to them for a grace is claimed before it all the same
    rows = find_candidates(connection, places, (), 0.0, most_running, _MOST)
    ids = [row.id for row in rows]
    if job.id not in ids and len(rows) < _MOST:
        return None
    before = rows[: ids.index(job.id)] if job.id in ids else rows
    own = sum(row.tenant_id == job.tenant_id for row in before)
    return QueuePosition(own=own, others=len(before) - own, is_exact=job.id in ids)


def _places_once_empty(devices: Sequence[FleetDevice]) -> list[FreePlace]:
    """The places of live workers on these devices if no job held or reserved one; of equal ones the roomiest."""
    empty = [replace(each, free_bytes=each.most_bytes, reserver=None) for each in devices]
    workers = {offer.worker_id for each in empty for offer in each.offers if offer.takes_jobs}
    roomiest: dict[tuple[str, tuple[str, ...], int | None], FreePlace] = {}
    for worker in sorted(workers):
        for place in free_places(offered_by(empty, worker)):
            key = place.pool[0].kind, place.offer.factories, place.ranks
            if key not in roomiest or roomiest[key].free_bytes < place.free_bytes:
                roomiest[key] = place
    return list(roomiest.values())
