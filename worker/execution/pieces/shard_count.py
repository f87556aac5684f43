"""Shard count: the number of pieces that `shards: auto` takes, from the plan and the devices at hand.

    N = min(2 · devices, ⌊seconds of the whole collection / 60⌋, places to cut), at least 1;  1 with one device

Two pieces for each device let a fast one take more than a slow one, and halve what a killed worker loses. A piece loads
the model, probes it and is merged, which takes seconds; below a minute of work that is no longer small beside it. One
device gains nothing from pieces.
"""

from collections.abc import Mapping
from typing import Any

from catalog.requests.pieces import PIECES_PER_DEVICE, auto_pieces

LEAST_SECONDS = 60.0
"""Collection that makes a piece worth while."""


def most_pieces(devices: int, cuts: int) -> int:
    """Return the number of pieces that `auto` takes where the collection is long."""
    return max(1, min(auto_pieces(devices), cuts))


def choose_count(plan: Mapping[str, Any], planned: int, devices: int, cuts: int) -> tuple[int, str]:
    """Choose the number of pieces."""
    most = most_pieces(devices, cuts)
    if most == 1:
        what = f"{devices} device is" if devices == 1 else f"{devices} devices are"
        return 1, f"{what} at hand, and the data have {cuts} place{'s' if cuts > 1 else ''} to begin a piece"
    foreseen = (plan.get("stages") or {}).get("collection", {}).get("seconds")
    if foreseen is None:
        return most, f"{devices} devices are at hand, and nobody foresees how long the collection takes"
    seconds = foreseen * planned
    count = max(1, min(most, int(seconds // LEAST_SECONDS)))
    limit = (
        f"a piece of less than {LEAST_SECONDS:.0f} s is not worth its start"
        if count < most
        else f"{PIECES_PER_DEVICE} pieces for each of {devices} devices"
    )
    return count, f"the collection takes about {seconds:.0f} s of one device; {limit}"
