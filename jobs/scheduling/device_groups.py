"""Groups of GPUs for jobs of several ranks: the GPUs of one node that one worker offers, one for each rank.

A group is the smallest of the sufficient devices. Where small jobs follow each other on the GPUs of a node, as many
are never free at once: after a while a job reserves a whole group, all or none, so that two such jobs never hold half
of one each. On a host the ranks share one device, which is placed and reserved as for any other job.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, literal, select

from jobs.devices.requirements import needs_on, suits
from jobs.scheduling.fair_share import is_due
from jobs.scheduling.fleet import FleetDevice
from jobs.schema.clock import ledger_now
from jobs.schema.tables import jobs

_CANDIDATES = 20


def smallest_group(
    fleet: Iterable[FleetDevice], worker_id: str, ranks: int, suitable: Callable[[FleetDevice], bool]
) -> tuple[FleetDevice, ...] | None:
    """Return the smallest suitable GPUs of one worker."""
    alike: dict[tuple[str, str], list[FleetDevice]] = {}
    for each in fleet:
        if each.kind != "host" and each.offered_by(worker_id) and suitable(each):
            members = alike.setdefault((each.node, each.kind), [])
            members.append(each)
            if len(members) == ranks:
                return tuple(members)
    return None


def starts_now(fleet: Sequence[FleetDevice], job: Any, free_of: Callable[[FleetDevice], bool]) -> bool:  # noqa: ANN401 - a row of `jobs`
    """Return whether any worker could start a job at once, on one device or on a group."""
    if job.world_size == 1:
        return any(each.takes_now(job) for each in fleet if free_of(each))
    if any(each.takes_now(job) for each in fleet if each.kind == "host" and free_of(each)):
        return True
    return any(
        smallest_group(fleet, worker, job.world_size, lambda each: free_of(each) and each.takes_now(job)) is not None
        for worker in _workers(fleet, job, busy=False)
    )


def could_start(
    fleet: Sequence[FleetDevice],
    job: Any,  # noqa: ANN401 - a row of `jobs`
    suitable: Callable[[FleetDevice], bool] | None = None,
) -> bool:
    """Return whether a job could run on these devices once no other does."""
    ask = suitable or (lambda each: each.could_lease(job))
    if any(ask(each) for each in fleet if job.world_size == 1 or each.kind == "host"):
        return True
    if job.world_size == 1:
        return False
    workers = {offer.worker_id for each in fleet for offer in each.offers}
    return any(smallest_group(fleet, worker, job.world_size, ask) is not None for worker in workers)


def free_of_group(fleet: Sequence[FleetDevice], job: Any) -> str:  # noqa: ANN401 - a row of `jobs`
    """Return what a job of several ranks waits for, with the most devices that are free for it on one node now."""
    if any(each.kind == "host" and each.could_hold(job, live=True) for each in fleet):
        return "its turn and a free device"
    free = most_on_a_node([each for each in fleet if each.takes_now(job) and each.reserver is None], job)
    return f"its turn and {job.world_size} free devices at once (free at most {free} on one node)"


def most_on_a_node(fleet: Sequence[FleetDevice], job: Any) -> int:  # noqa: ANN401 - a row of `jobs`
    """Return the most GPUs of one node that could each hold one rank of a job."""
    able = Counter(
        each.node for each in fleet if each.kind != "host" and needs_on(job, each.kind) <= each.capacity_bytes
    )
    return max(able.values(), default=0)


def least_group(
    fleet: Sequence[FleetDevice],
    job: Any,  # noqa: ANN401 - a row of `jobs`
    suitable: Callable[[FleetDevice], bool],
) -> tuple[str, tuple[FleetDevice, ...]] | None:
    """Return the smallest group of any live worker, the same for everybody who looks."""
    groups = [
        (worker, group)
        for worker in _workers(fleet, job, busy=True)
        if (group := smallest_group(fleet, worker, job.world_size, suitable)) is not None
    ]
    return min(groups, key=lambda each: ([device.rank for device in reversed(each[1])], each[0]), default=None)


def is_whole(fleet: Sequence[FleetDevice], job: Any) -> bool:  # noqa: ANN401 - a row of `jobs`
    """Return whether the GPUs reserved for a job are still a group that could hold it."""
    return (
        least_group(
            fleet, job, lambda each: each.reserver is not None and each.reserver.id == job.id and each.leaves(job)
        )
        is not None
    )


def groups_to_reserve(
    connection: Connection, fleet: Sequence[FleetDevice], worker_id: str, after_seconds: float, full: frozenset[str]
) -> dict[str, str]:
    """Return the reservations of a worker's GPUs for jobs of several ranks that have waited long.

    The one that has waited longest comes first, and each gets the smallest group that could hold it once nothing else
    is there: the worker that offers that group reserves it.
    """
    if sum(each.kind != "host" for each in fleet) < 2:
        return {}
    waiting = connection.execute(
        select(jobs)
        .where(
            jobs.c.state == literal("queued", literal_execute=True),
            jobs.c.world_size > 1,
            jobs.c.queued_at <= ledger_now(-after_seconds),
            jobs.c.tenant_id.not_in(full),
            is_due(),
        )
        .order_by(jobs.c.queued_at, jobs.c.id)
        .limit(_CANDIDATES)
    ).all()
    reserved_for = {each.reserver.id for each in fleet if each.reserver is not None}
    taken: dict[str, str] = {}
    ours: dict[str, str] = {}
    for job in waiting:
        if job.id in reserved_for or starts_now(fleet, job, lambda each: each.reserver is None):
            continue
        chosen = least_group(fleet, job, _unreserved(job, taken))
        if chosen is None:
            continue
        worker, group = chosen
        taken |= {each.uuid: job.id for each in group}
        if worker == worker_id:
            ours |= {each.uuid: job.id for each in group}
    return ours


def _unreserved(job: Row[Any], taken: dict[str, str]) -> Callable[[FleetDevice], bool]:
    return lambda each: each.reserver is None and each.uuid not in taken and each.could_lease(job)


def _workers(fleet: Sequence[FleetDevice], job: Any, *, busy: bool) -> list[str]:  # noqa: ANN401 - a row of `jobs`
    """Live workers that may run a job on a GPU, with a free slot unless ``busy`` ones count too."""
    return sorted(
        {
            offer.worker_id
            for each in fleet
            if each.kind != "host"
            for offer in each.offers
            if offer.live and (busy or offer.free_slots > 0) and suits(job, each.kind, offer.factories)
        }
    )
