"""The effective rank of a spectrum that is known by its effective dimensions alone."""

import pytest
import torch
from torch import Tensor

from engine.analyses.metrics.kronecker_metrics import effective_rank


@pytest.mark.parametrize("lowest", [1e-9, 1e-5])
def test_the_effective_rank_is_never_asked_below_its_lowest_shift(lowest: float) -> None:
    values = torch.tensor([50.0, 30.0, 15.0, 5.0], dtype=torch.float64)
    asked: list[float] = []

    def effective_dimensions(shifts: Tensor) -> Tensor:
        asked.extend(shifts.tolist())
        return (values / (values + shifts[:, None])).sum(1)

    shares = values / values.sum()
    expected = float((-(shares * shares.log()).sum()).exp())
    assert effective_rank(float(values.sum()), effective_dimensions, lowest) == pytest.approx(expected, rel=1e-3)
    assert lowest * (1 - 1e-12) <= min(asked) < 3 * lowest
