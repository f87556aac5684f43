"""An honest test of the guard: limits that the kernel holds in processes of their own, and the profiler's account."""

import gc
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog.requests.memory import Memory
from engine.errors import BudgetExceeded
from engine.estimate import plan_job
from engine.linalg.eigendecomposition import decompose, rungs
from engine.memory.budget import MemoryBudget, resident_bytes
from engine.memory.guard import Fallback, Guard
from engine.memory.plan import Plan
from tests.memory_profile import peak_bytes
from tests.oracles import MemoryArtifacts, workspace

pytestmark = pytest.mark.real_programs

CHILD = Path(__file__).with_name("budgeted_child.py")
ROOT = Path(__file__).parents[3]
WIDTH = 1500
BUDGET = 34_000_000
LITTLE = 12_000_000
"""`host_float64` takes 36.8 MB of 1501 rows beside what reading the factor takes, and `host_syevr` 18.8 MB."""


@pytest.fixture(scope="module")
def found() -> Any:
    """What a process of its own found under the limits."""
    run = subprocess.run(
        [sys.executable, "-P", str(CHILD), str(WIDTH), str(BUDGET), str(LITTLE), "700"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        # what is freed goes back to the kernel at once, so that its account is that of what is held
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
        },
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Collecting garbage looks at what these tests make, and not at what others before them have left."""
    gc.collect()
    gc.freeze()


def test_a_budget_that_the_kernel_holds_ends_a_job_only_without_the_guard(found: Any) -> None:
    unguarded, guarded, free = found["unguarded"], found["guarded"], found["free"]
    assert "you tried to allocate" in unguarded["said"]
    assert free["rungs_A"] == ["host_float64"]
    assert guarded["rungs_A"] == ["host_syevr"]
    # it was passed over, not found out
    assert guarded["planning_errors"] == 0
    assert any("`host_float64`" in line and "passed over" in line for line in guarded["log"])
    for name, value in free["metrics"].items():
        assert guarded["metrics"][name] == pytest.approx(value, rel=1e-12)


def test_a_budget_below_the_last_rung_ends_with_what_would_do(found: Any) -> None:
    ended = found["little"]
    assert ended["failed"] == "BudgetExceeded"
    assert "`host_syevr` requested 17.9 MiB" in ended["said"]
    assert "raise `memory.host` to" in ended["said"]


def test_every_rung_takes_what_it_says(found: Any) -> None:
    """By the kernel, to whom LAPACK's workspaces in numpy's memory are as good as torch's."""
    rungs = found["rungs"]
    assert set(rungs) == {"host_float64", "host_syevr", "host_in_place", "host_float32_in_place"}
    assert all(works == [False, True] for works in rungs.values()), rungs


@pytest.mark.parametrize("need", ["values", "vectors"])
def test_the_profiler_sees_what_was_foreseen_and_misses_none_of_it(need: Any) -> None:
    size = 700
    rows = torch.randn(2 * size, size, generator=torch.Generator().manual_seed(0))
    factor = rows.T @ rows
    (first, *_) = rungs(size, need=need, device=factor.device)
    peak = peak_bytes(partial(decompose, factor, "fc", need=need))
    assert 0.8 <= first.host_bytes / peak <= 1.1
    # each matrix that the figure is made of: without one of them it would not hold
    assert not 0.8 <= (first.host_bytes - 8 * size * size) / peak <= 1.1


def _budgeted(budget_bytes: int) -> Plan:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    made = workspace(model, [(torch.randn(64, 256), torch.randn(64, 256))], "regression", batch_size=64, fisher="mc")
    made.ports.scratch, made.options.memory = MemoryArtifacts(), Memory()
    made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=resident_bytes() + budget_bytes)
    return plan_job(made)


def test_more_memory_is_never_slower_and_never_too_little() -> None:
    budgets = [int(100e6 * 1.05**step) for step in range(20)]
    found = []
    for budget in budgets:
        plan = _budgeted(budget)
        fits = plan.fits(MemoryBudget(device_bytes=2**62, host_bytes=resident_bytes() + budget))
        found.append((fits, len(plan.chosen.parts), -(plan.chosen.micro_batch or 64)))
    feasible = [fits for fits, _, _ in found]
    assert feasible == sorted(feasible)
    assert feasible[-1]
    times = [(passes, slices) for fits, passes, slices in found if fits]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) > 2


def test_the_ladder_is_never_slower_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = rungs(2000, need="vectors", device=torch.device("cpu"))
    flops = {cost.name: cost.seconds_flops for cost in ladder}
    steps = [
        Fallback(name=cost.name, formula=cost.formula, device_bytes=0, host_bytes=cost.host_bytes, run=lambda: None)
        for cost in ladder
    ]
    tried = []
    for budget in range(20, 120, 5):
        monkeypatch.setattr(Guard, "free_bytes", lambda _, __, budget=budget: budget * 10**6)
        try:
            taken = Guard.unlimited().run_with_fallbacks(steps, what="w", layer=None, stage="decomposition").taken
        except BudgetExceeded:
            tried.append(float("inf"))
        else:
            tried.append(flops[taken[0]])
    assert tried == sorted(tried, reverse=True)
    assert len(set(tried)) == 4


class _AtEachOperation(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.seen = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("need", ["values", "vectors"])
def test_a_decomposition_survives_a_failure_at_any_of_its_allocations(need: Any) -> None:
    rows = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    factor: Tensor = rows.T @ rows
    kept = factor.clone()
    with _AtEachOperation(0):
        # torch takes another way to the values alone where a mode looks on
        wanted = decompose(factor, "fc", need=need)
    at, survived = 0, 0
    while True:
        at += 1
        mode = _AtEachOperation(at)
        keeper = Guard.unlimited()
        try:
            with mode:
                found = decompose(factor, "fc", need=need, guard=keeper)
        except torch.OutOfMemoryError:
            # before the ladder begins nothing is large
            assert not keeper.planning_errors
            continue
        assert torch.equal(factor, kept)
        assert torch.equal(found.values, wanted.values)
        assert found.rungs == wanted.rungs
        if mode.seen < at:
            break
        survived += 1
        assert len(keeper.planning_errors) == 1
    assert survived > 5
