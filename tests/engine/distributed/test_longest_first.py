"""The division by longest first: within Graham's bound of the best one, and the same every time."""

import itertools
import random

import pytest

from engine.distributed.longest_first import divide_longest_first, longest_share


def makespan(costs: list[float], division: tuple[int, ...], workers: int) -> float:
    return max(
        sum(cost for cost, own in zip(costs, division, strict=True) if own == worker) for worker in range(workers)
    )


def best(costs: list[float], workers: int) -> float:
    """By trying every division."""
    return min(makespan(costs, each, workers) for each in itertools.product(range(workers), repeat=len(costs)))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_last_to_end_is_within_the_bound_of_the_best_division(workers: int) -> None:
    draw = random.Random(workers)
    for _ in range(40):
        costs = [float(draw.choice((1, 2, 3, 5, 8, 30, 31)) ** draw.choice((1, 3))) for _ in range(draw.randint(1, 7))]
        division = divide_longest_first(costs, workers)
        assert len(division) == len(costs)
        assert set(division) <= set(range(workers))
        bound = (4 / 3 - 1 / (3 * workers)) * best(costs, workers)
        assert makespan(costs, division, workers) <= bound * (1 + 1e-12)
        assert longest_share(costs, workers) == pytest.approx(makespan(costs, division, workers) / sum(costs))


def test_the_bound_is_reached_by_the_known_example() -> None:
    # 2m + 1 items of 2m − 1, 2m − 1, …, m, m, m: ends at 4m − 1, and the best division at 3m
    costs = [5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0]
    assert makespan(costs, divide_longest_first(costs, 3), 3) == 11
    assert best(costs, 3) == 9


def test_ties_go_to_the_first_item_and_the_first_worker() -> None:
    assert divide_longest_first([1.0, 1.0, 1.0, 1.0], 2) == (0, 1, 0, 1)
    assert divide_longest_first([1.0, 8.0, 1.0], 2) == (1, 0, 1)
    assert divide_longest_first([], 3) == ()
    assert longest_share([0.0, 0.0], 2) == 1.0


def test_no_worker_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        divide_longest_first([1.0], 0)
