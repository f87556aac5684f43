"""Bytes of gradient rows beside those of dense sums, of factors that leave a device, and of what libraries take."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.collection.probe import row_sizes
from engine.estimate import plan_job
from engine.factors.departure import departing_bytes
from engine.memory.budget import MemoryBudget
from engine.planning.collection.memory import leaving_terms
from tests.oracles import workspace


def test_merged_rows_are_two_squares_and_their_factorisations_copy() -> None:
    layers = [SimpleNamespace(name=str(size), out_dim=size) for size in (3, 10, 40)]
    kept = SimpleNamespace(kind="woodbury", rows=30, basis=False, gram_rows=lambda size: 0)
    probe: Any = SimpleNamespace(layers=layers, kept=lambda layer: kept, dtype=torch.float64)
    sizes = {name: size for name, _, size, _, _ in row_sizes(probe, on_device=False)}
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


@pytest.mark.parametrize(("self_check", "held"), [("growing", 119_511_040), ("off", 116_302_848)])
def test_a_small_job_on_a_gpu_is_planned_with_what_its_libraries_hold(self_check: str, held: int) -> None:
    # most bytes that torch had allocated of these jobs on an H100: `mlp` of benchmarks/results/device.json
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    chunk = torch.zeros(256, 784), torch.zeros(256, dtype=torch.int64)
    options: dict[str, Any] = {"fisher": "empirical", "dtype": "float32", "exact_trace": False}
    made = workspace(model, [chunk], "classification", batch_size=256, self_check=self_check, **options)
    made.machine.device, made.options.decomposition = torch.device("cuda"), "none"
    made.machine.budget = MemoryBudget(device_bytes=2**36, host_bytes=2**40)
    assert plan_job(made).stage_bytes("device", "collection") == pytest.approx(held, rel=0.01)
    made.machine.device = torch.device("cpu")
    assert {term.place for term in plan_job(made).terms if term.name == "libraries"} == {"host"}
