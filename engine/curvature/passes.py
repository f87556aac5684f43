"""Passes: the data goes through the model, and each treated layer's sums become its factors.

One pass gathers every layer wherever memory allows; else each pass gathers the layers of one part
of the plan and lays their factors aside before the next begins. The numbers are the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from catalog.collection import Collection
from catalog.inputs import Task
from engine.curvature.batches import Batch, batched
from engine.curvature.factors import Factors, mirrored_
from engine.curvature.finiteness import witnessed
from engine.curvature.hooks import Collector, SharingBroken
from engine.curvature.layers.coverage import Survey
from engine.curvature.layers.layer import BlockLayer, TreatedLayer
from engine.curvature.loss import directions
from engine.curvature.prediction import positions, predict
from engine.curvature.statistics import LayerStatistics
from engine.curvature.waiting import lay_aside
from engine.errors import EmptyData, EngineError, ModelRefused, NonFiniteFactor, Unwinding
from engine.memory.budget import give_back_host_memory
from engine.memory.plan import Plan
from engine.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class PassJob:
    """The parts of a workspace that passes need, all present."""

    workspace: Workspace
    model: nn.Module
    task: Task
    collection: Collection
    dtype: torch.dtype
    micro_batch: int | None = None
    """Examples that go through the model at once; None is the whole batch."""
    tables: frozenset[str] = frozenset()
    """Embeddings that are looked up once for a batch, to be spread over its examples."""

    def batches(self) -> Iterator[Batch]:
        """The data, anew, in batches on the device."""
        stream = self.workspace.batches() if self.workspace.batches is not None else iter(())
        for batch in batched(stream, self.collection.batch_size):
            yield batch.to(self.workspace.device, self.dtype)


@dataclass(kw_only=True)
class Gathered:
    """What the passes over the data have left so far."""

    statistics: dict[str, LayerStatistics]
    """Of every treated layer; without sums once they are laid aside."""
    factors: dict[str, Callable[[], Factors]]
    """Of every covered layer."""
    examples: int = 0
    updates: int = 0
    passes: int = 0


def gather(job: PassJob, surveyed: Survey, shared: dict[str, str], mixed: frozenset[str], plan: Plan) -> Gathered:
    """Make the passes of ``plan``.

    Raises:
        EngineError: As ``engine.errors`` lists.
    """
    gathered = Gathered(statistics={}, factors={})
    for number, part in enumerate(plan.chosen.parts):
        layers = tuple(layer for layer in surveyed.treated if layer.name in set(part))
        progress = _Progress(job.workspace, number, len(plan.chosen.parts))
        while True:
            gathered.passes += 1
            try:
                statistics, gathered.examples, gathered.updates = _run(job, layers, shared, mixed, progress)
                break
            except SharingBroken as broken:
                # rare: a model that feeds its layers differently from batch to batch
                shared = {name: leader for name, leader in shared.items() if name not in broken.followers}
        gathered.statistics |= {found.layer.name: found for found in statistics}
        _keep(job, gathered, statistics, aside=len(plan.chosen.parts) > 1)
    return gathered


def _keep(job: PassJob, gathered: Gathered, statistics: tuple[LayerStatistics, ...], *, aside: bool) -> None:
    """Turn one pass's sums into factors, in memory or laid aside."""
    places = {name: place for place, name in enumerate(gathered.statistics)}
    for found in statistics:
        if flaw(found, job.collection) is not None:
            continue
        factors = Factors(
            layer=found.layer.name,
            form=found.layer.form,
            bias=found.layer.bias,
            A=_activation(found),
            G=_gradient(found, job.collection),
        )
        _require_finite_factors(factors)
        name, scratch = found.layer.name, job.workspace.scratch
        if aside and scratch is not None:
            leader = found.leader.layer.name if found.leader is not None else ""
            shared_place = places[leader] if leader in gathered.factors else None
            gathered.factors[name] = lay_aside(scratch, factors, places[name], shared_place)
            found.G = None
        else:
            gathered.factors[name] = partial(_same, factors)
    if aside:
        for found in statistics:
            found.A = found.G = None
        give_back_host_memory()


def _same(factors: Factors) -> Factors:
    return factors


@dataclass(frozen=True)
class _Progress:
    """Batches done over all passes."""

    workspace: Workspace
    number: int
    parts: int

    def report(self, done: int, total: int | None) -> None:
        """Say that ``done`` of ``total`` batches of this pass are done."""
        before = 0 if total is None else self.number * total
        self.workspace.report("collection", before + done, None if total is None else self.parts * total, "batches")


def _run(
    job: PassJob, treated: tuple[TreatedLayer, ...], shared: dict[str, str], mixed: frozenset[str], progress: _Progress
) -> tuple[tuple[LayerStatistics, ...], int, int]:
    """One pass over the data: statistics, examples that entered them, updates."""
    workspace, collection = job.workspace, job.collection
    by_name: dict[str, LayerStatistics] = {}
    for layer in treated:
        sharing = collection.sharing if layer.form == "kronecker" else "expand"
        # a leader stands before its followers
        leader = by_name[shared[layer.name]] if layer.name in shared else None
        statistics = LayerStatistics(layer=layer, sharing=sharing, leader=leader)
        statistics.flaw = foreseen_flaw(layer, collection, mixed)
        statistics.allocate(job.dtype, workspace.device)
        by_name[layer.name] = statistics
    all_statistics = tuple(by_name.values())
    collector = Collector(statistics=all_statistics, gradients=collection.fisher != "forward_only", tables=job.tables)
    batch_count = None if workspace.examples is None else -(-workspace.examples // collection.batch_size)
    examples = updates = terms = 0
    # a model that draws numbers in evaluation mode draws the same ones in every run
    torch.manual_seed(collection.seed)
    with witnessed(job.model, job.task) as witness, collector.attached(), torch.enable_grad():
        for number, batch in enumerate(job.batches()):
            workspace.checkpoint()
            witness.look_at(batch, number)
            if number % collection.update_freq == 0:
                if collection.ema_decay is not None and updates:
                    for statistics in all_statistics:
                        statistics.decay_(collection.ema_decay)
                terms += _update(job, batch, collector)
                witness.require_finite(all_statistics)
                examples += batch.size
                updates += 1
            progress.report(number + 1, batch_count)
    if terms == 0:
        raise EmptyData(
            f"all targets of the {examples} examples are ignored, so there is no loss term; correct the targets",
            pointer="/data",
        )
    if job.task.class_weights is not None and all(found.weight_G == 0 for found in all_statistics):
        raise EmptyData(
            f"the classes of all {terms} targets weigh 0, so nothing counts; correct the weights or the targets",
            pointer="/task/class_weights",
        )
    return all_statistics, examples, updates


def _update(job: PassJob, batch: Batch, collector: Collector) -> int:
    """Let one batch enter the statistics, a slice at a time; returns its loss terms.

    Both factors are sums over examples, of the summed loss: slices change nothing but the order
    of the additions.
    """
    return sum(_enter(job, part, collector) for part in batch.slices(job.micro_batch or batch.size))


def _enter(job: PassJob, batch: Batch, collector: Collector) -> int:
    """Let examples that go through the model together enter the statistics; returns their loss terms."""
    collector.begin(batch.size, positions(batch, job.task))
    with torch.set_grad_enabled(collector.gradients):
        prediction = predict(job.model, batch, job.task)
    collector.returning = True
    terms, divisor = prediction.terms, prediction.divisor
    for statistics in collector.statistics:
        statistics.weight_G += divisor
        statistics.terms += terms
    if prediction.outputs.requires_grad and terms:
        waiting: Tensor | None = None
        for direction in directions(prediction, batch.index, job.task, job.collection):
            if waiting is not None:
                _pull_back(prediction.outputs, waiting, retain_graph=True)
                collector.returned()
            waiting = direction
        if waiting is not None:
            # the last one frees the graph as it goes
            _pull_back(prediction.outputs, waiting, retain_graph=False)
            collector.returned()
    collector.end()
    return terms


def _pull_back(outputs: Tensor, direction: Tensor, *, retain_graph: bool) -> None:
    try:
        torch.autograd.backward(outputs, direction, retain_graph=retain_graph)
    except (EngineError, Unwinding, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise ModelRefused(
            f"the model raised in its backward pass: {type(error).__name__}: {str(error)[:500]}; "
            "a model that can be trained can be measured: mend it, or take `fisher: forward_only`",
            pointer="/model",
        ) from error


def foreseen_flaw(layer: TreatedLayer, collection: Collection, mixed: frozenset[str]) -> str | None:
    """Why a treated layer must be declared, as far as is known before the first pass."""
    if layer.name in mixed:
        return "batch_not_first"
    return "needs_gradients" if collection.fisher == "forward_only" and isinstance(layer, BlockLayer) else None


def flaw(found: LayerStatistics, collection: Collection) -> str | None:
    """Why a treated layer must be declared after all; None where it is covered."""
    if found.flaw is not None:
        return found.flaw
    reached = found.gradients > 0 or collection.fisher == "forward_only"
    return None if found.calls > 0 and reached else "no_gradient"


def _activation(found: LayerStatistics) -> Tensor:
    """A, normalised and symmetric; the 1×1 matrix 1 for an exact block; the leader's where that was declared."""
    holder = found.leader if found.leader is not None else found
    if holder.A is None:
        return torch.ones(1, 1, dtype=found.G.dtype, device=found.G.device) if found.G is not None else torch.ones(1, 1)
    # a decayed count may lie below one; without any position the sum is zero
    normalised = holder.A.div_(holder.weight_A or 1.0)
    holder.weight_A = 1.0
    return normalised if normalised.ndim == 1 else mirrored_(normalised)


def _gradient(found: LayerStatistics, collection: Collection) -> Tensor:
    if found.G is None:
        raise ValueError(f"layer `{found.layer.name}` was never allocated")
    if collection.fisher == "forward_only":
        return torch.eye(found.layer.out_dim, dtype=found.G.dtype, device=found.G.device)
    return mirrored_(found.G.div_(found.weight_G or 1.0))


def _require_finite_factors(factors: Factors) -> None:
    for name, tensor in (("A", factors.A), ("G", factors.G)):
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteFactor(
                f"layer `{factors.layer}`: {name} holds NaN or Inf after the last batch; activations or gradients "
                f"overflow at {str(tensor.dtype).removeprefix('torch.')}: take `collection.dtype: float64`",
                layer=factors.layer,
            )
