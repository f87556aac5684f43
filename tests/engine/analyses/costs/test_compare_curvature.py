"""The planned bytes of a comparison, against the profiler's account of every allocation."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from catalog.analyses.compare_curvature import CompareCurvatureParams
from engine import estimate
from engine.analyses.compare_curvature import Comparison
from engine.analyses.costs.compare_curvature import _side_bytes
from engine.analyses.factors import KeptFactors
from engine.factors.dense import as_operator
from engine.factors.low_rank import LowRank
from engine.memory.budget import MemoryBudget
from engine.memory.guard import Guard
from engine.memory.plan import Plan
from engine.operators.pairs.matrix_pair import Symmetric
from engine.operators.pairs.side_comparison import compare_sides
from engine.workspace import Machine, Workspace
from tests.memory_profile import peak_bytes, peak_bytes_within
from tests.oracles import MemoryArtifacts, workspace

K = 20


def gram(size: int, seed: int) -> Tensor:
    rows = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return rows.T @ rows


def gradient_rows(size: int, count: int, seed: int) -> LowRank:
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return LowRank(rows=rows, scales=torch.ones(count, dtype=torch.float64), weight=1.0)


@pytest.mark.part(of=16, by=())
@pytest.mark.parametrize("kept", ["dense", "rows"])
def test_what_comparing_two_factors_takes_is_what_the_plan_says(kept: str) -> None:
    dense = kept == "dense"
    size, count = (900, None) if dense else (20_000, 120)
    first, second = (
        Symmetric(side=as_operator(gram(size, seed) if count is None else gradient_rows(size, count, seed)))
        for seed in (0, 1)
    )
    work = partial(
        compare_sides, (first, second), "fc", vectors=K, damping=(size / 10, size / 10), guard=Guard.unlimited()
    )
    planned = _side_bytes(size, count, torch.float32, 2**40) + 2 * 8 * size * K * dense
    assert 0.8 <= planned / peak_bytes(work) <= 1.1


def collecting(kind: str, hidden: int = 300) -> Workspace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, hidden), nn.Tanh(), nn.Linear(hidden, 10))
    data = [(torch.randn(16, 1000), torch.randint(0, 10, (16,)))]
    made = workspace(model, data, "classification", fisher="mc", dtype="float32", batch_size=16)
    made.options.kinds, made.options.keep, made.inputs.examples = (kind,), (), 16
    made.options.decomposition = "none"
    made.options.params = {"compare_curvature": CompareCurvatureParams(k=(1, K))}
    made.ports.scratch = MemoryArtifacts()
    return made


def test_the_stage_of_a_job_takes_what_its_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = collecting("factors")
    for _ in KeptFactors(None, kept).rows():
        pass
    made = collecting("compare_curvature")
    made.inputs.stored_against = kept.ports.artifacts

    @contextlib.contextmanager
    def operation(machine: Machine, name: str, stage: str | None = None) -> Iterator[None]:
        del machine, stage
        with torch.profiler.record_function(name):
            yield

    monkeypatch.setattr(Machine, "operation", operation)

    def compare() -> None:
        rows = list(Comparison(CompareCurvatureParams(k=(1, K)), made).rows())
        assert [row.metrics.product.distance for row in rows] == [0, 0]

    (most,) = peak_bytes_within(compare, "compare_curvature of layer").values()
    assert made.results.plan is not None
    assert 0.8 <= _bare(made.results.plan).stage_bytes("host", "compare_curvature") / most <= 1.1


def _bare(plan: Plan) -> Plan:
    """Without what the process held before, and what panels take where matrices are larger than one."""
    left_out = ("libraries", "panels")
    return replace(
        plan, terms=tuple(each for each in plan.terms if each.source != "measured" and each.name not in left_out)
    )


def test_seconds_grow_with_the_cube_of_a_layer_and_a_small_budget_takes_a_solver_that_needs_less() -> None:
    small, large = (estimate.plan_job(collecting("compare_curvature", hidden)).seconds for hidden in (1000, 4000))
    # of 4 · 1000 rows and 11 of the head: A of the first layer stays
    assert 15 < (large["compare_curvature"] / small["compare_curvature"]) < 4**3
    assert "compare_curvature" not in estimate.plan_job(collecting("factors")).seconds
    ample, scarce = collecting("compare_curvature", 1500), collecting("compare_curvature", 1500)
    wanted = estimate.plan_job(ample).stage_bytes("host", "compare_curvature")
    scarce.machine.budget = MemoryBudget(device_bytes=2**60, host_bytes=int(wanted * 0.97))
    assert estimate.plan_job(scarce).stage_bytes("host", "compare_curvature") <= wanted
    assert math.isfinite(small["compare_curvature"])
