"""Passes: the data goes through the model, and the sums of one pass's layers take in every batch."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from catalog.requests.collection import Collection
from engine.accumulation.hooks import Collector
from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.loss_head import LossHead
from engine.accumulation.output_gradients import InputArrival
from engine.collection.checkpoints import Checkpoints, Resumed
from engine.collection.collection_state import CollectionState, Cursor
from engine.collection.nan_check import locate_nan
from engine.collection.pass_job import PassJob
from engine.collection.pass_statistics import begin_statistics
from engine.collection.probe import ProbedModel
from engine.collection.ranks.turns import Turns
from engine.collection.subsamples import keep_size
from engine.errors import DataDiffer, EmptyData
from engine.factors.representation import DENSE
from engine.gradient_identity.batch_sums import BatchSums
from engine.gradient_identity.findings import FAILED_CHECK
from engine.gradient_identity.self_check import SelfCheck
from engine.gradient_identity.summed_rows import NO_ROWS, SummedRows
from engine.layers.layer import TreatedLayer
from engine.model.batches import Batch, tensors
from engine.model.dtype_casts import casts_of
from engine.model.example_digests import EnteredExamples
from engine.model.loss_directions import directions, pull_back
from engine.model.outputs import predict
from engine.model.state.generators import seed_generators
from engine.row_layout.length_buckets import group_by_length

Sums = tuple[LayerStatistics, ...]


@dataclass(frozen=True)
class Progress:
    """Batches done over all passes of a stage."""

    job: PassJob
    number: int
    parts: int
    stage: str = "collection"

    @property
    def _total(self) -> int | None:
        """Batches of one pass, where the data say how many examples they hold."""
        examples = self.job.workspace.inputs.examples
        return None if examples is None else -(-examples // self.job.collection.batch_size)

    def report(self, done: int) -> None:
        """Report the batches of this pass that are done."""
        total = self._total
        before, whole = (0, None) if total is None else (self.number * total, self.parts * total)
        self.job.workspace.ports.report(self.stage, before + done, whole, "batches")

    def resume(self, done: int) -> None:
        """Log and report that the collection goes on from an earlier attempt's checkpoint."""
        total = self._total
        before, whole = (0, "") if total is None else (self.number * total, f" of {self.parts * total}")
        within = f" (pass {self.number + 1} of {self.parts})" if self.parts > 1 else ""
        self.job.workspace.ports.log("info", f"collection resumed at batch {before + done}{whole}{within}")
        self.report(done)


def run_pass(
    probed: ProbedModel, number: int, state: CollectionState, checkpoints: Checkpoints, found: Resumed | None
) -> tuple[tuple[LayerStatistics, ...], Cursor]:
    """Gather the sums of one part's layers in a pass over the data or its rest; of several ranks, over each one's."""
    job, names = probed.job.without_masks(state.unmasked), state.chosen.parts[number]
    layers = tuple(layer for layer in probed.survey.treated if layer.name in set(names))
    workspace, collection = job.workspace, job.collection
    progress = Progress(job, number, len(state.chosen.parts))
    stream = job.stream()
    # a model that draws numbers in evaluation mode draws the same ones in every run
    seed_generators(collection.seed)
    all_statistics = begin_statistics(replace(probed, job=job), layers, state, stream, checkpoints, found)
    wanted = collection.fisher != "forward_only"
    collector = Collector(
        statistics=all_statistics,
        gradients=wanted,
        layout=replace(job.layout, overwritten=state.overwritten),
        inputs=InputArrival(deferred=state.deferred, required=wanted),
        head=_head(job, layers),
    )
    cursor = Cursor(number=number) if found is None or not found.running else found.cursor
    if found is not None:
        progress.resume(cursor.batches)
    ranks = workspace.machine.ranks
    turns = Turns.of(ranks, collection.update_freq)
    collector.scale = job.precision.loss_scale(cursor.loss_scale, cursor.steady)
    unused = nullcontext() if state.self_check is None else state.self_check.watching_unused()
    with locate_nan(job.model, job.task) as current, unused, collector.attached(), torch.enable_grad():
        current.read = cursor.read
        for arrived in stream:
            workspace.ports.raise_if_cancelled()
            ranks.sign()
            batch = job.moved(arrived)
            current.begin(batch, cursor.batches)
            # before the model, which may write to its inputs
            note_examples(job, cursor, batch, turns)
            if turns.update(cursor.batches) is not None:
                decay_(collection, cursor, turns, all_statistics)
                summed = _observed(job, state.self_check, (arrived, cursor), collector)
                cursor.terms += _varied(job, batch, collector, summed)
                _check(job, state.self_check, (cursor.batches, summed), collector)
                cursor.note(collector.scale)
                current.require_finite(all_statistics)
                _hold_sums(job, state.self_check, batch, summed, all_statistics)
                cursor.examples += batch.size
                cursor.updates += 1
            before = cursor.read
            cursor.take(arrived, checked=workspace.saves_checkpoints)
            eighths = None if job.sizes is None else job.sizes.crossed(before, cursor.read)
            if job.sizes is not None and eighths is not None:
                snapshot = state.snapshot(eighths, cursor.examples)
                keep_size(job.sizes, snapshot, all_statistics, state, collection, job.dtype)
            progress.report(cursor.batches)
            workspace.machine.curve.sample(f"pass {number + 1}", "within", workspace.machine.device)
            if checkpoints.due():
                checkpoints.save(cursor, all_statistics, state)
    _require_as_before(job, cursor)
    if (collection.ekfac or workspace.options.passes_again) and checkpoints.worth():
        # an attempt killed in the passes that follow begins them anew, or where they were, and nothing before them
        checkpoints.save(cursor, all_statistics, state)
    return all_statistics, cursor


def note_examples(job: PassJob, cursor: Cursor, batch: Batch, turns: Turns) -> None:
    """Note the digests of a batch, on the device, by which later passes are held to this one."""
    update = turns.update(cursor.batches)
    if cursor.batches == 0:
        cursor.first = EnteredExamples().added(batch, job.task, None)
    if update is not None:
        cursor.entered = job.enter(cursor.entered, batch, update)


def _require_as_before(job: PassJob, cursor: Cursor) -> None:
    """Require that a pass has read what the probe has read, and as many examples as were counted before."""
    job.require_readable_again(cursor.first, cursor.batches)
    if job.sizes is not None and job.workspace.inputs.part is None and cursor.read != job.sizes.total:
        raise DataDiffer(
            f"the data must be the same at every pass: they held {job.sizes.total} examples when `collection.nested` "
            f"counted them, and {cursor.read} in the pass that followed; give the same examples every time",
            pointer="/data",
        )


def decay_(collection: Collection, cursor: Cursor, turns: Turns, sums: Sequence[LayerStatistics]) -> None:
    """Let a moving average weigh all before the next update less."""
    if collection.ema_decay is not None and cursor.updates:
        for statistics in sums:
            statistics.decay_(collection.ema_decay ** turns.updates_since(cursor.batches))


def _observed(
    job: PassJob, self_check: SelfCheck | None, current: tuple[Batch, Cursor], collector: Collector
) -> SummedRows:
    """Choose what is to be kept of a batch while it is summed, by its number."""
    arrived, cursor = current
    if self_check is None or self_check.mode == "off":
        return NO_ROWS
    layers, summed = [found.layer for found in collector.statistics if found.flaw is None], NO_ROWS
    if self_check.mode == "growing" or cursor.number == 0:
        summed = self_check.observe(layers, arrived, cursor.batches, partial(parts_of, job, arrived))
    if cursor.updates:
        return summed
    device = job.workspace.machine.device
    sums = BatchSums.of(collector.statistics, job.collection.seed, device, gradients=collector.gradients)
    return replace(summed, sums=sums)


def _hold_sums(
    job: PassJob, self_check: SelfCheck | None, batch: Batch, summed: SummedRows, all_statistics: Sums
) -> None:
    """Let the sums of the first batch prove themselves: a layer whose are not those of its rows is not covered."""
    if self_check is None or summed.sums is None:
        return
    by_name = {found.layer.name: found for found in all_statistics}
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - its own operations are not the model's
        failed = summed.sums.failed(batch.size)
    for name, (error, side) in failed.items():
        by_name[name].flaw = FAILED_CHECK
        check = self_check.refuse_sums(name, error)
        job.workspace.ports.log("warning", f"layer `{name}`: {check.why}, in {side}; it is not covered")


def _check(job: PassJob, self_check: SelfCheck | None, current: tuple[int, SummedRows], collector: Collector) -> None:
    """Let the layers prove themselves on a batch, by its number and what was kept of it, where a check is due."""
    (number, summed), shapes = current, collector.shapes.take()
    if self_check is None:
        return
    due, glance = self_check.is_due(number, shapes, summed)
    sums = {found.layer.name: found for found in collector.statistics if found.flaw is None}
    layers = [found.layer for found in sums.values()]
    if not (due or glance) or (number == 0 and self_check.is_rehearsed(layers, summed)):
        return
    heard = frozenset(job.heard)
    with collector.detached():
        failed = self_check.check_later(layers, summed) if due or self_check.glance_differs(summed) else []
    # what plain autograd alone does without a deterministic form enters no factor
    job.heard.intersection_update(heard)
    for name in failed:
        sums[name].flaw = FAILED_CHECK
        why = self_check.layers[name].why
        job.workspace.ports.log("warning", f"layer `{name}`: in batch {number + 1} {why}; it is not covered")


def require_terms(job: PassJob, cursor: Cursor, all_statistics: tuple[LayerStatistics, ...]) -> None:
    """Require that something has entered the sums of a pass."""
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


def _head(job: PassJob, treated: tuple[TreatedLayer, ...]) -> LossHead | None:
    """The loss's head, if it is among the layers of a pass and keeps probabilities."""
    for layer in treated:
        representation = job.representations.get(layer.name, DENSE)
        if job.head is not None and representation.of_terms and job.head in layer.roles:
            # what table and head of one weight have in common needs both gradients
            return LossHead(role=job.head, traced=job.collection.exact_trace and job.head is layer)
    return None


def parts_of(job: PassJob, batch: Batch) -> Iterator[Batch]:
    """Cut a batch into the groups that go through the model together."""
    groups = group_by_length(batch, job.task) if job.cut_padding else (batch,)
    size = job.micro_batch or batch.size
    return (part for own in groups for part in own.slices(size))


def update(job: PassJob, batch: Batch, collector: Collector, summed: SummedRows = NO_ROWS) -> int:
    """Let one batch enter the statistics, a slice at a time.

    Both factors are sums over examples, of the summed loss: slices change nothing but the order
    of the additions.
    """
    terms = sum(_enter(job, part, collector, summed) for part in parts_of(job, batch))
    summed.end(collector)
    for staging in {each for found in collector.statistics for each in (found.staging, found.row_staging)}:
        if staging is not None:
            staging.settle()
    return terms


def _varied(job: PassJob, batch: Batch, collector: Collector, summed: SummedRows) -> int:
    """Let one batch enter the statistics and their variance, as one however it is sliced; returns its loss terms."""
    for statistics in collector.statistics:
        statistics.begin_update_()
    terms = update(job, batch, collector, summed)
    for statistics in collector.statistics:
        statistics.end_update_()
    return terms


def _enter(job: PassJob, batch: Batch, collector: Collector, summed: SummedRows) -> int:
    """Let examples that go through the model together enter the statistics; returns their loss terms."""
    summed.begin(batch, collector)
    collector.begin(batch.size, batch.mask, tensors(batch.inputs))
    with torch.set_grad_enabled(collector.gradients):
        with job.precision.autocast(job.workspace.machine.device):
            prediction = predict(job.model, batch, job.task)
        # probabilities, and what is drawn from them, in the precision of the sums
        prediction = replace(prediction, outputs=prediction.outputs.to(job.dtype))
    collector.forward_done()
    summed.predicted(prediction)
    if prediction.terms:
        collector.predicted(prediction)
    terms, divisor, shares = prediction.terms, prediction.divisor, prediction.shares
    shares_squared = float(shares.dot(shares))
    for statistics in collector.statistics:
        statistics.weight_G += divisor
        statistics.terms += terms
    if prediction.outputs.requires_grad and terms:
        waiting: Tensor | None = None
        # where the graph ends: the outputs themselves are not needed once the last direction is there
        end = get_gradient_edge(prediction.outputs)
        for direction in directions(prediction, batch.index, job.task, job.collection):
            if waiting is not None:
                _return(job, end, waiting, collector, last=False)
            waiting = direction
            summed.directed(direction)
        if waiting is not None:
            del prediction
            _return(job, end, waiting, collector, last=True)
    collector.end()
    for statistics in collector.statistics:
        statistics.end_batch_(shares, shares_squared)
    return terms


def _return(job: PassJob, end: GradientEdge, direction: Tensor, collector: Collector, *, last: bool) -> None:
    """Pull one direction back, until all its gradients are finite."""
    scale, casts = collector.scale, casts_of(job.model)
    if scale is None:
        # the last one frees the graph as it goes
        pull_back(end, direction, retain_graph=not last, within=casts)
        collector.returned()
        return
    pull_back(end, direction * scale.value, retain_graph=True, within=casts)
    while not collector.returned():
        scale.lower()
        pull_back(end, direction * scale.value, retain_graph=True, within=casts)
    scale.endure()
