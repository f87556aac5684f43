"""The reason why a queued job has not begun, in a sentence for the person whose job it is.

Each reason is asked of what decides a claim: `is_due` and the tenants' cap (`jobs.scheduling.fair_share`), the offers,
pauses and free memory of the fleet (`jobs.scheduling.fleet`), and the query for candidates
(`jobs.scheduling.queue_position`). The first that holds is said::

    walls        several tenants, and no worker keeps their jobs apart
    pause        an attempt could not go on, and the next begins later
    share        as many jobs of the tenant run as may
    no worker    those that could hold it take no jobs at the moment, such as beside a full disk
    reserved     a device is kept for it
    memory       others than jobs hold it on every device that could hold the job
    turn         jobs before it, and devices in use
    no class     nothing that is there could ever take it: by class, factory, number or size
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Row

from catalog.responses.views import PlacementView
from jobs.devices.requirements import needs_on, suits
from jobs.scheduling.device_groups import could_start, free_of_group, most_on_a_node
from jobs.scheduling.fleet import FleetDevice
from jobs.scheduling.queue_position import QueuePosition

NO_WALLS = PlacementView(
    status="no_worker",
    message=(
        "there are several tenants, and no worker that is there keeps their jobs apart; it begins once one does, or the"
        " operator allows it"
    ),
    device=None,
)
_REASONS = 3
"""The most workers of which the reason for a pause is named."""


def waiting_placement(
    fleet: Sequence[FleetDevice],
    row: Any,  # noqa: ANN401 - a row of `jobs`, with `due`
    offered: Row[Any] | None = None,
    position: QueuePosition | None = None,
    full_share: int = 0,
) -> PlacementView:
    """Return the placement of a job that waits.

    Args:
        fleet: Every known device.
        row: The job's row, with `is_due` as `due` and the ledger's time as `now`.
        offered: A class of machines, not there yet, that would take it.
        position: The jobs before it, where they were counted.
        full_share: The running jobs of its tenant where they are as many as may run; else 0.
    """
    return (
        _held_back(row, position, full_share)
        or _at_devices(fleet, row, position)
        or _offered_by_autoscaler(row, offered)
        or _without_worker(fleet, row)
        or _nowhere(fleet, row)
    )


def _held_back(row: Any, position: QueuePosition | None, full_share: int) -> PlacementView | None:  # noqa: ANN401 - as above
    """A job that may not be claimed now, whatever is free."""
    if not row.due:
        return PlacementView(status="waiting", message=_pause(row), device=None)
    if full_share:
        message = f"{full_share} of your jobs run, as many as may at a time; it begins after one of them has ended"
        own = None if position is None else replace(position, others=0)  # others wait for no job of this tenant
        message = "; ".join(filter(None, (message, _ahead(own))))
        return PlacementView(
            status="waiting", message=message, device=None, own_before=None if own is None else own.own
        )
    return None


def _at_devices(fleet: Sequence[FleetDevice], row: Any, position: QueuePosition | None) -> PlacementView | None:  # noqa: ANN401 - as above
    """A job that devices of known workers could hold."""
    kept = [each for each in fleet if each.reserver is not None and each.reserver.id == row.id]
    needs = _needs(row)
    could_hold = could_start(fleet, row, lambda each: each.could_hold(row, live=True))
    if could_hold and not could_start(fleet, row, lambda each: each.could_hold(row, live=True, taking=True)):
        message = f"{needs}the workers that could hold it take no jobs at the moment ({_pauses(fleet, row)})"
        return PlacementView(status="no_worker", message=message, device=None)
    if kept:
        which = f"the device {kept[0].uuid} with {readable(kept[0].capacity_bytes)} is kept for it"
        if len(kept) > 1:
            busy = sum(each.free_bytes < 0 for each in kept)
            which = f"{len(kept)} devices of {kept[0].node} are kept for it, of which {busy} are still in use"
        return PlacementView(
            status="reserved",
            message=f"{needs}{which}",
            device=kept[0].uuid,
            devices=tuple(each.uuid for each in kept),
        )
    if not could_hold:
        return None
    if not could_start(fleet, row):
        message = f"{needs}waits for memory that others than jobs hold on every device that could hold it"
        return PlacementView(status="waiting", message=message, device=None)
    what = "its turn and a free device" if row.world_size == 1 else free_of_group(fleet, row)
    reasons = ", and ".join(filter(None, (_ahead(position), _occupancy(fleet, row))))
    return PlacementView(
        status="waiting",
        message=f"{needs}waits for {what}{': ' if reasons else ''}{reasons}",
        device=None,
        own_before=None if position is None else position.own,
        others_before=None if position is None else position.others,
    )


def _offered_by_autoscaler(row: Any, offered: Row[Any] | None) -> PlacementView | None:  # noqa: ANN401 - as above
    if offered is None:
        return None
    each = "" if offered.devices == 1 else f" on each of {offered.devices} devices"
    message = (
        f"{_needs(row)}no worker that is there can take it; it begins on a machine of the class {offered.name} "
        f"({readable(offered.device_bytes)}{each}), which an autoscaler starts"
    )
    return PlacementView(status="no_worker", message=message, device=None)


def _without_worker(fleet: Sequence[FleetDevice], row: Any) -> PlacementView | None:  # noqa: ANN401 - as above
    """A job for which a worker has to come."""
    if could_start(fleet, row, lambda each: each.could_hold(row, live=False)):
        message = f"{_needs(row)}the devices that could hold it belong to workers that have not been seen lately"
        return PlacementView(status="no_worker", message=message, device=None)
    if not any(each.offers for each in fleet):
        largest = max((each.capacity_bytes for each in fleet), default=None)
        if largest is None or (row.needs_bytes or 0) <= largest:
            message = f"{_needs(row)}no worker offers a device; it begins when one does"
            return PlacementView(status="no_worker", message=message, device=None)
    return None


def _pause(row: Any) -> str:  # noqa: ANN401 - a row of `jobs`
    if row.not_before is None or row.not_before <= row.now:
        return "its deadline has passed; it is about to end"
    return f"an attempt could not go on; the next begins at {row.not_before:%Y-%m-%d %H:%M:%S} UTC at the earliest"


def _pauses(fleet: Sequence[FleetDevice], row: Any) -> str:  # noqa: ANN401 - a row of `jobs`
    """Why each worker that could hold a job takes none."""
    paused = {
        f"{each.node}: {offer.paused}"
        for each in fleet
        for offer in each.offers
        if each.could_hold(row, live=True) and offer.live and offer.paused is not None
    }
    named = sorted(paused)[:_REASONS]
    return "; ".join([*named, *([f"{len(paused) - _REASONS} more"] if len(paused) > _REASONS else [])])


def _ahead(position: QueuePosition | None) -> str:
    """The jobs before it as a clause; of other tenants their number alone."""
    if position is None or not (number := position.own + position.others):
        return ""
    if not position.is_exact:
        return f"at least {number} jobs are before it"
    own = f"{position.own} of your jobs" if position.own else ""
    others = f"{position.others} job{'s' * (position.others > 1)} of others" if position.others else ""
    return f"{' and '.join(filter(None, (own, others)))} {'is' if number == 1 else 'are'} before it"


def _occupancy(fleet: Sequence[FleetDevice], row: Any) -> str:  # noqa: ANN401 - a row of `jobs`
    """The devices that could hold it as a clause; empty where one is free, and of a group, whose free ones are said."""
    able = [each for each in fleet if each.could_hold(row, live=True, taking=True)]
    free = [each for each in able if each.takes_now(row)]
    if row.world_size > 1 or any(each.reserver is None for each in free):
        return ""
    if free:
        return "the free device that could hold it is kept for a job that has waited longer"
    if len(able) == 1:
        return "the one device that could hold it is in use"
    return f"the {len(able)} devices that could hold it are in use"


def _needs(row: Row[Any]) -> str:
    """The requirement as the beginning of a sentence; empty where nothing is known."""
    size = None if row.needs_bytes is None else readable(row.needs_bytes)
    if row.world_size == 1:
        return "" if size is None else f"needs {size}; "
    return f"needs {row.world_size} devices of one node{'' if size is None else f', {size} on each'}; "


def _nowhere(fleet: Sequence[FleetDevice], row: Row[Any]) -> PlacementView:
    """Name the requirement that no known device or worker meets."""
    named = [name for name in (row.model_factory, row.data_factory) if name is not None]
    able = [each for each in fleet if any(suits(row, each.kind, offer.factories) for offer in each.offers)]
    if not able and any(each.offers for each in fleet):
        if named and not any(
            "*" in offer.factories or set(named) <= set(offer.factories) for each in fleet for offer in each.offers
        ):
            message = f"no known worker lists {' and '.join(f'`{name}`' for name in named)}"
        else:
            message = f"its first attempt computed on a device of class `{row.device_class}`, and no worker offers one"
        return PlacementView(status="no_worker", message=message, device=None)
    largest = max(able or fleet, key=lambda each: each.capacity_bytes)
    if row.world_size > 1 and largest.kind != "host":
        message = f"{_needs(row)}the most that a known node has of that size is {most_on_a_node(fleet, row)}"
        return PlacementView(status="no_device", message=message, device=None)
    ranks = "" if row.world_size == 1 else f" for {row.world_size} ranks on one host"
    message = (
        f"needs {readable(needs_on(row, largest.kind))}{ranks}; the largest known device is {largest.uuid} "
        f"with {readable(largest.capacity_bytes)}"
    )
    return PlacementView(status="no_device", message=message, device=None)


def readable(size_bytes: int) -> str:
    """Return bytes with a decimal unit and three significant digits, such as `1.07 GB`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes} B"
