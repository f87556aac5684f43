"""One measured job over one of six models, in a process of its own.

    python -m benchmarks.cases.planning CASE --folder DIR [--above BYTES] [--budgets BYTES] [--limit] [--unguarded]
        [--profile CHOSEN] [--candidate PASSES MICRO_BATCH]

What the kernel and the profiler say of each stage goes to standard output as one line of JSON. A budget is
``--above`` what the process holds once the model and the data are there; ``--limit`` has the kernel hold it.
``--budgets`` looks for three below what the job was measured to take without a guard.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases.planning_models import CASES, Case
from catalog.analyses.capacity import CapacityParams
from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.analyses.capacity import Capacity
from engine.collection import run_passes
from engine.estimate import plan_job
from engine.memory.budget import MemoryBudget, give_back_host_memory, resident_bytes, status_bytes, warm_up
from engine.memory.guard import Fallback, FallbackResult, Guard
from engine.memory.plan import Chosen, Plan
from engine.workspace import JobOptions, JobResults, Machine, ModelInputs, Ports, Workspace

STAGES = ("collection", "decomposition")


class Folder:
    """Artifacts in files: what is laid aside must not be held."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _file(self, name: str) -> Path:
        return self._path / (name.replace("/", "_") + ".kept")  # torch reads what ends in .safetensors as such

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write tensors."""
        del metadata
        torch.save({key: tensor.contiguous() for key, tensor in tensors.items()}, self._file(name))

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        """Read them."""
        found: dict[str, Tensor] = torch.load(self._file(name))
        return found

    def save_json(self, name: str, value: object) -> None:
        """Write a table."""
        self._file(name).write_text(json.dumps(value))

    def load_json(self, name: str) -> Any:  # noqa: ANN401 - whatever was written
        """Read it."""
        return json.loads(self._file(name).read_text())

    def remove(self, name: str) -> None:
        """Let go of it."""
        self._file(name).unlink(missing_ok=True)


@dataclass
class Peaks:
    """The kernel's highest resident set within each stage, and the profiler's marks of it."""

    held_bytes: int
    stages: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Forget the peak so far, and read it in the end."""
        Path("/proc/self/clear_refs").write_text("5")
        begun = time.perf_counter()
        try:
            with torch.profiler.record_function(f"stage: {name}"):
                yield
        finally:
            self.stages[name] = max(self.stages.get(name, 0), status_bytes("VmHWM") - self.held_bytes)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun


def stage_of(operation: str) -> str | None:
    """Which of the plan's stages an operation of a job belongs to."""
    if operation.startswith(("pass ", "factors of pass ")):
        return "collection"
    return "decomposition" if operation.startswith("layer ") else None


def workspace(case: Case, folder: Path) -> Workspace:
    """The job."""
    torch.manual_seed(0)
    model = case.make().eval()
    data = case.data()
    return Workspace(
        inputs=ModelInputs(
            model=model, batches=lambda: iter(data), task=Task(type=case.task), examples=case.batch_size
        ),
        options=JobOptions(
            collection=Collection(fisher="mc", batch_size=case.batch_size), kinds=("capacity",), keep=("spectra",)
        ),
        ports=Ports(artifacts=Folder(folder), scratch=Folder(folder)),
    )


def foreseen(plan: Plan) -> dict[str, int]:
    """The plan's bytes of each stage, beside what the process held before and what libraries may still load."""
    bare = Plan(
        terms=tuple(term for term in plan.terms if term.source != "measured" and term.name != "libraries"),
        chosen=plan.chosen,
    )
    return {stage: bare.stage_bytes("host", stage) for stage in STAGES}  # type: ignore[arg-type]


class Unhurried(Guard):
    """Finds room for all that a plan counts, and none for what is read ahead into memory that is left over.

    Another thread reads it, of which the profiler keeps no account.
    """

    def fits(self, *, device_bytes: int = 0, host_bytes: int = 0) -> bool:
        """Never."""
        del device_bytes, host_bytes
        return False


def unguarded() -> None:
    """What would be done without a guard: the first rung, whatever is free."""

    def first(_: Guard, rungs: Sequence[Fallback[Any]], **__: object) -> FallbackResult[Any]:
        return FallbackResult(value=rungs[0].run(), taken=(rungs[0].name,), refused=(), planning_errors=())

    Guard.run_with_fallbacks = first  # type: ignore[assignment,method-assign]
    run_passes.ran_out_of_memory = lambda _: False  # type: ignore[assignment]


def profiled_stages(profiler: profile) -> dict[str, int]:
    """Most bytes that torch's allocator held within each stage, beyond what it held when the profiler began."""
    if profiler.profiler is None:
        return {}
    recorded = list(profiler.profiler.kineto_results.events())
    spans = [
        (each.name().removeprefix("stage: "), each.start_ns(), each.end_ns())
        for each in recorded
        if each.name().startswith("stage: ")
    ]
    held, most = 0, dict.fromkeys((name for name, _, _ in spans), 0)
    for each in sorted((each for each in recorded if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += each.nbytes()
        for name, begun, ended in spans:
            if begun <= each.start_ns() <= ended:
                most[name] = max(most[name], held)
    return most


def planned(made: Workspace) -> Plan:
    """The job's plan."""
    plan = plan_job(dataclasses.replace(made, results=JobResults()))
    gc.collect()
    give_back_host_memory()
    return plan


def decided(plan: Plan) -> dict[str, Any]:
    """What a plan chose, and what it counted."""
    ordered = sorted(plan.terms, key=lambda term: -term.size_bytes)
    return {
        "foreseen": foreseen(plan),
        "peak": plan.peak_bytes("host"),
        "passes": len(plan.chosen.parts),
        "micro_batch": plan.chosen.micro_batch,
        "chosen": dataclasses.asdict(plan.chosen),
        "why": plan.why,
        "largest_terms": [(term.name, term.stage, term.size_bytes) for term in ordered[:8]],
    }


def budgets(made: Workspace, whole: Plan, held: int, taken: int) -> dict[str, Any]:
    """The least budget that a plan fits, and two between it and what was ``taken`` without a guard; and a sweep.

    The sweep goes from the least to what the plan counts for the whole, which reserves memory for libraries, too.
    """

    def at(above: int) -> Plan:
        made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=held + above)
        return planned(made)

    most = whole.peak_bytes("host") - held
    least, fits = most // 8, most
    while fits - least > most // 64:
        middle = (least + fits) // 2
        if at(middle).fits(made.machine.budget):
            fits = middle
        else:
            least = middle
    # what a process holds before its job differs by a few megabytes from run to run
    fits += most // 24
    chosen = [fits + share * (taken - fits) // 3 for share in range(3)]
    sweep = []
    for above in (fits - most // 32, *(fits + share * (most - fits) // 6 for share in range(7)), most + most // 32):
        plan = at(above)
        slices = plan.chosen.micro_batch or made.options.collection.batch_size
        sweep.append((above, plan.fits(made.machine.budget), len(plan.chosen.parts), slices))
    return {"above": chosen, "whole": most, "taken": taken, "sweep": sweep, **decided(whole)}


def candidate(made: Workspace, plan: Plan, passes: int, micro_batch: int) -> Chosen:
    """Layers in so many passes, examples in such slices."""
    names = [name for part in plan.chosen.parts for name in part]
    cut = -(-len(names) // passes)
    parts = tuple(tuple(names[start : start + cut]) for start in range(0, len(names), cut))
    return Chosen(parts=parts, micro_batch=min(micro_batch, made.options.collection.batch_size))


def run(made: Workspace, *, profiled: bool) -> dict[str, Any]:
    """Do the job, and say what each stage took."""
    peaks = Peaks(resident_bytes())
    activities = [ProfilerActivity.CPU]
    begun, worked = time.perf_counter(), time.process_time()
    try:
        with (
            patch.object(Machine, "operation", _staged(peaks)),
            profile(activities=activities, profile_memory=True) if profiled else contextlib.nullcontext() as profiler,
        ):
            rows = list(Capacity(CapacityParams(), made).rows())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what happened
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    seconds, worked = time.perf_counter() - begun, time.process_time() - worked
    found = [row for row in rows if row.metrics is not None]
    return {
        **({} if made.results.plan is None else decided(made.results.plan)),
        "seconds": seconds,
        "processor_seconds": worked,
        "measured": peaks.stages,
        "stage_seconds": peaks.seconds,
        "planning_errors": len(made.machine.guard.planning_errors),
        "rungs": sorted({rung for row in found for rung in (*(row.record.rungs_A or ()), *(row.record.rungs_G or ()))}),
        "trace": sum(row.metrics.trace for row in found),
        **({} if profiler is None else {"profiled": profiled_stages(profiler)}),
    }


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--above")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--budgets", type=int)
    for flag in ("--limit", "--unguarded"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--profile", type=Path, metavar="CHOSEN")
    parser.add_argument("--candidate", type=int, nargs=2, metavar=("PASSES", "MICRO_BATCH"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    made = workspace(CASES[options.case], options.folder)
    # what planning and eigenvalues load is there from now on
    planned(made)
    torch.linalg.eigvalsh(torch.eye(300, dtype=torch.float64))
    give_back_host_memory()
    held = resident_bytes()
    if options.above is not None:
        made.machine.budget = MemoryBudget(device_bytes=2**62, host_bytes=held + int(options.above))
    plan = planned(made)
    if options.budgets is not None:
        print(json.dumps(budgets(made, plan, held, options.budgets)))
        return
    made.machine.guard = Guard(budget=made.machine.budget, device=made.machine.device, log=lambda _, __: None)
    if options.candidate is not None:
        made.resume.chosen = candidate(made, plan, *options.candidate)
    if options.profile is not None:
        # The profiler's own records are resident, too, and would be taken for the job's: the way that was chosen
        # without it is gone again, with nothing refused. Whether it was the same is told by the rungs.
        made.resume.chosen = Chosen.read(json.loads(options.profile.read_text()))
        made.machine.budget = MemoryBudget.unlimited()
        made.machine.guard = Unhurried(budget=made.machine.budget, device=made.machine.device, log=lambda _, __: None)
    if options.unguarded:
        unguarded()
        made.machine.budget = MemoryBudget.unlimited()
    if options.limit:
        limit = status_bytes("VmData") + int(options.above)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    print(json.dumps(run(made, profiled=options.profile is not None)))


def _staged(peaks: Peaks) -> Callable[..., contextlib.AbstractContextManager[None]]:
    def operation(_: Machine, name: str, stage: str | None = None) -> contextlib.AbstractContextManager[None]:
        stage = stage_of(name)
        return contextlib.nullcontext() if stage is None else peaks.stage(stage)

    return operation


if __name__ == "__main__":
    # what is freed goes back to the kernel at once, so that its account is that of what is held
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**16)  # M_TRIM_THRESHOLD
    sys.exit(main())
