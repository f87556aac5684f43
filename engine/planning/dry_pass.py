"""Dry pass: what a collection's own hooks hold of a pass there and back, where modules alone do not show it."""

import torch
from torch.autograd.graph import get_gradient_edge

from engine.accumulation.hooks import Collector
from engine.accumulation.layer_statistics import LayerStatistics
from engine.collection.normalise import foreseen_flaw
from engine.collection.pass_job import PassJob
from engine.layers.layer import TreatedLayer
from engine.model.backward_pass import drain_backward_queue, pull_back
from engine.model.batches import Batch, tensors
from engine.model.determinism import seed_generators
from engine.model.dtype_casts import casts_of
from engine.model.outputs import predict
from engine.model.pass_peak import StorageEvents


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
        tables=job.tables,
        places=job.places,
        masking=job.masking,
        orders=job.orders,
        overwritten=job.overwritten,
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
