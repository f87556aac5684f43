"""Recorded rows: the rows that the hooks of a collection hand to each layer's sums, of all examples or of a few."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from typing_extensions import override

from engine.accumulation.example_gradients import Met
from engine.accumulation.hooks import Collector
from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.output_gradients import RowObserver
from engine.gradient_identity.checked_model import Subject, unwritten
from engine.layers.layer import TreatedLayer, Use, of_examples
from engine.model.batches import Batch, tensors
from engine.model.determinism import Generators, set_generators
from engine.model.loss_directions import directions, drain_backward_queue, pull_back
from engine.model.outputs import Prediction, predict
from engine.row_layout.layer_calls import InputOverwritten, require_unwritten, version


@dataclass(eq=False)
class RowRecorder(RowObserver):
    """Keeps the rows of one layer in one forward and backward pass: those of all examples, or of a few."""

    layer: TreatedLayer
    places: tuple[int, ...] | None = None
    """The examples whose rows are kept, each numbered by its place here; None keeps those of all."""
    weight: float = 1.0
    """Factor of the direction that is pulled back: rows are those of the sum over directions."""
    uses: list[Use] = field(default_factory=list)
    """Calls whose inputs enter A, in order."""
    met: list[tuple[Use, Tensor]] = field(default_factory=list)
    """Calls with the gradients of their outputs, in the order of their arrival."""
    example_gradients: Tensor | None = None
    """(N, numbers) of a parameter that enters no product."""
    _again: list[int] | None = None
    """Calls that this direction may have run again, as a reentrant checkpoint does; None in the first direction."""

    def begin_direction(self, weight: float, *, first: bool) -> None:
        """Prepare for the gradients of one direction."""
        self.weight, self._again = weight, None if first else list(range(len(self.met)))

    @property
    def picks(self) -> bool:
        """Whether rows were picked: the rows of one example have no order of their own then."""
        return any(use.owners is not None for use in self.uses)

    @override
    def add_input_(self, use: Use) -> None:
        self.uses.append(self._kept(use))

    @override
    def follow(self, use: Use) -> Callable[[Tensor], None]:
        kept, read = self._kept(use), version(use.input)
        number: int | None = None

        def arrived(gradient: Tensor) -> None:
            nonlocal number
            if self.places is None:
                require_unwritten(use.input, read, self.layer.name)
            own = gradient if self.places is None else _cut(gradient, use, self.places)
            number = self._recomputed(kept) if number is None else number
            if number is None:
                number = len(self.met)
                self.met.append((kept, own if self.weight == 1 else own * self.weight))
            else:
                self.met[number] = kept, self.met[number][1] + self.weight * own

        return arrived

    @override
    def add_example_gradients_(self, gradients: Tensor, start: int, examples: int) -> None:
        places = range(examples) if self.places is None else self.places
        if self.example_gradients is None:
            self.example_gradients = gradients.new_zeros(len(places), gradients.shape[1])
        for number, place in enumerate(places):
            if start <= place < start + gradients.shape[0]:
                self.example_gradients[number] += self.weight * gradients[place - start]

    def _recomputed(self, kept: Use) -> int | None:
        """Find the call that was run again for another direction: the first one with the same input."""
        for place, known in enumerate(self._again or ()):
            if torch.equal(self.met[known][0].input, kept.input):
                return (self._again or []).pop(place)
        return None

    def _kept(self, use: Use) -> Use:
        if self.places is None:
            return use
        entered, owners = _cut(use.input, use, self.places), None
        if use.owners is not None:
            own = [torch.full_like(use.owners[use.owners == place], n) for n, place in enumerate(self.places)]
            owners = torch.cat(own)
        kept = None if use.kept is None else _cut(use.kept[:, None], use, self.places)[:, 0]
        return Use(entered=entered, examples=len(self.places), kept=kept, owners=owners, role=use.role)


def _cut(tensor: Tensor, use: Use, places: Sequence[int]) -> Tensor:
    """A copy of the rows of some examples, one example behind the other."""
    if use.owners is None:
        return torch.cat([of_examples(tensor, use.examples, place, place + 1) for place in places])
    rows = tensor.reshape(-1, tensor.shape[-1])
    return torch.cat([rows[use.owners == place] for place in places])


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
class ExampleRows:
    """The rows of one example in the recording of one layer."""

    recorder: RowRecorder
    example: int
    """Place in the batch."""
    has_gradients: bool = True
    """Something was pulled back: the inputs of calls without a gradient do not count then."""

    def inputs(self) -> Iterator[Tensor]:
        """Yield the example's part of each call's input, of its shape, or (rows, d_in) where rows were picked."""
        for use in [use for use, _ in self.recorder.met] if self.has_gradients else self.recorder.uses:
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
    """N of the outputs."""
    direction: Tensor | None = None
    """Vector that the loss itself would pull back of these outputs, where another was; None for `type2`."""
    places: tuple[int, ...] | None = None
    """Places in the outputs of the examples whose rows are kept, in order; None where those of all are."""

    def of(self, tensor: Tensor, number: int) -> Tensor:
        """Take one example's part of the outputs, or of the cotangent; a loss of the model's own is of all.

        Args:
            tensor: Either of them.
            number: Number of the example among those whose rows are kept.

        Returns:
            A view of one example, or the tensor itself.
        """
        if tensor.shape[0] != self.examples:
            return tensor
        place = number if self.places is None else self.places[number]
        return tensor[place : place + 1]

    def rows(self, layer: str, example: int) -> ExampleRows:
        """Return the rows of one example."""
        return ExampleRows(recorder=self.layers[layer], example=example, has_gradients=self.cotangent is not None)


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
    """Run a batch with the hooks of a collection, and keep the rows of ``layers``.

    Args:
        subject: The model, and how it is run.
        layers: Layers to record.
        forward: The batch, and the state of torch's generators.
        cotangent: What to pull back, of the shape of the outputs; None takes what the collection
            pulls back of these examples.
        places: The examples whose rows are kept; None keeps those of all.

    Returns:
        Inputs and output gradients of every call, and the outputs of the whole batch.

    Raises:
        EngineError: If the model refuses the batch.

    Memory:
        Inputs and output gradients of ``layers``, beside what the pass itself holds.
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
    statistics = tuple(NoSums(layer=layer, sharing="expand") for layer in layers)
    collector = Collector(
        statistics=statistics,
        gradients=subject.has_gradients,
        layout=subject.layout,
        observers={name: (recorder,) for name, recorder in recorders.items()},
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
    return Recording(
        layers={each.layer.name: recorders[each.layer.name] for each in statistics if each.flaw is None},
        outputs=prediction.outputs.detach(),
        cotangent=cotangent,
        examples=own.size,
        direction=direction,
        places=places,
    )


def run(subject: Subject, batch: Batch) -> Prediction:
    """Run one forward pass."""
    with subject.casting(), subject.precision.autocast(subject.device):
        prediction = predict(subject.model, batch, subject.task)
    return replace(prediction, outputs=prediction.outputs.to(subject.dtype))


def direction_of(subject: Subject, prediction: Prediction, index: Tensor) -> Tensor:
    """Compute the vector that a check pulls back: the collection's directions, added up with their weights.

    Args:
        subject: The model, and how it is run.
        prediction: The outputs, shape (N, R, C), and their loss.
        index: Numbers of the examples in the data, shape (N,), which key what is drawn.

    Returns:
        The vector, shape (N, R, C), in the precision of the outputs.
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
