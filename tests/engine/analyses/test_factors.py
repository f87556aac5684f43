"""The summary of `factors` on a net whose sizes are counted by hand."""

import pytest
import torch
from torch import nn

from kronoscope.local import measure


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("float64", 8)])
def test_dense_bytes_are_the_squares_of_all_sides(dtype: str, item: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    data = [(torch.randn(16, 6), torch.randint(0, 5, (16,)))]
    found = measure(net, data, task="classification", kinds=("factors",), collection={"dtype": dtype})
    squares = (6 + 1) ** 2 + 8**2 + (8 + 1) ** 2 + 5**2
    assert found.summary["factors"].dense_factor_bytes == item * squares
    assert found.summary["factors"].factor_bytes == item * squares
