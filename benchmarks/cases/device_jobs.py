"""Device jobs: whole collections, gradients and peers on the device, each with its seconds and its peak.

A row that fails is a sentence in the result, and the rows after it are measured all the same.
"""

import contextlib
import copy
import cProfile
import gc
import importlib
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset

from benchmarks import results_file
from benchmarks.cases.device_models import DEVICE, Case
from benchmarks.conformance.problem import Factors
from kronoscope.local import Measurement, measure

OFF_PLAN, OFF_SECONDS = 0.1, 2.0
"""Most of: the relative difference of the peak from the plan, and the factor between planned and measured seconds."""
FAILED = "not_measured"
"""Key of the sentence in place of figures."""
PROFILED = 30
"""Lines of a profile."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Figures by name, and the claims that they decide."""

    figures: Figures
    claims: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Clock:
    """Moments of one collection: when each batch is asked for, and when no more is."""

    moments: list[float] = field(default_factory=list)

    def batches(self, data: list[tuple[Any, Tensor]]) -> Iterator[tuple[Any, Tensor]]:
        """Hand out the batches, noting when each is asked for."""
        self.moments.clear()
        for batch in data:
            self.moments.append(now())
            yield batch
        self.moments.append(now())


class Sequences(Dataset[Any]):
    """The batches of a language model as a dataset of their sequences, whose number a plan knows beforehand."""

    def __init__(self, clock: Clock, data: list[tuple[Any, Tensor]]) -> None:
        """Read what ``clock`` hands out of ``data``."""
        self._clock, self._data = clock, data

    def __len__(self) -> int:
        """Return how many sequences there are."""
        return sum(len(targets) for _, targets in self._data)

    def __getitem__(self, place: int) -> tuple[Any, Tensor]:
        """Return one sequence and its targets."""
        return next(each for number, each in enumerate(self) if number == place)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Hand them out, a batch noted with its first one."""
        for inputs, targets in self._clock.batches(self._data):
            for place, target in enumerate(targets):
                yield {name: each[place] for name, each in inputs.items()}, target


def now() -> float:
    """Return seconds, once the device has done what it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def begin_peak() -> None:
    """Forget what was allocated at most."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> int:
    """Return the bytes that were allocated at most; 0 on the CPU."""
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0


def allocated() -> int:
    """Return the bytes that are allocated now; 0 on the CPU."""
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def attempt(row: Callable[[], Figures]) -> Figures:
    """Return the figures of a row, or a sentence on why there are none."""
    try:
        return row()
    except ImportError as error:
        return {FAILED: f"a module could not be imported: {error}"}
    except Exception as error:  # noqa: BLE001 - one row's failure is its result
        first = str(error).strip().partition("\n")[0]
        return {FAILED: f"ended with {type(error).__name__}: {first[:300]}"}
    finally:
        # a device that has failed for good refuses this too, which must not hide the row's own sentence
        with contextlib.suppress(RuntimeError):
            begin_peak()


def ratio_claim(text: str, target: float, above: tuple[Figures, str], below: tuple[Figures, str]) -> dict[str, Any]:
    """Return the claim that one row's figure over another's is at most the target.

    Args:
        text: What is claimed.
        target: The most that it may be.
        above: A row and the name of its figure.
        below: The row and the name of the figure that it is divided by.

    Returns:
        The claim, with the sentence of the row that was not measured where there is one.
    """
    missing = above[0].get(FAILED) or below[0].get(FAILED)
    if missing:
        return results_file.not_measured(text, target, missing)
    return results_file.claim(text, above[0][above[1]] / below[0][below[1]], target)


def collected(case: Case, self_check: str = "growing", **options: Any) -> Figures:  # noqa: ANN401 - of a document
    """Return the seconds of one whole job from call to returned factors, its parts, and its peak beside the plan's."""
    return timed(case, self_check, **options)[0]


def timed(
    case: Case,
    self_check: str = "growing",
    batches: int | None = None,
    **options: Any,  # noqa: ANN401 - of a document
) -> tuple[Figures, Measurement]:
    """Return the figures of one whole job, and what it returned; ``options`` are further ones of its collection.

    The peak is without the caller's batches, which no plan counts.
    """
    clock, data = Clock(), case.data[:batches]
    known = Sequences(clock, data) if case.task == "causal_lm" else None
    begin_peak()
    begun = now()
    outcome = measure(
        case.model,
        known or (lambda: clock.batches(data)),
        task=case.task,
        kinds=("factors",),
        collection={
            "fisher": "empirical",
            "batch_size": case.batch_size,
            "self_check": self_check,
            "exact_trace": False,
            "dtype": "float32",
            **options,
        },
        memory={},
    )
    ended = now()
    spans = [later - earlier for earlier, later in zip(clock.moments, clock.moments[1:], strict=False)]
    stages = outcome.plan.get("stages", {})
    figures = {
        "whole_seconds": ended - begun,
        "before_seconds": clock.moments[0] - begun,
        "batch_seconds": statistics.median(spans[1:] or spans),
        "all_batch_seconds": spans,
        "after_seconds": ended - clock.moments[-1],
        "planned_seconds": sum(stage["seconds"] or 0 for stage in stages.values()),
        "planned_stage_seconds": {name: stage["seconds"] for name, stage in stages.items()},
        "pace": outcome.plan.get("pace"),
        "peak_bytes": max(0, peak() - data_bytes(case)),
        "reserved_bytes": torch.cuda.max_memory_reserved() if DEVICE.type == "cuda" else 0,
        "planned_bytes": outcome.plan.get("device_peak_bytes", 0),
        "planned_stage_bytes": {name: stage["device_bytes"] for name, stage in stages.items()},
        "planned_terms": _device_terms(outcome.plan),
        "layers": len(outcome.layers),
        "accumulation_precision": outcome.index["accumulation_precision"],
    }
    return figures, outcome


def data_bytes(case: Case) -> int:
    """Return the bytes of a case's batches; a tensor that stands there twice counts once."""
    tensors = {}
    for inputs, targets in case.data:
        for tensor in (*(inputs.values() if isinstance(inputs, dict) else (inputs,)), targets):
            tensors[tensor.data_ptr()] = tensor.nbytes
    return sum(tensors.values())


def _device_terms(plan: Any) -> dict[str, int]:  # noqa: ANN401 - a document
    """Bytes that a plan counts on the device, by stage and name; of a layer's own terms, the largest."""
    sums: dict[str, int] = {}
    for term in plan.get("terms", ()):
        if term["place"] == "device" and term["size_bytes"]:
            name = f"{term['stage']}: {term['name']}"
            size = sums.get(name, 0)
            sums[name] = max(size, term["size_bytes"]) if term["layer"] else size + term["size_bytes"]
    return sums


def plan_claims(name: str, figures: Figures) -> list[dict[str, Any]]:
    """Return the claims on a job's plan: its bytes on a GPU, and its seconds."""
    texts = f"{name}: peak beside the plan, relative difference", f"{name}: factor between planned and whole seconds"
    if FAILED in figures:
        return [results_file.not_measured(texts[0], OFF_PLAN, figures[FAILED])]
    claims = []
    if figures["planned_bytes"]:
        off = abs(figures["peak_bytes"] / figures["planned_bytes"] - 1)
        claims.append(results_file.claim(texts[0], off, OFF_PLAN))
    if figures["planned_seconds"]:
        factor = figures["whole_seconds"] / figures["planned_seconds"]
        claims.append(results_file.claim(texts[1], max(factor, 1 / factor), OFF_SECONDS))
    return claims


def gradient(case: Case, *, every: bool = False) -> Figures:
    """Return seconds and peak of the loss's gradient of one batch, by plain PyTorch.

    Args:
        case: The model and its batches.
        every: Whether of every parameter; else of the layers that are measured.

    Returns:
        ``seconds``, the median of all but the first, and ``peak_bytes``.
    """
    wanted = {parameter: parameter.requires_grad for parameter in case.model.parameters()}
    spans = []
    begin_peak()
    try:
        if every:
            case.model.requires_grad_()
        for batch in (case.data * 2)[:6]:
            begun = now()
            case.loss(batch).backward()  # type: ignore[no-untyped-call]
            spans.append(now() - begun)
            case.model.zero_grad()
    finally:
        for parameter, flag in wanted.items():
            parameter.requires_grad_(flag)
    return {"seconds": statistics.median(spans[1:]), "peak_bytes": max(0, peak() - data_bytes(case))}


def peer(library: str, case: Case) -> tuple[Figures, Factors]:
    """Run a peer's whole collection of the same layers twice, each on a copy of the model.

    Args:
        library: A module of ``benchmarks/conformance/adapters``.
        case: The model and its batches.

    Returns:
        Seconds of both, of which the second is warm, with the peak and the factors' device; and the factors.
    """
    adapter = importlib.import_module(f"benchmarks.conformance.adapters.{library}")
    factors, spans = {}, list[float]()
    for _ in range(2):
        factors.clear()
        # libraries wrap a model, and leave it so
        problem = replace(case.problem, model=copy.deepcopy(case.model))
        begin_peak()
        begun = now()
        factors = adapter.collect(problem, case.data)
        spans.append(now() - begun)
    places = sorted({tensor.device.type for pair in factors.values() for tensor in pair})
    return {
        "whole_seconds": spans[1],
        "first_seconds": spans[0],
        "peak_bytes": max(0, peak() - data_bytes(case)),
        "layers": len(factors),
        "factors_on": places,
    }, factors


def copies(factors: Factors) -> Figures:
    """Return the seconds in which factors are copied to the host, into pageable and into pinned memory."""
    tensors = [tensor for pair in factors.values() for tensor in pair]
    figures: Figures = {"factor_bytes": sum(tensor.nbytes for tensor in tensors)}
    begun = now()
    pageable = [tensor.to("cpu", copy=True) for tensor in tensors]
    figures["pageable_seconds"] = now() - begun
    del pageable
    if DEVICE.type == "cuda":
        begun = now()
        pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        figures["pinning_seconds"] = now() - begun
        begun = now()
        for host, tensor in zip(pinned, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        figures["pinned_seconds"] = now() - begun
    return figures


def agreement(factors: Factors, outcome: Measurement) -> Figures:
    """Return the traces of a peer's A and G over ours, smallest and largest over the layers.

    One constant over all layers is another normalisation; ratios that differ are other positions or other gradients.
    """
    ratios: dict[str, list[float]] = {"A": [], "G": []}
    ours = outcome.factors
    for name in factors.keys() & set(ours):
        for side, theirs in zip("AG", factors[name], strict=True):
            trace = theirs.diagonal().double().sum() if theirs.ndim == 2 else theirs.double().sum()
            ratios[side].append(float(trace) / float(getattr(ours[name], f"diagonal_{side}").double().sum()))
    return {side: {"least": min(each), "most": max(each), "layers": len(each)} for side, each in ratios.items() if each}


def operations(case: Case) -> Figures:
    """Return the operations of a whole job that take most of the device's seconds, and most of the host's."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE.type == "cuda" else [])]
    with profile(activities=activities) as recorded:
        figures = collected(case)
    averages = recorded.key_averages()
    tables = {}
    for place, seconds in (("device", "self_device_time_total"), ("host", "self_cpu_time_total")):
        longest = sorted(averages, key=lambda event: getattr(event, seconds), reverse=True)[:PROFILED]
        tables[place] = {event.key[:120]: [getattr(event, seconds) / 1e6, event.count] for event in longest}
    return {"whole_seconds": figures["whole_seconds"], "seconds_and_calls": tables}


def functions(case: Case) -> Figures:
    """Return the functions of Python in which a whole job spends most seconds of their own, and most with their calls.

    A function that waits for the device spends what it waits for.
    """
    recorder = cProfile.Profile()
    recorder.enable()
    try:
        figures = collected(case)
    finally:
        recorder.disable()
    rows = {}
    for (file, line, name), (_, calls, own, together, _) in pstats.Stats(recorder).stats.items():  # type: ignore[attr-defined]
        rows["/".join(file.split("/")[-3:]) + f":{line} {name}"] = [own, together, calls]
    longest = {
        word: dict(sorted(rows.items(), key=lambda row: row[1][place], reverse=True)[:PROFILED])
        for place, word in enumerate(("own", "with_calls"))
    }
    return {"whole_seconds": figures["whole_seconds"], "own_and_all_seconds_and_calls": longest}
