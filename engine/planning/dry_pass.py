"""Dry pass: what a collection's own hooks hold of a pass there and back, where modules alone do not show it.

Its batches are copies of one example, or the first batch as it is. A plain call of the first batch by itself comes
before: it alone can say that data and model do not belong together.
"""

import dataclasses

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from engine.accumulation.hooks import Collector
from engine.accumulation.layer_statistics import LayerStatistics
from engine.collection.normalise import foreseen_flaw
from engine.collection.pass_job import PassJob
from engine.collection.probe import Probe
from engine.errors import EngineError, ModelChanged, ModelRefused
from engine.gradient_identity.schedule import different_examples, pick_examples
from engine.layers.coverage import Survey
from engine.layers.layer import TreatedLayer
from engine.memory.out_of_memory import lost_device, ran_out_of_memory
from engine.model.batches import Batch, map_tensors, tensors
from engine.model.dtype_casts import casts_of
from engine.model.loss_directions import drain_backward_queue, pull_back
from engine.model.outputs import predict
from engine.model.pass_peak import StorageEvents
from engine.model.state.generators import seed_generators
from engine.model.state.own_gradients import asks_for_gradients, lacks_own_gradients
from engine.row_layout.layer_calls import Call, called, record_calls
from engine.tracing.function_mode import ParameterUseMode
from engine.tracing.functional_layers import Uses


def explain_refusal(job: PassJob, refused: ModelRefused) -> ModelRefused:
    """Say of a model that raised whether it does so by itself, or only where it is watched.

    It returns the refusal itself where the model raises in a plain call too, or on a later batch than the first; else
    one that does not blame the data.
    """
    batch = job.probed_batch()
    if lacks_own_gradients(job.model, refused):
        return _refused_later(refused)
    if refused.pointer != "/data" or refused.examples is None or batch.index.is_meta:
        return refused
    if not set(refused.examples) <= set(batch.index.tolist()):
        return _refused_later(refused) if asks_for_gradients(refused) else refused
    unlabelled = job.task if job.task.likelihood == "model" else dataclasses.replace(job.task, loss=None)
    try:
        with torch.enable_grad():
            predict(job.model, job.moved(batch), unlabelled)
    except EngineError:
        return refused
    said = refused.message.partition("; check that data and model")[0]
    return ModelRefused(
        f"{said}; by itself the model runs on its first batch, so it raises where its layers are watched, or on a part "
        "of that batch: let `forward` work on any number of examples, and on parameters that need no gradient",
        layer=refused.layer,
        pointer="/model",
    )


def _refused_later(refused: ModelRefused) -> ModelRefused:
    """Say of a model that it took gradients of its own where no dry run had shown that it does."""
    said = refused.message.partition("; check that data and model")[0].partition("; a model that can be trained")[0]
    return ModelRefused(
        f"{said}; within a pass a model can take a gradient of its own parameters only if it does so in the first "
        "batch: let it take the same ones in every batch, or write that part without them",
        layer=refused.layer,
        pointer="/model",
    )


DRY_EXAMPLES = (2, 3)
"""One example, repeated. Not once alone: a model may squeeze a batch of one away."""
_DIFFERENT_EXAMPLES = 5
"""So many different ones show which layers are given rows of some alone."""


def samples_of(job: PassJob, seen: Probe) -> list[Batch]:
    """Return the batches of a dry run: one example repeated, or the first batch as it is."""
    batch = job.moved(job.probed_batch())
    if seen.whole:
        return [batch]
    sizes = (1,) if job.collection.batch_size == 1 else DRY_EXAMPLES
    return [repeated(batch, size) for size in sizes]


def different_sample(batch: Batch) -> Batch:
    """Return a few different examples of a batch, which may take different ways through a model."""
    return pick_examples(batch, different_examples(batch, _DIFFERENT_EXAMPLES))


def repeated(batch: Batch, times: int) -> Batch:
    """Return the first example of a batch, repeated."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor[:1].repeat_interleave(times, 0)

    return Batch(
        inputs=map_tensors(batch.inputs, copied),
        targets=map_tensors(batch.targets, copied),
        index=copied(batch.index),
    )


def pass_events(
    job: PassJob, treated: tuple[TreatedLayer, ...], mixed: frozenset[str], batch: Batch, *, directions: int
) -> list[int]:
    """Return the bytes held after each event of one pass of ``batch`` there and back.

    Memory:
        What is held at most.
    """
    wanted = job.collection.exact_trace
    statistics = tuple(
        LayerStatistics(layer=layer, sharing="expand", traced=wanted, flaw=foreseen_flaw(layer, job.collection, mixed))
        for layer in treated
    )
    collector = Collector(
        statistics=statistics,
        layout=job.layout,
    )
    events = StorageEvents()
    seed_generators(job.collection.seed)
    with drain_backward_queue(job.workspace.machine.device), collector.attached(), torch.enable_grad(), events.noted():
        collector.begin(batch.size, batch.mask, tensors(batch.inputs))
        with job.precision.autocast(job.workspace.machine.device):
            prediction = predict(job.model, batch, job.task)
        collector.forward_done()
        outputs = prediction.outputs.to(job.dtype)
        if outputs.requires_grad:
            end, direction = get_gradient_edge(outputs), torch.zeros_like(outputs)
            del prediction, outputs
            for left in reversed(range(directions)):
                pull_back(end, direction, retain_graph=left > 0, within=casts_of(job.model))
    return events.held


def watch_operations(
    job: PassJob, survey: Survey, batch: Batch, parameters: dict[str, Tensor]
) -> tuple[Uses, list[Call]]:
    """Return the uses of ``parameters`` with ``batch``, and the calls of the modules."""
    uses = Uses(examples=batch.size)
    interception = ParameterUseMode(parameters, uses, proving=True)
    interception.begin(tensors(batch.inputs), batch.size)
    tables = job.layout.tables
    spread = [module for role, module in called(survey.treated) if role.name in tables]
    with torch.enable_grad(), record_calls(survey.treated, batch.size, tables) as calls, interception.watching():
        # what a table is spread to has an example's copy for each
        handles = [module.register_forward_hook(lambda _, __, output: interception.enters(output)) for module in spread]
        try:
            predict(job.model, batch, job.task)
        finally:
            for handle in handles:
                handle.remove()
    return uses, calls


def require_undecided(error: Exception, model: nn.Module) -> None:
    """Raise an error anew that an optional probe is not to hide.

    Memory or a device is gone, a parameter moved, or the model takes gradients of its own that it can be given.
    """
    gone = ran_out_of_memory(error) or lost_device(error)
    if gone or isinstance(error, ModelChanged) or lacks_own_gradients(model, error):
        raise error
