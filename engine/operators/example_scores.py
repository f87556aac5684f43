"""Gradients of single examples, and their inner products with given vectors.

A few examples' gradients are taken by plain autograd, one example at a time, which is right whatever the model does.
Those of all training examples are never formed: the hooks of a collection see the rows of every example, and each
layer multiplies the gradients that it makes of them, a few at a time, by all vectors at once (``ScoreStatistics``):
``s_qn = ⟨V_q, ∇W ℓ_n⟩`` of vectors V_q of a layer's matrix (out_dim, in_dim).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from typing_extensions import override

from engine.accumulation.example_gradients import (
    NUMBERS_AT_ONCE,
    Met,
    Rows,
    block_gradients,
    example_rows,
    summed_by_id,
    tied_rows,
)
from engine.accumulation.hooks import Collector
from engine.accumulation.layer_statistics import LayerStatistics
from engine.collection.pass_job import PassJob
from engine.errors import ModelRefused, NonFiniteLoss, UsageError, WrongShape
from engine.layers.layer import BlockLayer, TreatedLayer, Use
from engine.layers.tied import TiedHeadLayer
from engine.model.batches import Batch, tensors
from engine.model.dtype_casts import casts_of
from engine.model.example_digests import digest_examples
from engine.model.loss_directions import loss_gradient, pull_back
from engine.model.outputs import predict
from engine.model.state.own_gradients import needing_gradients
from engine.operators.exact.columns import trained
from engine.operators.exact.data_passes import DataPasses

_REMEDY = "mend the model, or leave `influence` out"
_POINTER = "/influence"
_DIGESTS = ""
"""Stands beside the names of groups, which are not empty."""


@dataclass(eq=False)
class ScoreStatistics(LayerStatistics):
    """The scores of one layer for the examples that go through the model now."""

    vectors: Tensor | None = None
    """V, shape (Q, groups, out_dim, in_dim), of an A that is diagonal (Q, 1, in_dim, out_dim): a row for each id."""
    scores: Tensor | None = None
    """(Q, N), float64."""

    def begin_(self, examples: int) -> None:
        """Prepare for ``examples`` that go through the model together."""
        if self.vectors is None:
            raise ValueError(f"layer `{self.layer.name}` has no vectors")
        self.scores = self.vectors.new_zeros(self.vectors.shape[0], examples, dtype=torch.float64)

    @override
    @property
    def joint(self) -> bool:
        return True

    @override
    def add_input_(self, use: Use) -> None:
        """Do nothing: A is known already."""

    @override
    def add_gradient_(self, use: Use, gradient: Tensor) -> None:
        """Do nothing: G is known already."""

    @override
    def add_example_gradients_(self, gradients: Tensor, start: int, examples: int) -> None:
        self._add_(slice(start, start + gradients.shape[0]), gradients)

    @override
    def add_met_(self, met: Met) -> None:
        layer, vectors = self.layer, self.vectors
        if vectors is None:
            raise ValueError(f"layer `{layer.name}` has no vectors")
        if isinstance(layer, BlockLayer):
            self._add_(slice(None), block_gradients(layer, met))
        elif isinstance(layer, TiedHeadLayer):
            for examples, gradients in self._tied(layer, met):
                self._add_(examples, gradients)
        elif layer.form == "diagonal":
            self._add_table_(met)
        else:
            for rows in example_rows(layer, met, vectors.dtype, lambda _: layer.out_dim * layer.in_dim):
                self._add_(rows.examples, self._gradients(rows))
                # or they would be held while the next ones are written
                del rows

    def _add_(self, examples: slice | Tensor, gradients: Tensor) -> None:
        """Add the products with gradients of n examples, one behind the other, each of all the layer's numbers."""
        if self.vectors is None or self.scores is None:
            raise ValueError(f"layer `{self.layer.name}` has no vectors")
        vectors = self.vectors.flatten(1)
        # of the two ways round the faster one, by up to three times, where the examples are few
        products = gradients.reshape(-1, vectors.shape[1]).to(vectors.dtype) @ vectors.T
        self.scores[:, examples] += products.T

    def _gradients(self, rows: Rows) -> Tensor:
        """(n·groups, out_dim, in_dim) of the examples of ``rows``, the bias as the last column."""
        layer, a, g = self.layer, rows.a, rows.g
        product = g[:, 0, :, None] * a[:, 0, None, :] if g.shape[1] == 1 else torch.bmm(g.mT, a)
        return torch.cat((product, g.sum(1)[:, :, None]), 2) if layer.bias else product

    def _tied(self, layer: TiedHeadLayer, met: Met) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """A lookup of id i with the gradient v is, in the head's orientation, ``e_i [v 0]ᵀ``."""
        if self.vectors is None:
            raise ValueError(f"layer `{layer.name}` has no vectors")
        for table, head in tied_rows(layer, met, self.vectors.dtype, layer.out_dim * layer.in_dim):
            known = head or table
            if known is None:
                continue
            if head is not None:
                made = self._gradients(head)
            else:
                made = known.g.new_zeros(known.g.shape[0], layer.out_dim, layer.in_dim)
            if table is not None:
                ids = table.a.squeeze(-1)
                which = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(ids)
                made[:, :, : layer.fan_in].index_put_((which, ids), table.g, accumulate=True)
            yield known.examples, made

    def _add_table_(self, met: Met) -> None:
        vectors, scores = self.vectors, self.scores
        if vectors is None or scores is None:
            raise ValueError(f"layer `{self.layer.name}` has no vectors")
        found = summed_by_id(self.layer, met, vectors.dtype)
        step = max(1, NUMBERS_AT_ONCE // (vectors.shape[0] * self.layer.out_dim))
        for begin in range(0, found.ids.numel(), step):
            part = slice(begin, begin + step)
            products = torch.einsum("qpd,pd->qp", vectors[:, 0, found.ids[part]], found.sums[part])
            scores.index_add_(1, found.examples[part], products.to(scores.dtype))


def statistics_of(treated: Sequence[TreatedLayer], vectors: dict[str, Tensor]) -> list[ScoreStatistics]:
    """Return the covered layers with their vectors (Q, out_dim, in_dim), which are taken over."""
    found = []
    for layer in treated:
        if layer.parts[0] not in vectors:
            continue
        own = torch.stack([vectors.pop(part) for part in layer.parts], 1)
        if layer.form == "diagonal":
            own = own.mT.contiguous()
        found.append(ScoreStatistics(layer=layer, sharing="expand", vectors=own))
    if vectors:
        raise ModelRefused(
            f"layer `{next(iter(vectors))}` was collected, and is not found now; give the same model",
            pointer="/model",
        )
    return found


def example_gradients(job: PassJob, batch: Batch, names: tuple[str, ...]) -> Tensor:
    """Return the gradient of each example's summed loss at its own targets.

    Args:
        job: The model, held still as its passes need it.
        batch: N examples, on the device.
        names: The trainable parameters, in the canonical order.

    Returns:
        Shape (N, P), on the host, in the precision of the passes.

    Raises:
        UsageError: If the model does not take an example, or its targets do not fit; if a gradient is not finite.
    """
    parameters = trained(job.model, names)
    rows = torch.zeros(batch.size, sum(each.numel() for each in parameters.values()), dtype=job.dtype)
    with needing_gradients(parameters.values()):
        for row, example in zip(rows, batch.slices(1), strict=True):
            job.workspace.ports.raise_if_cancelled()
            with torch.enable_grad(), _of_query(example):
                prediction = predict(job.model, example, job.task)
            if not prediction.terms or not prediction.outputs.requires_grad:
                continue
            direction = loss_gradient(prediction, job.task)
            with casts_of(job.model):
                found = torch.autograd.grad(
                    prediction.outputs, list(parameters.values()), direction, materialize_grads=True
                )
            torch.cat([each.to_dense().reshape(-1).to("cpu") for each in found], out=row)
    # a finite sum, which reads no more than once, has finite terms
    if not (bool(rows.sum().isfinite()) or bool(torch.isfinite(rows).all())):
        raise UsageError(
            "the gradient of a query holds NaN or infinite numbers; look at its inputs, or take "
            "`collection.dtype: float64`",
            pointer="/influence/query",
        )
    return rows


@contextlib.contextmanager
def _of_query(example: Batch) -> Iterator[None]:
    """Let a failure name the query that it is of: the model is as it was in the pass over the data."""
    try:
        yield
    except (ModelRefused, NonFiniteLoss, WrongShape) as error:
        raise type(error)(
            f"query {int(example.index[0])}: {error.message.partition('; check that data and model')[0]}; give queries "
            "of the shapes, dtypes and labels that the model takes in `data`",
            layer=error.layer,
            pointer="/influence/query",
        ) from (error.__cause__ or error)


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
