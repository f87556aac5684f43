"""Recorded rows: the rows that the hooks of a collection hand to each layer's sums, kept instead of summed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from engine.accumulation.example_gradients import Met
from engine.accumulation.hooks import Collector
from engine.accumulation.layer_statistics import LayerStatistics
from engine.gradient_identity.checked_model import Subject, unwritten
from engine.layers.layer import TreatedLayer, Use, of_examples
from engine.model.backward_pass import drain_backward_queue, pull_back
from engine.model.batches import Batch, tensors
from engine.model.counter_rng import normals
from engine.model.determinism import seed_generators
from engine.model.loss_directions import directions, root_product
from engine.model.outputs import Prediction, predict
from engine.row_layout.layer_calls import InputOverwritten


@dataclass(eq=False)
class RowRecorder(LayerStatistics):
    """Keeps the rows of one layer in one forward and backward pass."""

    uses: list[Use] = field(default_factory=list)
    """Calls whose inputs enter A, in order."""
    met: list[tuple[Use, Tensor]] = field(default_factory=list)
    """Calls with the gradients of their outputs, in the order of their arrival."""
    example_gradients: Tensor | None = None
    """(N, numbers) of a parameter that enters no product."""

    @property
    def joint(self) -> bool:
        """Whether inputs and gradients are wanted together: always."""
        return True

    @property
    def picks(self) -> bool:
        """Whether rows were picked: the rows of one example have no order of their own then."""
        return any(use.owners is not None for use in self.uses)

    def add_input_(self, use: Use) -> None:
        """Keep one call's input.

        Args:
            use: The call, with the tensor that entered it.
        """
        self.uses.append(use)

    def add_gradient_(self, use: Use, gradient: Tensor) -> None:
        """Count one gradient, which comes again with all calls of the layer.

        Args:
            use: The call; ignored.
            gradient: Gradient of its output, of that output's shape; ignored.
        """
        del use, gradient
        self.gradients += 1

    def add_met_(self, met: Met) -> None:
        """Keep all calls of one direction.

        Args:
            met: Each call of the layer with the gradient of its output.
        """
        self.met.extend(met)

    def add_example_gradients_(self, gradients: Tensor, start: int, examples: int) -> None:
        """Keep gradients of examples with respect to a bare parameter.

        Args:
            gradients: Gradients of k examples, shape (k, numbers).
            start: Place of the first of them in the batch.
            examples: Examples of the whole batch.
        """
        self.gradients += 1
        if self.example_gradients is None:
            self.example_gradients = gradients.new_zeros(examples, gradients.shape[1])
        self.example_gradients[start : start + gradients.shape[0]] = gradients


@dataclass(frozen=True, kw_only=True)
class ExampleRows:
    """The rows of one example in the recording of one layer."""

    recorder: RowRecorder
    example: int
    """Place in the batch."""

    def inputs(self) -> Iterator[Tensor]:
        """Yield the example's part of each call's input, of its shape, or (rows, d_in) where rows were picked."""
        for use in self.recorder.uses:
            if use.owners is None:
                yield use.of_examples(self.example, self.example + 1).input
            else:
                entered = use.input
                yield entered.reshape(-1, entered.shape[-1])[use.owners == self.example]

    def gradients(self) -> Iterator[Tensor]:
        """Yield the example's part of each output's gradient, of its shape, or (rows, d_out) where rows were picked."""
        for use, gradient in self.recorder.met:
            if use.owners is None:
                yield of_examples(gradient, use.examples, self.example, self.example + 1)
            else:
                yield gradient.reshape(-1, gradient.shape[-1])[use.owners == self.example]
        if self.recorder.example_gradients is not None:
            yield self.recorder.example_gradients[self.example]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The rows of some layers in one forward and backward pass."""

    layers: dict[str, RowRecorder]
    outputs: Tensor
    """(N, R, C), detached."""
    cotangent: Tensor | None
    """The vector that was pulled back, of the shape of ``outputs``; None where none was."""
    examples: int

    def rows(self, layer: str, example: int) -> ExampleRows:
        """Return the rows of one example.

        Args:
            layer: Name of a recorded layer.
            example: Place in the batch.

        Returns:
            A view of the recording.
        """
        return ExampleRows(recorder=self.layers[layer], example=example)


def record(
    subject: Subject, layers: Sequence[TreatedLayer], batch: Batch, seed: int, cotangent: Tensor | None = None
) -> Recording:
    """Run ``batch`` with the hooks of a collection, and keep the rows of ``layers``.

    Args:
        subject: The model, and how it is run.
        layers: Layers to record.
        batch: Examples, on any device.
        seed: State of torch's generator at the beginning of the forward pass.
        cotangent: What to pull back, of the shape of the outputs; None takes what the collection
            pulls back of these examples.

    Returns:
        Inputs and output gradients of every call.

    Raises:
        EngineError: If the model refuses the batch.

    Memory:
        Inputs and output gradients of ``layers``, beside what the pass itself holds.
    """
    written = subject.overwritten
    while True:
        try:
            return _recorded(replace(subject, overwritten=written), layers, batch, seed, cotangent)
        except InputOverwritten as found:
            written |= set(found.layers)


def _recorded(
    subject: Subject, layers: Sequence[TreatedLayer], batch: Batch, seed: int, cotangent: Tensor | None
) -> Recording:
    recorders = {layer.name: RowRecorder(layer=layer, sharing="expand") for layer in layers}
    collector = Collector(
        statistics=tuple(recorders.values()),
        gradients=subject.has_gradients,
        tables=subject.tables,
        places=subject.places,
        orders=subject.orders,
        overwritten=subject.overwritten,
    )
    own = subject.moved(batch)
    seed_generators(seed)
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
            pull_back(get_gradient_edge(prediction.outputs), cotangent, within=subject.returning())
            collector.returned()
        collector.end()
    return Recording(layers=recorders, outputs=prediction.outputs.detach(), cotangent=cotangent, examples=batch.size)


def run(subject: Subject, batch: Batch) -> Prediction:
    """Run one forward pass.

    Args:
        subject: The model, and how it is run.
        batch: Examples on the model's device.

    Returns:
        The prediction, its outputs in the precision of the sums.

    Raises:
        EngineError: If the model refuses the batch.
    """
    with subject.casting(), subject.precision.autocast(subject.device):
        prediction = predict(subject.model, batch, subject.task)
    return replace(prediction, outputs=prediction.outputs.to(subject.dtype))


def direction_of(subject: Subject, prediction: Prediction, index: Tensor) -> Tensor:
    """Choose the vector that a check pulls back: the collection's first direction, or a random one for `type2`.

    Args:
        subject: The model, and how it is run.
        prediction: The outputs, shape (N, R, C), and their loss.
        index: Numbers of the examples in the data, shape (N,), which key what is drawn.

    Returns:
        The vector, shape (N, R, C), in the precision of the outputs.
    """
    if subject.collection.fisher == "type2" and subject.task.likelihood != "model":
        count, terms, width = prediction.outputs.shape
        numbers = torch.arange(terms * width, device=index.device)[None, :]
        drawn = normals(subject.collection.seed, index[:, None], numbers)
        return root_product(prediction, drawn.view(count, terms, width).to(prediction.outputs.dtype), subject.task)
    return next(directions(prediction, index, subject.task, subject.collection))
