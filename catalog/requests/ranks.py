"""Ranks, the option `world_size`: processes of one node that compute a job together, each on its own device.

Rank r of W measures the examples of the batches r, r + W, r + 2W, …, and the ranks reduce what they summed, so the
numbers are those of one process. What takes further passes over the data in one process is refused.
"""

from typing import Any

from catalog.record import FieldError
from catalog.requests.pieces import require_one_pass

MAX_WORLD_SIZE = 64
"""More devices than a node has; across nodes a job is divided into pieces (`shards`)."""


def require_ranks(document: Any) -> None:  # noqa: ANN401 - a job document, whose module imports this one
    """Refuse a number of ranks that no node has, and ranks for what one process alone can compute.

    Raises:
        FieldError: If `world_size` is outside 1 to `MAX_WORLD_SIZE`, above 1 for a job that ranks cannot share, or 1
            where the model is to be sharded.
    """
    ranks = document.world_size
    if not 1 <= ranks <= MAX_WORLD_SIZE:
        raise FieldError(
            "world_size",
            f"is {ranks}; take 1 to {MAX_WORLD_SIZE} devices of one node, or `shards` to divide a job over machines",
        )
    if ranks == 1:
        if document.memory.model_sharding == "on":
            raise FieldError(
                "memory.model_sharding", "is on, and one process shares the model with nobody; give `world_size`"
            )
        return
    if document.factors is not None:
        raise FieldError("world_size", f"is {ranks}, and `factors` were collected already; leave `world_size` out")
    if document.extends is not None:
        raise FieldError(
            "world_size", f"is {ranks}, and `extends` adds examples in one process; leave `world_size` out"
        )
    if document.collection.nested:
        raise FieldError(
            "collection.nested",
            f"keeps the first N/8, N/4 and N/2 examples of the data, and `world_size: {ranks}` ranks read them side by "
            "side; give false, or leave `world_size` out",
        )
    if document.collection.reduction == "none":
        raise FieldError(
            "collection.reduction",
            f"is none, which leaves each of `world_size: {ranks}` ranks with factors of its own examples alone; take "
            "`gram`, `gather`, `dense` or `auto`",
        )
    again = (
        f"is {ranks}, and `{{}}` passes over all data in one process; keep the factors, and ask for it in a job of its "
        "own without `world_size`"
    )
    data = f"all data in one process, and `world_size` is {ranks}"
    require_one_pass(document, "world_size", again, data, "leave `world_size` out")
