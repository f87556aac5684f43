"""Passes: the data goes through the model, and each treated layer's sums become its factors.

One pass gathers every layer wherever memory allows; else each pass gathers the layers of one part
of the plan and lays their factors aside before the next begins. The numbers are the same.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from catalog.collection import Collection
from catalog.inputs import Task
from engine.curvature.batches import Batch, batched, tensors
from engine.curvature.checkpoints import CheckpointForeign, Checkpoints, Resumed, fingerprint, set_counts
from engine.curvature.finishing import foreseen_flaw, keep
from engine.curvature.finiteness import witnessed
from engine.curvature.gathered import Cursor, Gathered
from engine.curvature.hooks import Collector, Places, SharingBroken
from engine.curvature.layers.coverage import Survey
from engine.curvature.layers.layer import TreatedLayer
from engine.curvature.layers.tied import TiedHeadLayer
from engine.curvature.loss import directions
from engine.curvature.mixed_precision import Precision
from engine.curvature.nested import Sizes, keep_size
from engine.curvature.numerics import Numerics
from engine.curvature.offload import Staging, staging_numbers
from engine.curvature.padding import grouped
from engine.curvature.prediction import positions, predict
from engine.curvature.statistics import LayerStatistics, factor_sides
from engine.curvature.tied_head import TiedHeadStatistics
from engine.errors import EmptyData, EngineError, ModelRefused, Unwinding
from engine.memory.exhaustion import lost_device, ran_out_of_memory
from engine.memory.plan import Plan
from engine.workspace import Workspace

_CALLED = {"version": "version of torch", "threads": "number of threads"}


@dataclass(frozen=True, kw_only=True)
class PassJob:
    """The parts of a workspace that passes need, all present."""

    workspace: Workspace
    model: nn.Module
    task: Task
    collection: Collection
    dtype: torch.dtype
    numerics: Numerics
    heard: set[str]
    """Operations without a deterministic form."""
    micro_batch: int | None = None
    """Examples that go through the model at once; None is the whole batch."""
    offload: bool = False
    """The sums stand on the host."""
    precision: Precision = field(default_factory=Precision)
    tables: frozenset[str] = frozenset()
    """Embeddings that are looked up once for a batch, to be spread over its examples."""
    places: Places = frozenset()
    """All places in parameters that are layers."""
    sizes: Sizes | None = None
    """Smaller sample sizes to keep."""
    cut_padding: bool = False
    """Padding decides nothing, so it need not go through the model."""

    def batches(self) -> Iterator[Batch]:
        """The data, anew, in batches on the device."""
        return (self.moved(batch) for batch in self.stream())

    def stream(self) -> Iterator[Batch]:
        """The data, anew, in batches where the caller has them."""
        chunks = self.workspace.batches() if self.workspace.batches is not None else iter(())
        return batched(chunks, self.collection.batch_size)

    def moved(self, batch: Batch) -> Batch:
        """A copy on the device, in the precision of the passes."""
        return batch.to(self.workspace.device, self.dtype)


def gather(job: PassJob, surveyed: Survey, shared: dict[str, str], mixed: frozenset[str], plan: Plan) -> Gathered:
    """Make the passes of ``plan``.

    Raises:
        EngineError: As ``engine.errors`` lists.
    """
    conditions = _conditions(job, surveyed, plan) if job.workspace.checkpointed else {}
    checkpoints = Checkpoints(workspace=job.workspace, model=job.model, conditions=conditions)
    fresh = partial(Gathered, statistics={}, factors={}, shared=shared, nondeterministic=job.heard)
    found = checkpoints.find()
    try:
        gathered = fresh() if found is None else _resumed(job, surveyed, found)
        return _gather(job, surveyed, gathered, mixed, plan, checkpoints, found)
    except CheckpointForeign as foreign:
        checkpoints.discard(str(foreign))
        return _gather(job, surveyed, fresh(), mixed, plan, checkpoints, None)


def _gather(
    job: PassJob,
    surveyed: Survey,
    gathered: Gathered,
    mixed: frozenset[str],
    plan: Plan,
    checkpoints: Checkpoints,
    found: Resumed | None,
) -> Gathered:
    several = len(plan.chosen.parts) > 1
    for number, part in enumerate(plan.chosen.parts):
        progress = _Progress(job.workspace, number, len(plan.chosen.parts))
        if found is not None and number < found.cursor.number:
            continue
        layers = tuple(layer for layer in surveyed.treated if layer.name in set(part))
        while True:
            # a pass that is gone on with was counted when it began
            gathered.passes += found is None or not found.running
            here, found = found, None
            try:
                with job.workspace.operation(f"pass {number + 1}"):
                    statistics = _run(job, layers, gathered, mixed, progress, checkpoints, here)
                break
            except SharingBroken as broken:
                # rare: a model that feeds its layers differently from batch to batch
                gathered.shared = {
                    name: leader for name, leader in gathered.shared.items() if name not in broken.followers
                }
        for each in statistics:
            each.end_pass_()
        gathered.statistics |= {each.layer.name: each for each in statistics}
        with job.workspace.operation(f"factors of pass {number + 1}"):
            keep(job.workspace, job.dtype, gathered, statistics, aside=several)
        if several and job.workspace.checkpointed:
            # what waits on the disk is never collected again
            after = Cursor(number=number + 1, examples=gathered.examples, updates=gathered.updates)
            after.loss_scale = gathered.loss_scale
            checkpoints.save(after, (), gathered)
    if found is not None:
        job.workspace.log("info", "collection resumed after its last batch: every factor waits already")
    return gathered


def _conditions(job: PassJob, surveyed: Survey, plan: Plan) -> dict[str, Any]:
    """What a checkpoint's bits depend on, each entry under the name that a refusal calls it by."""
    layers = [[layer.name, type(layer).__name__, layer.form, layer.in_dim, layer.out_dim] for layer in surveyed.treated]
    return {
        **job.workspace.conditions,
        **{_CALLED.get(name, name): value for name, value in asdict(job.numerics).items()},
        "collection": asdict(job.collection),
        "task": asdict(job.task),
        "plan": asdict(plan.chosen),
        "model": fingerprint(job.model),
        "set of layers": layers,
    }


def _resumed(job: PassJob, surveyed: Survey, found: Resumed) -> Gathered:
    """What the finished passes of an earlier attempt have left."""
    gathered = Gathered(
        statistics={},
        factors={},
        shared=found.shared,
        waiting=found.waiting,
        nested=found.nested,
        nondeterministic=job.heard,
        examples=found.cursor.examples,
        updates=found.cursor.updates,
        loss_scale=found.cursor.loss_scale,
        passes=found.passes,
    )
    job.heard.update(found.nondeterministic)
    treated = {layer.name: layer for layer in surveyed.treated}
    for name, stored in found.finished.items():
        leader = gathered.statistics[found.shared[name]] if name in found.shared else None
        # the sharing stands in what was stored
        gathered.statistics[name] = _kind(treated[name])(layer=treated[name], sharing="", leader=leader)
        set_counts(gathered.statistics[name], stored)
    scratch = job.workspace.scratch
    if scratch is not None:
        gathered.factors = {name: partial(waiting.load, scratch) for name, waiting in found.waiting.items()}
    return gathered


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

    def resume(self, done: int, total: int | None) -> None:
        """Say that an earlier attempt's checkpoint is gone on with."""
        before, whole = (0, "") if total is None else (self.number * total, f" of {self.parts * total}")
        within = f" (pass {self.number + 1} of {self.parts})" if self.parts > 1 else ""
        self.workspace.log("info", f"collection resumed at batch {before + done}{whole}{within}")
        self.report(done, total)


def _run(
    job: PassJob,
    treated: tuple[TreatedLayer, ...],
    gathered: Gathered,
    mixed: frozenset[str],
    progress: _Progress,
    checkpoints: Checkpoints,
    found: Resumed | None,
) -> tuple[LayerStatistics, ...]:
    """One pass over the data, or the rest of the one that ``found`` was made in."""
    workspace, collection = job.workspace, job.collection
    by_name = _allocated(job, treated, gathered.shared, mixed)
    all_statistics = tuple(by_name.values())
    wanted = collection.fisher != "forward_only"
    collector = Collector(statistics=all_statistics, gradients=wanted, tables=job.tables, places=job.places)
    batch_count = None if workspace.examples is None else -(-workspace.examples // collection.batch_size)
    checked = workspace.checkpointed
    cursor, stream = Cursor(number=progress.number), job.stream()
    # a model that draws numbers in evaluation mode draws the same ones in every run
    torch.manual_seed(collection.seed)
    if found is not None:
        saved = checkpoints.restore(found, by_name, stream)
        if found.running:
            cursor = saved
        progress.resume(cursor.batches, batch_count)
    collector.scale = job.precision.loss_scale(cursor.loss_scale, cursor.steady)
    with witnessed(job.model, job.task) as witness, collector.attached(), torch.enable_grad():
        witness.read = cursor.read
        for arrived in stream:
            workspace.checkpoint()
            batch = job.moved(arrived)
            witness.look_at(batch, cursor.batches)
            if cursor.batches % collection.update_freq == 0:
                if collection.ema_decay is not None and cursor.updates:
                    for statistics in all_statistics:
                        statistics.decay_(collection.ema_decay)
                cursor.terms += update(job, batch, collector)
                cursor.note(collector.scale)
                witness.require_finite(all_statistics)
                cursor.examples += batch.size
                cursor.updates += 1
            before = cursor.read
            cursor.take(arrived, checked=checked)
            eighths = None if job.sizes is None else job.sizes.crossed(before, cursor.read)
            if job.sizes is not None and eighths is not None:
                keep_size(job.sizes, eighths, cursor.examples, all_statistics, gathered, collection, job.dtype)
            progress.report(cursor.batches, batch_count)
            workspace.curve.sample(f"pass {progress.number + 1}", "within", workspace.device)
            if checkpoints.due():
                checkpoints.save(cursor, all_statistics, gathered)
    if collection.ekfac and checkpoints.worth():
        # the correction has no checkpoints of its own: whoever is killed in it begins it anew, and nothing before it
        checkpoints.save(cursor, all_statistics, gathered)
    _require_terms(job, cursor, all_statistics)
    gathered.examples, gathered.updates, gathered.loss_scale = cursor.examples, cursor.updates, cursor.loss_scale
    return all_statistics


def _require_terms(job: PassJob, cursor: Cursor, all_statistics: tuple[LayerStatistics, ...]) -> None:
    if cursor.terms == 0:
        raise EmptyData(
            f"all targets of the {cursor.examples} examples are ignored, so there is no loss term; correct the targets",
            pointer="/data",
        )
    if job.task.class_weights is not None and all(found.weight_G == 0 for found in all_statistics):
        raise EmptyData(
            f"the classes of all {cursor.terms} targets weigh 0, so nothing counts; correct the weights or the targets",
            pointer="/task/class_weights",
        )


def _allocated(
    job: PassJob, treated: tuple[TreatedLayer, ...], shared: dict[str, str], mixed: frozenset[str]
) -> dict[str, LayerStatistics]:
    """Zeroed sums of every layer of a pass."""
    by_name: dict[str, LayerStatistics] = {}
    traced = job.collection.exact_trace and job.collection.fisher != "forward_only"
    staging = None
    if job.offload:
        sides = [side for layer in treated for side in factor_sides(layer, follows=layer.name in shared)]
        staging = Staging(staging_numbers(sides), job.dtype, job.workspace.device)
    for layer in treated:
        sharing = job.collection.sharing if layer.form == "kronecker" else "expand"
        # a leader stands before its followers
        leader = by_name[shared[layer.name]] if layer.name in shared else None
        statistics = _kind(layer)(layer=layer, sharing=sharing, leader=leader, traced=traced, staging=staging)
        statistics.flaw = foreseen_flaw(layer, job.collection, mixed)
        statistics.allocate(job.dtype, job.workspace.device)
        by_name[layer.name] = statistics
    return by_name


def _kind(layer: TreatedLayer) -> type[LayerStatistics]:
    return TiedHeadStatistics if isinstance(layer, TiedHeadLayer) else LayerStatistics


def update(job: PassJob, batch: Batch, collector: Collector) -> int:
    """Let one batch enter the statistics, a slice at a time; returns its loss terms.

    Both factors are sums over examples, of the summed loss: slices change nothing but the order
    of the additions.
    """
    groups = grouped(batch) if job.cut_padding else (batch,)
    size = job.micro_batch or batch.size
    terms = sum(_enter(job, part, collector) for own in groups for part in own.slices(size))
    for staging in {each.staging for each in collector.statistics if each.staging is not None}:
        staging.settle()
    return terms


def _enter(job: PassJob, batch: Batch, collector: Collector) -> int:
    """Let examples that go through the model together enter the statistics; returns their loss terms."""
    collector.begin(batch.size, positions(batch, job.task), tensors(batch.inputs))
    with torch.set_grad_enabled(collector.gradients):
        with job.precision.autocast(job.workspace.device):
            prediction = predict(job.model, batch, job.task)
        # probabilities, and what is drawn from them, in the precision of the sums
        prediction = replace(prediction, outputs=prediction.outputs.to(job.dtype))
    collector.returning = True
    terms, divisor, shares = prediction.terms, prediction.divisor, prediction.shares
    for statistics in collector.statistics:
        statistics.weight_G += divisor
        statistics.terms += terms
    if prediction.outputs.requires_grad and terms:
        waiting: Tensor | None = None
        # where the graph ends: the outputs themselves are not needed once the last direction is there
        end = get_gradient_edge(prediction.outputs)
        for direction in directions(prediction, batch.index, job.task, job.collection):
            if waiting is not None:
                _return(end, waiting, collector, last=False)
            waiting = direction
        if waiting is not None:
            del prediction
            _return(end, waiting, collector, last=True)
    collector.end()
    shares_squared = float(shares.dot(shares))
    for statistics in collector.statistics:
        statistics.end_batch_(shares, shares_squared)
    return terms


def _return(end: GradientEdge, direction: Tensor, collector: Collector, *, last: bool) -> None:
    """Pull one direction back, until all its gradients are finite."""
    scale = collector.scale
    if scale is None:
        # the last one frees the graph as it goes
        _pull_back(end, direction, retain_graph=not last)
        collector.returned()
        return
    _pull_back(end, direction * scale.value, retain_graph=True)
    while not collector.returned():
        scale.lower()
        _pull_back(end, direction * scale.value, retain_graph=True)
    scale.endure()


def _pull_back(end: GradientEdge, direction: Tensor, *, retain_graph: bool) -> None:
    try:
        torch.autograd.backward(end, direction, retain_graph=retain_graph)
    except (EngineError, Unwinding):
        raise
    except Exception as error:
        if ran_out_of_memory(error) or lost_device(error):
            raise
        raise ModelRefused(
            f"the model raised in its backward pass: {type(error).__name__}: {str(error)[:500]}; "
            "a model that can be trained can be measured: mend it, or take `fisher: forward_only`",
            pointer="/model",
        ) from error
