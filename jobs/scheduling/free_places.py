"""The free places of a worker: each of its free devices, and the groups that its free GPUs can make for several ranks.

A group of W has the free bytes of the W-th largest of its pool: a job of W ranks that needs no more on each finds W
devices there, and takes the smallest that hold it. A device that is reserved for a job is in the pools of that job
alone, and of those that may go before it (`jobs.scheduling.candidate_slots`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from catalog.record import record
from jobs.devices.requirements import device_class, needs_on
from jobs.scheduling.candidate_slots import CandidateSlot, candidates_query, slot_values
from jobs.scheduling.fleet import FleetDevice, Offer


@record
class FreePlace:
    """Devices on which a worker may put a job now."""

    label: str
    """The name by which the query for candidates tells it from the others."""
    pool: tuple[FleetDevice, ...]
    """From small to large; more than ranks where there is a choice."""
    offer: Offer
    ranks: int | None
    """The ranks of the job; None for a host, which they share."""
    reserver: Row[Any] | None
    """The job that it is kept for."""

    @property
    def free_bytes(self) -> int:
        """Bytes that every rank finds free: on the host, those that all of them share."""
        return sorted((each.free_bytes for each in self.pool), reverse=True)[(self.ranks or 1) - 1]

    def uuids_for(self, job: Any) -> tuple[str, ...] | None:  # noqa: ANN401 - a row of `jobs`
        """Return the smallest devices that hold a job."""
        number = self.ranks or 1
        if len(self.pool) == number:
            return tuple(each.uuid for each in self.pool)
        if job is None:
            return None
        sufficient = [each.uuid for each in self.pool if needs_on(job, each.kind) <= each.free_bytes]
        return tuple(sufficient[:number]) if len(sufficient) >= number else None


def free_places(offered: Sequence[tuple[FleetDevice, Offer]]) -> list[FreePlace]:
    """Return the free places of a worker."""
    # what is the same of two devices is asked once
    alike = {(each.size, each.free_bytes, each.reserver and each.reserver.id): (each, offer) for each, offer in offered}
    single = [
        FreePlace(
            label=each.uuid,
            pool=(each,),
            offer=offer,
            ranks=None if each.kind == "host" else 1,
            reserver=each.reserver,
        )
        for each, offer in alike.values()
    ]
    return sorted([*single, *_groups(offered)], key=lambda place: place.ranks is None)


def _groups(offered: Sequence[tuple[FleetDevice, Offer]]) -> list[FreePlace]:
    together: dict[tuple[str, str], list[tuple[FleetDevice, Offer]]] = {}
    for each, offer in offered:
        if each.kind != "host":
            together.setdefault((each.node, each.kind), []).append((each, offer))
    places: list[FreePlace] = []
    for (node, kind), members in together.items():
        unreserved = [each for each, _ in members if each.reserver is None]
        reservers = {each.reserver.id: each.reserver for each, _ in members if each.reserver is not None}
        pools: list[tuple[list[FleetDevice], Row[Any] | None]] = [(unreserved, None)]
        for job_id, job in reservers.items():
            pools.append(([d for d, _ in members if d.reserver is None or d.reserver.id == job_id], job))
        for number, (pool, reserver) in enumerate(pools):
            places += [
                FreePlace(
                    label=f"{ranks} of {node} {kind} {number}",
                    pool=tuple(pool),
                    offer=members[0][1],
                    ranks=ranks,
                    reserver=reserver,
                )
                for ranks in range(2, len(pool) + 1)
            ]
    return places


def find_candidates(
    connection: Connection,
    places: Sequence[FreePlace],
    fleet: Sequence[FleetDevice],
    grace_seconds: float,
    most_running: int,
    limit: int,
) -> Sequence[Row[Any]]:
    """Return the next jobs that may be put on places by their workers now, each with the label of one as `device`.

    Args:
        fleet: The devices to whose smaller ones a job is left for the grace.
        most_running: Cap on the running jobs of a tenant; 0 sets none.
    """
    slots: list[CandidateSlot] = []
    values = {"most_bytes": max(each.free_bytes for each in places), "before_grace": -grace_seconds}
    if most_running:
        values["most_running"] = most_running
    for number, place in enumerate(places):
        slot, slot_parameters = _candidate_slot(fleet, place, number)
        slots.append(slot)
        values |= slot_parameters
    query = candidates_query(connection.dialect.name, limit, tuple(slots), capped=most_running > 0)
    return connection.execute(query, values).all()


def _candidate_slot(
    fleet: Sequence[FleetDevice], place: FreePlace, number: int
) -> tuple[CandidateSlot, Mapping[str, Any]]:
    """Return which queued jobs may be put on a place by its worker now."""
    least = place.pool[0]
    smaller = [
        each
        for each in fleet
        if each.size < least.size
        and each.free_bytes >= 0
        and each.reserver is None
        and not each.offered_by(place.offer.worker_id)
        and any(other.live and other.free_slots > 0 for other in each.offers)
    ]
    most = _most_together(smaller)
    wanted = {pair: most[pair] for pair in sorted(most) if place.ranks in (None, pair[1])}
    slot = CandidateSlot(
        kind=least.kind,
        factories=place.offer.factories,
        kept=place.reserver is not None,
        smaller=tuple(wanted),
        ranks=place.ranks,
    )
    return slot, slot_values(number, place.label, place.free_bytes, place.reserver, list(wanted.values()))


def _most_together(devices: Sequence[FleetDevice]) -> dict[tuple[str, int], int]:
    """The most free bytes that each of so many ranks would find on devices of one worker, by class and ranks."""
    sizes: dict[tuple[str, str, str], list[int]] = {}
    for each in devices:
        for offer in each.offers:
            if offer.live and offer.free_slots > 0:
                sizes.setdefault((device_class(each.kind), offer.worker_id, each.kind), []).append(each.free_bytes)
    most: dict[tuple[str, int], int] = {}
    for (of_class, _, kind), free in sizes.items():
        for ranks, size in enumerate(sorted(free, reverse=True), start=1):
            if ranks == 1 or kind != "host":
                most[of_class, ranks] = max(most.get((of_class, ranks), 0), size)
    return most
