"""Example runs: the indices of the examples that went by, as runs of consecutive ones.

Data come in the order of their indices nearly always, and then all of them are one run, whatever their number. Where
they are scattered into more than ``MOST_RUNS`` runs, which they are is given up, and only how many is known.
"""

from collections.abc import Iterable

from torch import Tensor

MOST_RUNS = 65_536


def runs_of(index: Tensor) -> list[list[int]]:
    """Return the runs ``[begin, end]``, ascending, of a batch's indices (N,), int64.

    An index that comes twice is in two runs.
    """
    ordered = index.sort().values.cpu()
    if ordered.numel() == 0:
        return []
    breaks = ((ordered[1:] - ordered[:-1]) != 1).nonzero().flatten().tolist()
    begins, ends = [0, *(place + 1 for place in breaks)], [*breaks, ordered.numel() - 1]
    return [[int(ordered[begin]), int(ordered[end]) + 1] for begin, end in zip(begins, ends, strict=True)]


def joined(runs: Iterable[list[int]]) -> list[list[int]]:
    """Join runs ``[begin, end]``, in any order, that follow each other, to as few as there can be, ascending.

    Runs that overlap are left apart.
    """
    found: list[list[int]] = []
    for begin, end in sorted(runs):
        if found and found[-1][1] == begin:
            found[-1][1] = end
        else:
            found.append([begin, end])
    return found


def overlap(runs: Iterable[list[int]]) -> int | None:
    """Return the first example that is in two of the runs ``[begin, end]``, in any order; None if they are disjoint."""
    reached: int | None = None
    for begin, end in sorted(runs):
        if reached is not None and begin < reached:
            return begin
        reached = end if reached is None else max(reached, end)
    return None
