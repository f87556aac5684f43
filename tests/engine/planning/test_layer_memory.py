"""Bytes of gradient rows beside those of dense sums."""

from types import SimpleNamespace
from typing import Any

import torch

from engine.planning.layer_memory import row_sizes


def test_merged_rows_are_two_squares_and_their_factorisations_copy() -> None:
    layers = [SimpleNamespace(name=str(size), out_dim=size) for size in (3, 10, 40)]
    kept = SimpleNamespace(kind="woodbury", rows=30, basis=False, gram_rows=lambda size: 0)
    probe: Any = SimpleNamespace(layers=layers, kept=lambda layer: kept, dtype=torch.float64)
    sizes = {name: size for name, _, size, _, _ in row_sizes(probe)}
    # 30 rows of 40 numbers are not merged; of 10 numbers 2n rows are, which their factorisation copies
    assert sizes["merged gradient rows"] == 2 * (2 * 10) * 10 * 8
