"""Bytes of gradient rows beside those of dense sums, and of factors on their way from a device."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from engine.factors.departure import departing_bytes
from engine.planning.collection.memory import leaving_terms
from engine.planning.layer_memory import row_sizes
from tests.oracles import workspace


def test_merged_rows_are_two_squares_and_their_factorisations_copy() -> None:
    layers = [SimpleNamespace(name=str(size), out_dim=size) for size in (3, 10, 40)]
    kept = SimpleNamespace(kind="woodbury", rows=30, basis=False, gram_rows=lambda size: 0)
    probe: Any = SimpleNamespace(layers=layers, kept=lambda layer: kept, dtype=torch.float64)
    sizes = {name: size for name, _, size, _, _ in row_sizes(probe)}
    # 30 rows of 40 numbers are not merged; of 10 numbers 2n rows are, which their factorisation copies
    assert sizes["merged gradient rows"] == 2 * (2 * 10) * 10 * 8


def test_factors_that_leave_once_wait_where_they_were_summed() -> None:
    space = workspace(nn.Linear(3, 2), [], "classification")
    probe: Any = SimpleNamespace(dtype=torch.float32)
    assert leaving_terms(space, "host", 40, probe, 6400) == []
    space.machine.device = torch.device("cuda")
    # decompositions want them elsewhere
    assert leaving_terms(space, "device", 40, probe, 6400) == []
    space.options = replace(space.options, decomposition="none")
    planned = {(each.name, each.place): each.size_bytes for each in leaving_terms(space, "device", 40, probe, 6400)}
    gathered, pinned = departing_bytes(40 * 40, 4)
    assert planned == {
        ("factors that wait", "device"): 6400,
        ("panels", "device"): gathered,
        ("panels", "host"): pinned,
    }
    assert leaving_terms(space, "device", 40, probe, 0) == []
