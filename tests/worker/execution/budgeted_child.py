"""A process of its own that measures one wide layer under limits that the kernel holds; says in JSON how it went.

    python -P tests/worker/execution/budgeted_child.py WIDTH BUDGET_BYTES LITTLE_BYTES RUNGS_WIDTH

The factors are collected first; limit and budget are set upon what is held then, so that they bind the
decomposition alone. Before, each rung is tried under both ends of what its figure may be.
"""

import contextlib
import json
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from scipy.linalg import lapack
from torch import nn

from catalog.analyses.capacity import CapacityParams
from engine.analyses.capacity import Capacity
from engine.collect import JobFactors, collect_or_read
from engine.linalg.eigensolvers import Solver, solvers
from engine.memory.budget import MemoryBudget, resident_bytes, status_bytes, warm_up
from engine.memory.guard import Fallback, FallbackResult, Guard
from engine.memory.out_of_memory import free_memory
from engine.workspace import JobResults, Workspace
from tests.oracles import workspace

CPU = torch.device("cpu")


def first_rung(rungs: Sequence[Fallback[Any]], **_: Any) -> FallbackResult[Any]:
    """What would be done without a guard."""
    return FallbackResult(value=rungs[0].run(), taken=(rungs[0].name,), refused=(), planning_errors=())


@contextlib.contextmanager
def limited(allowed_bytes: int) -> Iterator[None]:
    """So many bytes of data beyond what is held now."""
    free_memory(CPU)
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + allowed_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def collected_layer(width: int) -> Workspace:
    """One wide layer with its factors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 6))
    data = [(torch.randn(16, width), torch.randint(0, 6, (16,)))]
    made = workspace(model, data, "classification", fisher="mc", dtype="float32")
    collect_or_read(made)
    return made


def measured(made: Workspace, budget: MemoryBudget, *, guarded: bool = True) -> dict[str, Any]:
    """The layer's capacity, or how it failed."""
    lines: list[str] = []
    made.machine.budget = budget
    made.machine.guard = Guard(budget=budget, device=CPU, log=lambda _, line: lines.append(line))
    if not guarded:
        made.machine.guard.run_with_fallbacks = first_rung  # type: ignore[assignment,method-assign]
    factors = made.results.of(JobFactors).factors
    made.results = JobResults()
    made.results.of(JobFactors).factors = factors
    try:
        (row,) = Capacity(CapacityParams(), made).rows()
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent judges it
        return {"failed": type(error).__name__, "said": str(error)}
    errors = len(made.machine.guard.planning_errors)
    metrics = {name: getattr(row.metrics, name) for name in ("trace", "spectral_norm", "effective_rank")}
    return {"rungs_A": row.record.rungs_A, "metrics": metrics, "planning_errors": errors, "log": lines}


def under(made: Workspace, allowed_bytes: int, *, guarded: bool) -> dict[str, Any]:
    """The same within a budget that the kernel holds."""
    with limited(allowed_bytes):
        budget = MemoryBudget(device_bytes=2**62, host_bytes=resident_bytes() + allowed_bytes)
        return measured(made, budget, guarded=guarded)


def works(solver: Solver, factor: torch.Tensor, allowed_bytes: int) -> bool:
    """Whether a rung comes to its end within so many bytes."""
    with limited(allowed_bytes):
        try:
            solver.solve(factor)
        except (MemoryError, RuntimeError):
            return False
        return True


def rungs_under_limits(width: int) -> dict[str, list[bool]]:
    """Whether each rung that gives vectors works within its figure over 1.1, and within its figure over 0.8."""
    rows = torch.randn(2 * width, width, generator=torch.Generator().manual_seed(0))
    factor = rows.T @ rows / width
    found = {}
    for solver in solvers(width, "vectors", CPU, factor.dtype, single=True):
        solver.solve(factor[:64, :64].contiguous())
        if solver.cost.name != "jittered":
            found[solver.cost.name] = [
                works(solver, factor, int(solver.cost.host_bytes / share)) for share in (1.1, 0.8)
            ]
    return found


def main(width: int, budget_bytes: int, little_bytes: int, rungs_width: int) -> dict[str, Any]:
    """All of it."""
    torch.set_num_threads(1)
    warm_up()
    # what eigenvalues load is held before the limit
    lapack.dsyevr(torch.eye(64, dtype=torch.float64).numpy(), compute_v=0)
    # first, while what was freed leaves no gaps to allocate in
    by_rung = rungs_under_limits(rungs_width)
    made = collected_layer(width)
    return {
        "rungs": by_rung,
        "unguarded": under(made, budget_bytes, guarded=False),
        "guarded": under(made, budget_bytes, guarded=True),
        "little": under(made, little_bytes, guarded=True),
        "free": measured(made, MemoryBudget.unlimited()),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*(int(argument) for argument in sys.argv[1:]))))
