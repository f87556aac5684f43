"""Six models at sizes at which memory counts, and one measured job over one of them in a process of its own.

    python -m benchmarks.planning_cases CASE --folder DIR [--above BYTES] [--budgets] [--limit] [--unguarded]
        [--profile] [--candidate PASSES MICRO_BATCH]

What the kernel and the profiler say of each stage goes to standard output as one line of JSON. A budget is
``--above`` what the process holds once the model and the data are there; ``--limit`` has the kernel hold it.
"""

import argparse
import contextlib
import copy
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

import torch
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from catalog.capacity import CapacityParams
from catalog.collection import Collection
from catalog.inputs import Task
from engine.analyses.capacity import measure_capacity
from engine.curvature import gathering
from engine.curvature.planning import plan_job
from engine.memory.budget import MemoryBudget, give_back_host_memory, resident_bytes, status_bytes
from engine.memory.guard import Descended, Guard, Rung
from engine.memory.hold import warm_up
from engine.memory.plan import Chosen, Plan
from engine.workspace import Workspace

Data = list[tuple[Any, ...]]
STAGES = ("collection", "decomposition")


@dataclass(frozen=True)
class Case:
    """A model, its data, and how it is measured."""

    make: Callable[[], nn.Module]
    data: Callable[[], Data]
    task: str
    batch_size: int


def _digits_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


class _Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(entering, width, 3, stride, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(entering, width, 1, stride, bias=False) if stride > 1 or entering != width else None

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(inside)) + (x if self.around is None else self.around(x)))


def _digits_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 192, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192 * 16, 10),
    )  # fmt: skip


def _resnet18() -> nn.Module:
    widths = (32, 32, 64, 64, 128, 128, 160, 160)
    blocks = [
        _Block(before, after, 2 if after != before and place else 1)
        for place, (before, after) in enumerate(zip((32, *widths), widths, strict=False))
    ]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 10),
    )  # fmt: skip


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=3, n_head=4, n_embd=256, n_positions=128, vocab_size=2000)
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=256, intermediate_size=1024,
        vocab_size=1500, max_position_embeddings=128,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _minilm() -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=3, num_attention_heads=12, hidden_size=384, intermediate_size=1536, vocab_size=3000,
        max_position_embeddings=128,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)


def _images(count: int, *shape: int) -> Data:
    return [(torch.randn(count, *shape), torch.randint(0, 10, (count,)))]


def _tokens(count: int, length: int, vocabulary: int) -> Data:
    ids = torch.randint(0, vocabulary, (count, length))
    return [({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids)]


CASES = {
    "digits MLP": Case(_digits_mlp, lambda: _images(8192, 1, 8, 8), "classification", 8192),
    "digits CNN": Case(_digits_cnn, lambda: _images(768, 1, 8, 8), "classification", 768),
    "ResNet-18, narrow": Case(_resnet18, lambda: _images(96, 3, 32, 32), "classification", 96),
    "GPT-2, tiny": Case(_gpt2, lambda: _tokens(64, 64, 2000), "causal_lm", 64),
    "Llama, tiny": Case(_llama, lambda: _tokens(64, 64, 1500), "causal_lm", 64),
    "BERT like MiniLM": Case(_minilm, lambda: _tokens(64, 64, 3000), "sentence_embedding", 64),
}


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
        model=model,
        batches=lambda: iter(data),
        task=Task(type=case.task),  # type: ignore[arg-type] # one of the document's
        artifacts=Folder(folder),
        scratch=Folder(folder),
        collection=Collection(fisher="mc", batch_size=case.batch_size),
        kinds=("capacity",),
        keep=("spectra",),
        examples=case.batch_size,
    )


def foreseen(plan: Plan) -> dict[str, int]:
    """The plan's bytes of each stage, beside what the process held before and what libraries may still load."""
    bare = Plan(
        terms=tuple(term for term in plan.terms if term.source != "measured" and term.name != "libraries"),
        chosen=plan.chosen,
    )
    return {stage: bare.stage_bytes("host", stage) for stage in STAGES}  # type: ignore[arg-type]


def unguarded() -> None:
    """What would be done without a guard: the first rung, whatever is free."""

    def first(_: Guard, rungs: Sequence[Rung[Any]], **__: object) -> Descended[Any]:
        return Descended(value=rungs[0].run(), taken=(rungs[0].name,), refused=(), planning_errors=())

    Guard.descend = first  # type: ignore[assignment,method-assign]
    gathering.ran_out_of_memory = lambda _: False  # type: ignore[assignment]


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
    """The job's plan; of a copy, as planning moves its model away."""
    plan = plan_job(dataclasses.replace(made, model=copy.deepcopy(made.model), shared={}))
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
        "why": plan.why,
        "largest_terms": [(term.name, term.stage, term.size_bytes) for term in ordered[:8]],
    }


def budgets(made: Workspace, whole: Plan, held: int) -> dict[str, Any]:
    """The least budget that a plan fits, and two between it and what the whole takes; and a sweep between them."""

    def at(above: int) -> Plan:
        made.memory = MemoryBudget(device_bytes=2**62, host_bytes=held + above)
        return planned(made)

    most = whole.peak_bytes("host") - held
    least, fits = most // 8, most
    while fits - least > most // 64:
        middle = (least + fits) // 2
        if at(middle).fits(made.memory):
            fits = middle
        else:
            least = middle
    # what a process holds before its job differs by a few megabytes from run to run
    fits += most // 24
    chosen = [fits + share * (most - fits) // 3 for share in range(3)]
    sweep = []
    for above in (fits - most // 32, *(fits + share * (most - fits) // 6 for share in range(7)), most + most // 32):
        plan = at(above)
        slices = plan.chosen.micro_batch or made.collection.batch_size
        sweep.append((above, plan.fits(made.memory), len(plan.chosen.parts), slices))
    return {"above": chosen, "whole": most, "sweep": sweep, **decided(whole)}


def candidate(made: Workspace, plan: Plan, passes: int, micro_batch: int) -> Chosen:
    """Layers in so many passes, examples in such slices."""
    names = [name for part in plan.chosen.parts for name in part]
    cut = -(-len(names) // passes)
    parts = tuple(tuple(names[start : start + cut]) for start in range(0, len(names), cut))
    return Chosen(parts=parts, micro_batch=min(micro_batch, made.collection.batch_size))


def run(made: Workspace, *, profiled: bool) -> dict[str, Any]:
    """Do the job, and say what each stage took."""
    peaks = Peaks(resident_bytes())
    made.operation = _staged(peaks)  # type: ignore[method-assign]
    activities = [ProfilerActivity.CPU]
    begun = time.perf_counter()
    try:
        with profile(activities=activities, profile_memory=True) if profiled else contextlib.nullcontext() as profiler:
            rows = list(measure_capacity(CapacityParams(), made))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what happened
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    seconds = time.perf_counter() - begun
    found = [row for row in rows if row.metrics is not None]
    return {
        **({} if made.plan is None else decided(made.plan)),
        "seconds": seconds,
        "measured": peaks.stages,
        "stage_seconds": peaks.seconds,
        "planning_errors": len(made.guard.planning_errors),
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
    for flag in ("--budgets", "--limit", "--unguarded", "--profile"):
        parser.add_argument(flag, action="store_true")
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
        made.memory = MemoryBudget(device_bytes=2**62, host_bytes=held + int(options.above))
    plan = planned(made)
    if options.budgets:
        print(json.dumps(budgets(made, plan, held)))
        return
    made.guard = Guard(budget=made.memory, device=made.device, log=lambda _, __: None)
    if options.candidate is not None:
        made.chosen = candidate(made, plan, *options.candidate)
    if options.unguarded:
        unguarded()
        made.memory = MemoryBudget.unlimited()
    if options.limit:
        limit = status_bytes("VmData") + int(options.above)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    print(json.dumps(run(made, profiled=options.profile)))


def _staged(peaks: Peaks) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    def operation(name: str, stage: str | None = None) -> contextlib.AbstractContextManager[None]:
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
