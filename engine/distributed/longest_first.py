"""Longest first: a division of work over equal workers, the longest item to the one that has least so far.

The last worker to end takes at most 4/3 − 1/(3m) times as long as in the best division over m workers. Equal inputs
give equal divisions: among equal costs the first item comes first, and among workers with equal loads the first.

References:
    Graham (1969), Bounds on multiprocessing timing anomalies
"""

import heapq
from collections.abc import Sequence


def divide_longest_first(costs: Sequence[float], workers: int) -> tuple[int, ...]:
    """Divide items over workers.

    Args:
        costs: Cost of each item, not negative, in any unit.
        workers: m, at least 1.

    Returns:
        The worker of each item, from 0.

    Raises:
        ValueError: If `workers` is below 1.
    """
    if workers < 1:
        raise ValueError(f"`workers` must be at least 1 (got {workers})")
    loads = [(0.0, worker) for worker in range(workers)]
    found = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        load, worker = heapq.heappop(loads)
        found[place] = worker
        heapq.heappush(loads, (load + costs[place], worker))
    return tuple(found)


def longest_share(costs: Sequence[float], workers: int) -> float:
    """Return the busiest worker's part of the whole cost, between 1/m and 1; 1 where nothing costs anything."""
    loads = [0.0] * workers
    for cost, worker in zip(costs, divide_longest_first(costs, workers), strict=True):
        loads[worker] += cost
    total = sum(loads)
    return max(loads) / total if total > 0 else 1.0
