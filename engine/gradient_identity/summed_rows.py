"""Summed rows: the rows of a few examples of one batch, as the hooks of a pass hand them to its sums.

A batch may go through the model in several groups. Each group that holds one of the examples keeps their rows, their
outputs and what was pulled back of them, and where torch's generators stood.

A signature names what ran in a forward pass, by the nodes of its autograd graph and the calls of its layers. A branch
that the data decide calls other layers, or leaves other nodes or the same ones in another order.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from engine.accumulation.hooks import Collector
from engine.gradient_identity.batch_sums import BatchSums
from engine.gradient_identity.checked_model import Forward, direction_weight
from engine.gradient_identity.recorded_rows import GradientSketch, Recording, RowRecorder, Sketch, sketch
from engine.layers.layer import TreatedLayer
from engine.model.batches import Batch
from engine.model.outputs import Prediction
from engine.model.state.generators import Generators
from engine.row_layout.layer_calls import version

_MOST_NODES = 2**14
"""Nodes that are looked at, from the outputs back."""


def graph_signature(outputs: Tensor) -> tuple[str, int]:
    """Return a digest of the types and the order of the nodes that outputs come from, and the number of nodes.

    It is the same in every process, and empty for outputs without a graph.
    """
    root = outputs.grad_fn
    if root is None:
        return "", 0
    numbers, order, parts = {root: 0}, [root], []
    for node in islice(order, _MOST_NODES):
        parts.append(node.name())
        for following, _ in node.next_functions:
            if following is None:
                parts.append("-")
                continue
            number = numbers.get(following)
            if number is None:
                number = numbers[following] = len(order)
                # the list grows while it is walked
                order.append(following)
            parts.append(str(number))
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=8).hexdigest(), len(order)


def project_outputs(outputs: Tensor) -> Tensor:
    """Take each position's outputs along one direction, drawn once: (N, R, C) to (N, R).

    The expected square of a difference along it is the square of its norm (Johnson and Lindenstrauss, 1984).
    """
    draw = torch.randn(outputs.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return outputs @ draw.to(outputs)


_SMALL = 2**16
"""Numbers of a buffer of which a copy costs nothing."""


@dataclass(kw_only=True)
class Group:
    """Examples that go through the model together, some of which are kept."""

    number: int
    """Its place among the groups of the batch."""
    places: tuple[int, ...]
    """Places in the group of the examples that are kept."""
    index: tuple[int, ...]
    """Their numbers in the data."""
    start: Generators
    """States of torch's generators when its forward pass began."""
    recorders: dict[str, RowRecorder]
    size: int
    """Examples of the group."""
    buffers: list[tuple[Tensor, int, Tensor | None]]
    """The model's buffers, each with its version, and a copy of the numbers that the forward pass began with; no copy
    of a large one."""
    outputs: Tensor | None = None
    """Those of the examples that are kept, shape (k, R, C), or a loss of the model's own."""
    cotangent: Tensor | None = None
    """The sum of the directions that were pulled back, each with its weight, of the same shape."""
    directions: int = 0
    """Directions so far."""

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Let the model's buffers hold what the forward pass began with, for the time inside."""
        written = [(buffer, before) for buffer, read, before in self.buffers if version(buffer) != read]
        after = [buffer.detach().clone() for buffer, before in written if before is not None]
        copied = [(buffer, before) for buffer, before in written if before is not None]
        try:
            for buffer, before in copied:
                buffer.data.copy_(before)
            yield
        finally:
            for (buffer, _), own in zip(copied, after, strict=True):
                buffer.data.copy_(own)

    def cut(self, tensor: Tensor) -> Tensor:
        """Copy what of outputs or a direction, (N, R, C), belongs to the k examples that are kept, (k, R, C).

        A copy of the whole tensor where it is not one of N examples.
        """
        if tensor.shape[0] != self.size:
            return tensor.clone()
        return tensor[torch.tensor(self.places, device=tensor.device)]


@dataclass(kw_only=True)
class AllExamples:
    """Summaries of the N examples of one group: outputs along a direction, and two numbers for each layer."""

    start: Generators
    """States of the generators when its forward pass began."""
    sketches: Mapping[str, GradientSketch]
    """By layer whose rows stand example by example; empty where nothing is pulled back."""
    projected: Tensor = field(default_factory=lambda: torch.empty(0))
    """(N, R) the outputs, as ``project_outputs`` takes them."""
    directions: int = 0

    def directed(self) -> None:
        """Begin with another direction."""
        for each in self.sketches.values():
            each.weight = direction_weight(self.directions)
        self.directions += 1


@dataclass(kw_only=True)
class SummedRows:
    """The rows of a few examples of one batch."""

    layers: Sequence[TreatedLayer]
    """Layers whose rows are kept."""
    index: frozenset[int]
    """Numbers of the examples in the data."""
    parts: Callable[[], Iterator[Batch]]
    """Makes the groups of the batch anew, as they were before the model saw them."""
    buffers: Sequence[Tensor] = ()
    """The model's buffers, which a forward pass may write to."""
    signatures: set[str] = field(default_factory=set)
    """Signatures of the forward passes of all groups."""
    is_new: bool = False
    """Something ran that ran in no batch before."""
    nodes: int = 0
    """Nodes of the graph of the last group."""
    all_examples: list["AllExamples"] | None = None
    """Summaries of all examples, one for each group; None if only kept examples are of interest."""
    sums: BatchSums | None = None
    """Holds the sums against all rows of the batch; None but in the first one of a pass."""
    groups: list[Group] = field(default_factory=list)
    """Groups that hold one of the examples."""
    _seen: int = 0
    _open: Group | None = None

    def begin(self, part: Batch, collector: Collector) -> None:
        """Prepare for the forward pass of a group on the model's device, of which hooks show the rows from here."""
        self._open, collector.observers = None, {}
        if self.index:
            self._keep(part, collector)
        if self.all_examples is not None:
            # rows in an order of their own are those of no example by themselves
            unordered = collector.layout.orders.unordered_among(self.layers)
            ordered = [layer.name for layer in self.layers if layer.name not in unordered and collector.gradients]
            sketches = {name: GradientSketch(part.size) for name in ordered}
            self.all_examples.append(AllExamples(start=Generators.here(part.index.device), sketches=sketches))
            known = collector.observers
            collector.observers = {**known, **{name: (*known.get(name, ()), own) for name, own in sketches.items()}}
        if self.sums is not None:
            self.sums.begin(part.size)
            collector.observers = self.sums.beside(collector.observers)

    def _keep(self, part: Batch, collector: Collector) -> None:
        """Let the rows of the examples of one group be kept, if there are any."""
        places = tuple(place for place, number in enumerate(part.index.tolist()) if number in self.index)
        if places:
            recorders = {layer.name: RowRecorder(layer=layer, places=places) for layer in self.layers}
            start = Generators.here(part.index.device)
            self._open = Group(
                number=self._seen,
                places=places,
                index=tuple(int(part.index[place]) for place in places),
                start=start,
                recorders=recorders,
                size=part.size,
                buffers=[
                    (each, version(each), each.detach().clone() if each.numel() <= _SMALL else None)
                    for each in self.buffers
                ],
            )
            self.groups.append(self._open)
            collector.observers = {name: (recorder,) for name, recorder in recorders.items()}
        self._seen += 1

    def predicted(self, prediction: Prediction) -> None:
        """Keep the outputs of the examples among those of a group, (N, R, C)."""
        if self.sums is not None:
            self.sums.predicted(prediction)
        if self.index:
            digest, self.nodes = graph_signature(prediction.outputs)
            self.signatures.add(digest)
        if self.all_examples:
            self.all_examples[-1].projected = project_outputs(prediction.outputs.detach())
        if self._open is not None:
            self._open.outputs = self._open.cut(prediction.outputs.detach())

    def directed(self, direction: Tensor) -> None:
        """Keep what of a group's direction, of the shape of its outputs, is about to be pulled back of the examples."""
        if self.sums is not None:
            self.sums.close()
        if self.all_examples:
            self.all_examples[-1].directed()
        group = self._open
        if group is None:
            return
        weight = direction_weight(group.directions)
        own = group.cut(direction)
        for recorder in group.recorders.values():
            recorder.begin_direction(weight, first=group.directions == 0)
        group.cotangent = own if group.cotangent is None else group.cotangent + weight * own
        group.directions += 1

    def end(self, collector: Collector) -> None:
        """Close the batch; the hooks of the pass show nothing any more."""
        self._open, collector.observers = None, {}
        if self.sums is not None:
            self.sums.close()

    def forward(self, group: Group) -> Forward:
        """Make the forward pass of one of ``groups`` again: its examples, and where the generators stood."""
        batch = next(part for number, part in enumerate(self.parts()) if number == group.number)
        return Forward(batch=batch, start=group.start)

    def sketches(self, layers: Sequence[TreatedLayer]) -> dict[int, dict[str, Sketch]]:
        """Return a sketch of each example's rows by layer, by its number in the data."""
        found: dict[int, dict[str, Sketch]] = {}
        for group in self.groups:
            recording = self.recording(group, layers)
            if recording is None:
                continue
            for number, example in enumerate(group.index):
                found[example] = {name: sketch(recording.rows(name, number)) for name in recording.layers}
        return found

    def recording(self, group: Group, layers: Sequence[TreatedLayer]) -> Recording | None:
        """Return the rows that were kept of a group; None where the forward pass did not end."""
        if group.outputs is None:
            return None
        return Recording(
            layers={layer.name: group.recorders[layer.name] for layer in layers if layer.name in group.recorders},
            outputs=group.outputs,
            cotangent=group.cotangent,
            examples=len(group.places),
        )


NO_ROWS = SummedRows(layers=(), index=frozenset(), parts=lambda: iter(()))
"""Keeps nothing."""
