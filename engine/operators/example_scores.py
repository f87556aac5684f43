"""Gradients of single examples, and their inner products with given vectors.

A few examples' gradients are taken by plain autograd, one example at a time, which is right whatever the model does.
Those of all training examples are never formed: the hooks of a collection see the rows of every example, and each
layer multiplies the gradients that it makes of them, a few at a time, by the vectors (``ScoreStatistics``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from engine.accumulation.hooks import Collector
from engine.collection.pass_job import PassJob
from engine.errors import ModelRefused, UsageError
from engine.model.backward_pass import pull_back
from engine.model.batches import Batch, tensors
from engine.model.dtype_casts import casts_of
from engine.model.example_digests import digest_examples
from engine.model.loss_directions import loss_gradient
from engine.model.outputs import predict
from engine.operators.exact.columns import trained
from engine.operators.exact.data_passes import DataPasses
from engine.operators.score_statistics import ScoreStatistics

_REMEDY = "mend the model, or leave `influence` out"
_POINTER = "/influence"
_DIGESTS = ""
"""Stands beside the names of groups, which are not empty."""


def example_gradients(job: PassJob, batch: Batch, names: tuple[str, ...]) -> Tensor:
    """Return the gradient of each example's summed loss at its own targets.

    Args:
        job: The model, held still as its passes need it.
        batch: N examples, on the device.
        names: The trainable parameters, in the canonical order.

    Returns:
        Shape (N, P), on the host, in the precision of the passes.

    Raises:
        WrongShape: If the examples have no targets.
        UsageError: If a gradient is not finite.
    """
    parameters = trained(job.model, names)
    rows = torch.zeros(batch.size, sum(each.numel() for each in parameters.values()), dtype=job.dtype)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    try:
        for row, example in zip(rows, batch.slices(1), strict=True):
            job.workspace.ports.raise_if_cancelled()
            with torch.enable_grad():
                prediction = predict(job.model, example, job.task)
            if not prediction.terms or not prediction.outputs.requires_grad:
                continue
            direction = loss_gradient(prediction, job.task)
            with casts_of(job.model):
                found = torch.autograd.grad(
                    prediction.outputs, list(parameters.values()), direction, materialize_grads=True
                )
            torch.cat([each.to_dense().reshape(-1).to("cpu") for each in found], out=row)
    finally:
        for parameter in parameters.values():
            parameter.requires_grad_(False)
    # a finite sum, which reads no more than once, has finite terms
    if not (bool(rows.sum().isfinite()) or bool(torch.isfinite(rows).all())):
        raise UsageError(
            "the gradient of a query holds NaN or infinite numbers; look at its inputs, or take "
            "`collection.dtype: float64`",
            pointer="/influence/query",
        )
    return rows


def score_examples(
    job: PassJob,
    statistics: Sequence[ScoreStatistics],
    groups: Mapping[str, frozenset[str]],
    report: Callable[[], None],
) -> tuple[dict[str, Tensor], float, Tensor]:
    """Multiply the gradient of every example by vectors, in one pass over the data.

    Args:
        job: The model with its data, held still and probed: it knows the layout of the layers' rows.
        statistics: The layers, each with its vectors.
        groups: Names of the layers' parts, by the name of their group.
        report: Called after every batch.

    Returns:
        The scores of each group, shape (Q, N) in the order of the data, in the precision of the passes on the host; and
        the weight of all loss terms; and the examples' digests, shape (N,), int64, in that order.

    Raises:
        ModelRefused: If a layer is called in a way that the probe did not show.
        DataDiffer: If other examples enter than entered the collection.

    Memory:
        Scores of all examples, and the graph of a slice.
    """
    passes = DataPasses(
        job=job, updates=0, report=report, what="the scores", remedy=_REMEDY, pointer=_POINTER
    )  # fmt: skip
    collector = Collector(statistics=tuple(statistics), layout=job.layout)
    found: dict[str, list[Tensor]] = {name: [] for name in (*groups, _DIGESTS)}

    def compute(batch: Batch, _: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        # before the model, which may write to its inputs
        digests = digest_examples(batch, job.task).to("cpu")
        for each in statistics:
            each.begin_(batch.size)
        collector.begin(batch.size, None, tensors(batch.inputs))
        with torch.enable_grad():
            prediction = predict(job.model, batch, job.task)
        collector.forward_done()
        divisor = prediction.divisor
        if prediction.terms and prediction.outputs.requires_grad:
            direction, end = loss_gradient(prediction, job.task), get_gradient_edge(prediction.outputs)
            del prediction
            pull_back(end, direction, within=casts_of(job.model))
            collector.returned()
        collector.end()
        for each in statistics:
            if each.flaw is not None:
                raise ModelRefused(
                    f"layer `{each.layer.name}` was collected, and its rows are not seen now ({each.flaw}); {_REMEDY}",
                    pointer="/model",
                )
        scores = {name: _sum(statistics, layers).to("cpu", job.dtype) for name, layers in groups.items()}
        return {**scores, _DIGESTS: digests}, divisor

    def add(scores: Mapping[str, Tensor], _: float) -> None:
        for name, own in scores.items():
            found[name].append(own)

    with collector.attached():
        total = passes.run((), compute, add)
    digests = torch.cat(found.pop(_DIGESTS))
    return {name: torch.cat(parts, 1) for name, parts in found.items()}, total, digests


def _sum(statistics: Sequence[ScoreStatistics], layers: frozenset[str]) -> Tensor:
    own = [each.scores for each in statistics if each.scores is not None and not layers.isdisjoint(each.layer.parts)]
    return torch.stack(own).sum(0)


def of_examples(job: PassJob, batch: Batch) -> PassJob:
    """Return the same job over the examples of one batch.

    Args:
        job: The probed job.
        batch: The examples, on any device.
    """
    inputs = replace(
        job.workspace.inputs,
        batches=lambda: iter([(batch.inputs, batch.targets, batch.index)]),
        examples=batch.size,
        labels=None,
    )
    return replace(job, workspace=replace(job.workspace, inputs=inputs), entered=None)
