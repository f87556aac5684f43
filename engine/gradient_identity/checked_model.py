"""The checked model: how a collection runs it, and a recording of the rows that its hooks hand to each layer's sums."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from typing_extensions import override

from catalog.requests.collection import Collection
from catalog.requests.inputs import Task
from engine.accumulation.example_gradients import Met
from engine.accumulation.hooks import Collector
from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.output_gradients import RowObserver
from engine.gradient_identity.recorded_rows import Recording, RowRecorder
from engine.layers.layer import TreatedLayer, Use
from engine.model.batches import Batch, tensors
from engine.model.dtype_casts import AllCasts, casts_of
from engine.model.loss_directions import directions, drain_backward_queue, pull_back
from engine.model.mixed_precision import Precision
from engine.model.outputs import Prediction, predict
from engine.model.sharding.gathered_parameters import converted, numbers_at_once, put_back
from engine.model.state.generators import Generators, set_generators
from engine.row_layout.layer_calls import InputOverwritten
from engine.row_layout.row_order import Layout

NARROW_TOLERANCE = 3e-2
"""Relative difference that rounding may explain where the model computes in 16 bits."""
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: NARROW_TOLERANCE,
    torch.float16: NARROW_TOLERANCE,
}
"""The same by what it computes in."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and how a collection runs it."""

    model: nn.Module
    task: Task
    collection: Collection
    dtype: torch.dtype
    device: torch.device
    precision: Precision
    layout: Layout
    pulls_back: bool = True
    """Gradients are looked at, where the collection has them."""
    widens: bool = False
    """Narrower types that the model names stand for float64."""

    def without_gradients(self) -> "Subject":
        """Return the same subject of which inputs and outputs alone are looked at."""
        return replace(self, pulls_back=False)

    @property
    def has_gradients(self) -> bool:
        """Whether anything is pulled back."""
        return self.pulls_back and self.collection.fisher != "forward_only"

    @property
    def curves_with_outputs(self) -> bool:
        """Whether what is pulled back of an example hangs on its outputs, though no loss asks for it (`type2`)."""
        return self.collection.fisher == "type2" and self.task.likelihood != "mse"

    @property
    def tolerance(self) -> float:
        """Relative difference that rounding may explain."""
        return TOLERANCES[self.dtype] if self.precision.amp == "off" else NARROW_TOLERANCE

    @property
    def rounding(self) -> float:
        """Unit roundoff of what the model computes in."""
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return torch.finfo(narrow.get(self.precision.amp, self.dtype)).eps

    @property
    def rounding_of_repetition(self) -> float:
        """Relative difference between two runs of the same batch: of sums that a device adds in another order."""
        return 0.0 if self.device.type == "cpu" else self.tolerance

    @property
    def is_exact(self) -> bool:
        """Whether the model computes in float64, the widest that there is."""
        return self.dtype == torch.float64

    def negligible(self, norm: float) -> float:
        """Return the norm below which a gradient is rounding beside the largest; 0 unless in float64, which decides."""
        return 10 * self.rounding * norm if self.is_exact else 0.0

    def moved(self, batch: Batch) -> Batch:
        """Return a copy of a batch on the device, in the model's precision, which the model may write to."""
        return batch.to(self.device, self.dtype)

    def casting(self) -> contextlib.AbstractContextManager[object]:
        """The context of a forward pass, and of the backward pass that may run parts of it again."""
        return AllCasts() if self.widens else contextlib.nullcontext()

    @contextlib.contextmanager
    def returning(self) -> Iterator[None]:
        """The context of a backward pass."""
        with self.casting(), casts_of(self.model):
            yield

    @contextlib.contextmanager
    def widened(self, *, widens: bool = False) -> Iterator["Subject"]:
        """The same model in float64, for the time inside; its own tensors come back bit for bit.

        Each number of the model takes 8 bytes. ``widens`` lets the narrower types that the model names stand for
        float64 too.
        """
        narrow = [
            (tensor, tensor.data)
            for tensor in (*self.model.parameters(), *self.model.buffers())
            if tensor.is_floating_point() and tensor.dtype != torch.float64
        ]
        try:
            for tensor, _ in narrow:
                tensor.data = converted(tensor, torch.float64)
            yield replace(self, dtype=torch.float64, precision=Precision(), widens=widens)
        finally:
            for tensor, data in narrow:
                put_back(tensor, data)


def widened_bytes(model: nn.Module) -> int:
    """Compute the bytes that ``Subject.widened`` takes: 8 for each floating-point number that stands here at once."""
    return 8 * numbers_at_once((*model.parameters(), *model.buffers()))


@contextlib.contextmanager
def unwritten(model: nn.Module) -> Iterator[None]:
    """Put the model's buffers back afterwards as they were: each run begins from the same ones.

    A copy of every buffer is held; those that are not stored densely are left alone.
    """
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if buffer.layout == torch.strided]
    try:
        yield
    finally:
        for buffer, before in kept:
            if not torch.equal(buffer, before):
                buffer.data.copy_(before)


@dataclass(eq=False)
class NoSums(LayerStatistics):
    """Stands for the sums of a layer where its rows are observed and enter none."""

    @override
    @property
    def joint(self) -> bool:
        # whether inputs and gradients are wanted together: not even one by one
        return False

    @override
    def add_input_(self, use: Use) -> None:
        del use

    @override
    def add_gradient_(self, use: Use, gradient: Tensor) -> None:
        del use, gradient
        self.gradients += 1

    @override
    def add_met_(self, met: Met) -> None:
        del met

    @override
    def add_example_gradients_(self, gradients: Tensor, start: int, examples: int) -> None:
        del gradients, start, examples
        self.gradients += 1


@dataclass(frozen=True, kw_only=True)
class Forward:
    """A batch, and where a forward pass of it begins."""

    batch: Batch
    """Examples, on any device."""
    start: Generators | int
    """States of torch's generators at the beginning of the forward pass, or their seed."""


def record(
    subject: Subject,
    layers: Sequence[TreatedLayer],
    forward: Forward,
    cotangent: Tensor | None = None,
    places: Sequence[int] | None = None,
) -> Recording:
    """Run a batch with the hooks of a collection, and keep inputs and output gradients of every call of ``layers``.

    ``forward`` is the batch, and the state of torch's generators. ``cotangent`` is pulled back, of the shape of the
    outputs; None takes what the collection pulls back of these examples. ``places`` are the examples whose rows are
    kept; None keeps those of all. The outputs are those of the whole batch. ``EngineError`` if the model refuses it.
    The rows of ``layers`` are held beside what the pass itself holds.
    """
    layout = subject.layout
    kept = None if places is None else tuple(places)
    while True:
        try:
            return _recorded(replace(subject, layout=layout), layers, forward, cotangent, kept)
        except InputOverwritten as found:
            layout = replace(layout, overwritten=layout.overwritten | set(found.layers))


def _recorded(
    subject: Subject,
    layers: Sequence[TreatedLayer],
    forward: Forward,
    cotangent: Tensor | None,
    places: tuple[int, ...] | None,
) -> Recording:
    recorders = {layer.name: RowRecorder(layer=layer, places=places) for layer in layers}
    prediction, names, cotangent, direction = observe(subject, layers, forward, recorders, cotangent)
    return Recording(
        layers={name: recorders[name] for name in names},
        outputs=prediction.outputs.detach(),
        cotangent=cotangent,
        examples=forward.batch.size,
        direction=direction,
        places=places,
    )


def observe(
    subject: Subject,
    layers: Sequence[TreatedLayer],
    forward: Forward,
    observers: Mapping[str, RowObserver],
    cotangent: Tensor | None = None,
) -> tuple[Prediction, list[str], Tensor | None, Tensor | None]:
    """Run a batch with the hooks of a collection, which show the rows of each layer to its observer and sum none.

    It returns the prediction, the names of the layers that no hook has refused, what was pulled back, and what the loss
    itself asks for where that was another vector; arguments and errors are those of ``record``.
    """
    statistics = tuple(NoSums(layer=layer, sharing="expand") for layer in layers)
    collector = Collector(
        statistics=statistics,
        gradients=subject.has_gradients,
        layout=subject.layout,
        observers={name: (observer,) for name, observer in observers.items()},
    )
    own, direction = subject.moved(forward.batch), None
    set_generators(forward.start, subject.device)
    with (
        drain_backward_queue(subject.device),
        unwritten(subject.model),
        collector.attached(),
        torch.set_grad_enabled(subject.has_gradients),
    ):
        collector.begin(own.size, None, tensors(own.inputs))
        prediction = run(subject, own)
        collector.forward_done()
        if subject.has_gradients and prediction.outputs.requires_grad and (prediction.terms or cotangent is not None):
            if cotangent is None or subject.task.likelihood == "model":
                cotangent = direction_of(subject, prediction, own.index)
            elif subject.collection.fisher != "type2" and prediction.terms:
                direction = direction_of(subject, prediction, own.index)
            pull_back(get_gradient_edge(prediction.outputs), cotangent, within=subject.returning())
            collector.returned()
        elif subject.task.likelihood == "model" and not prediction.terms:
            # without a loss term of its own, an example alone has no loss of the model's own to pull back
            cotangent = None
        collector.end()
    return prediction, [each.layer.name for each in statistics if each.flaw is None], cotangent, direction


def run(subject: Subject, batch: Batch) -> Prediction:
    """Run one forward pass."""
    with subject.casting(), subject.precision.autocast(subject.device):
        prediction = predict(subject.model, batch, subject.task)
    return replace(prediction, outputs=prediction.outputs.to(subject.dtype))


def direction_of(subject: Subject, prediction: Prediction, index: Tensor) -> Tensor:
    """Compute the vector that a check pulls back: the collection's directions, added up with their weights.

    It has the shape (N, R, C) and the precision of the outputs. ``index`` (N,) are the numbers of the examples in the
    data, which key what is drawn.
    """
    total: Tensor | None = None
    for number, direction in enumerate(directions(prediction, index, subject.task, subject.collection)):
        total = direction if total is None else total + direction_weight(number) * direction
    if total is None:
        raise ValueError("a collection without gradients has no direction")
    return total


def direction_weight(number: int) -> float:
    """Return the factor of one direction of a batch in the sum of all that is checked."""
    return 1.0 if number == 0 else 1.0 + 0.5 * math.sin(1.7 * number)
