"""Hooks: watch a model's treated layers and hand every call, and its gradient, to their statistics.

No weight gradient is ever computed: ``untouched`` has set every parameter to need none, and an
output that then needs none either is made a leaf that does, so that gradients with respect to
*outputs* flow and nothing else. They are bitwise the same and cost about half the backward pass.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.curvature.broadcast import lacks_examples, spread
from engine.curvature.calls import called, entered_by, version
from engine.curvature.interception import Interception
from engine.curvature.joint import Meeting
from engine.curvature.layers.bare import BareLayer
from engine.curvature.layers.convolution import ConvolutionLayer
from engine.curvature.layers.coverage import Survey
from engine.curvature.layers.embedding import EmbeddingLayer
from engine.curvature.layers.functional_linear import FunctionalLinearLayer
from engine.curvature.layers.layer import TreatedLayer, Use
from engine.curvature.layers.place import Place
from engine.curvature.loss_head import LossHead
from engine.curvature.mixed_precision import LossScale
from engine.curvature.prediction import Prediction
from engine.curvature.provenance import Rows
from engine.curvature.sightings import Product
from engine.curvature.statistics import LayerStatistics
from engine.errors import Unwinding


class SharingBroken(Unwinding):
    """Layers that shared their input with another in the dry run no longer do."""

    def __init__(self, followers: tuple[str, ...]) -> None:
        super().__init__(", ".join(followers))
        self.followers = followers


Places = frozenset[tuple[Place | None, Place | None]]
"""Of weights and their biases in parameters."""


def places_of(survey: Survey) -> Places:
    """The places of all layers that are places."""
    layers = [layer for layer in survey.treated if isinstance(layer, FunctionalLinearLayer)]
    return frozenset((layer.weight_place, layer.bias_place) for layer in layers)


@dataclass(frozen=True)
class _Entered:
    """What a sharing layer was last called with."""

    tensor: "weakref.ref[Tensor]"
    version: int


@dataclass
class Collector:
    """Attached hooks: each call of a treated layer adds to its statistics.

    A call counts once, though activation checkpointing runs a layer again during the backward
    pass. A call without a graph leaves no trace, unless that is how the checkpoint runs it first:
    then the second run counts.
    """

    statistics: tuple[LayerStatistics, ...]
    gradients: bool = True
    """Gradients are wanted: a call without a graph is none of the loss's."""
    examples: int = 0
    """Examples of the current batch."""
    positions: Tensor | None = None
    """(N, T) booleans of the current batch; None where all positions count."""
    tables: frozenset[str] = frozenset()
    """Embeddings that are looked up once for a batch, to be spread over its examples."""
    places: Places = frozenset()
    """All places in parameters that are layers, those that are not collected now among them."""
    head: LossHead | None = None
    """The layer whose outputs are the loss's logits, where it keeps their probabilities."""
    returning: bool = False
    """The backward pass has begun."""
    scale: LossScale | None = None
    """What directions are multiplied by; None where that is one."""
    _held: list[tuple[Callable[[Tensor], None], Tensor]] = field(default_factory=list)
    """Gradients of one direction, and where they go once all of them are known to be finite."""
    _seen: dict[str, _Entered] = field(default_factory=dict)
    _calls: Counter[str] = field(default_factory=Counter)
    _ungraphed: Counter[str] = field(default_factory=Counter)
    """Calls of the forward pass that left no graph."""
    _pairs: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """(follower, leader) of every pair that a layer belongs to."""
    _meetings: dict[str, Meeting] = field(default_factory=dict)
    """Of the layers whose inputs and gradients are wanted together."""
    _products: dict[tuple[Place | None, Place | None], LayerStatistics] = field(default_factory=dict)
    """Of the layers that are places in parameters."""
    _bare: dict[str, LayerStatistics] = field(default_factory=dict)
    """Of the layers that are parameters themselves, by parameter."""
    _interception: Interception | None = None
    """Watches the parameters of both; None where there are none."""

    def __post_init__(self) -> None:
        """Look up who shares with whom, and whose parameters are to be followed, once."""
        parameters: dict[str, Tensor] = {}
        for statistics in self.statistics:
            layer = statistics.layer
            parameters |= layer.watched
            if isinstance(layer, FunctionalLinearLayer):
                self._products[layer.weight_place, layer.bias_place] = statistics
            elif isinstance(layer, BareLayer):
                self._bare[layer.parameter] = statistics
            if statistics.joint:
                self._meetings[statistics.layer.name] = Meeting(statistics.add_met_)
        for follower in self.statistics:
            if follower.leader is not None:
                pair = follower.layer.name, follower.leader.layer.name
                for name in pair:
                    self._pairs.setdefault(name, []).append(pair)
        if parameters:
            self._interception = Interception(parameters, self)

    def begin(self, examples: int, positions: Tensor | None, inputs: Sequence[Tensor] = ()) -> None:
        """Prepare for one batch, of which ``inputs`` enter the model."""
        if self._interception is not None:
            self._interception.begin(inputs, examples)
        self.examples = examples
        self.positions = None if positions is None or bool(positions.all()) else positions
        self.returning = False
        for record in (self._seen, self._calls, self._ungraphed):
            record.clear()
        if self.head is not None:
            self.head.begin()

    def predicted(self, prediction: Prediction) -> None:
        """Let the probabilities of the loss's terms enter the head's statistics."""
        head = self.head
        for statistics in self.statistics:
            if head is not None and head.role in statistics.layer.roles and statistics.flaw is None:
                terms = head.terms(prediction)
                if terms is None:
                    statistics.flaw = "unforeseen_use"
                else:
                    statistics.add_terms_(prediction.outputs.detach(), terms)

    def returned(self) -> bool:
        """Close one backward pass; False where a gradient has overflowed, and nothing of it has entered anything."""
        held, self._held = self._held, []
        interception = self._interception
        if self.scale is not None:
            arrived = [gradient for _, gradient in held] + ([] if interception is None else interception.arrived())
            if arrived and not bool(torch.stack([gradient.isfinite().all() for gradient in arrived]).all()):
                if interception is not None:
                    interception.forget()
                return False
        for enter, gradient in held:
            enter(self._unscaled(gradient))
        for meeting in self._meetings.values():
            meeting.close()
        for name, start, gradients in () if interception is None else interception.returned():
            if name in self._bare:
                self._bare[name].add_example_gradients_(self._unscaled(gradients), start, self.examples)
        return True

    def receive(self, gradient: Tensor, enter: Callable[[Tensor], None]) -> None:
        """Hand on one gradient that has arrived: at once, or when the others of its direction are there."""
        if self.scale is None:
            enter(gradient)
        else:
            self._held.append((enter, gradient))

    def _unscaled(self, gradient: Tensor) -> Tensor:
        if self.scale is None:
            return gradient
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        return wide.div_(self.scale.value)

    def end(self) -> None:
        """Close one batch.

        Raises:
            SharingBroken: If only one of two layers that share A was called.
        """
        broken = tuple(
            follower
            for name, pairs in self._pairs.items()
            for follower, leader in pairs
            if name == follower and (follower in self._seen) != (leader in self._seen)
        )
        if broken:
            raise SharingBroken(broken)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the layers while inside."""
        # before the caller's own hooks, which may put something else in the output's place
        handles = [
            module.register_forward_hook(self._after(statistics, role), with_kwargs=True, prepend=True)
            for statistics in self.statistics
            for role, module in called((statistics.layer,))
        ]
        try:
            with self._interception or contextlib.nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _after(self, statistics: LayerStatistics, role: TreatedLayer) -> Any:  # noqa: ANN401 - torch's hook signature
        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            entered = entered_by(args, kwargs)
            counts = self._counts(statistics)
            if counts:
                self._check_sharing(statistics, entered)
            if len(args) + len(kwargs) > 1:
                statistics.flaw = "several_inputs"
            instead = None
            if statistics.layer.name in self.tables and lacks_examples(entered):
                instead = output = spread(output, entered, self.examples)
                entered = spread(entered, entered, self.examples)
            if statistics.flaw is None and not role.batch_first(entered, self.examples):
                statistics.flaw = "batch_not_first"
            if statistics.flaw is not None:
                return instead
            plain = entered.detach()
            use = Use(entered=plain, examples=self.examples, kept=self._kept(role, plain), role=role)
            if counts:
                statistics.add_input_(use)
            followed = self._follow(statistics, use, output)
            return instead if followed is None else followed

        return after

    def multiplied(self, product: Product) -> Tensor:
        """A place in a parameter entered a product; returns what stands for its result."""
        statistics = self._products.get((product.weight, product.bias))
        if statistics is None:
            if (product.weight, product.bias) in self.places:
                return product.left
            places = (product.weight, product.bias)
            self._unforeseen(frozenset(place.parameter for place in places if place is not None))
            return product.left
        counts = self._counts(statistics)
        if counts:
            self._check_sharing(statistics, product.entered)
        if statistics.flaw is not None:
            return product.left
        rows = product.rows
        arranged = rows.example_first(product.entered.detach(), self.examples)
        owners, kept = self._routing(rows, arranged.numel() // max(arranged.shape[-1], 1))
        use = Use(entered=arranged, examples=self.examples, kept=kept, owners=owners)
        if counts:
            statistics.add_input_(use)
        followed = self._follow(statistics, use, product.left, rows)
        return product.left if followed is None else followed

    def _routing(self, rows: Rows, count: int) -> tuple[Tensor | None, Tensor | None]:
        """Whose each of ``count`` positions is, where they were picked, and which of them count."""
        owners, kept, known = rows.owners(self.examples), None, self.positions
        if rows.labels is None or owners is None:
            return None, known.reshape(-1) if known is not None and known.numel() == count else None
        each = count // max(owners.shape[0], 1)
        if known is not None and rows.size == known.numel() == rows.minor * self.examples:
            kept = known.reshape(-1)[rows.labels].repeat_interleave(each)
        return owners.repeat_interleave(each), kept

    def broadcast(self, names: frozenset[str]) -> bool:
        """Parameters were broadcast over examples; whether their gradients are wanted."""
        if not names <= set(self._bare):
            self._unforeseen(names)
            return False
        for name in names:
            self._counts(self._bare[name])
        return self.gradients

    def contributed(self, names: frozenset[str], numbers: int) -> bool:
        """Parameters entered an operation whose examples never meet; whether their gradients are wanted."""
        del numbers
        return self.broadcast(names)

    def factorises(self, weight: Place | None, bias: Place | None) -> bool:
        """Whether a product is a layer of A and G, here or in another pass."""
        names = {place.parameter for place in (weight, bias) if place is not None}
        return names.isdisjoint(self._bare) or (weight, bias) in self.places

    def expanded(self, names: frozenset[str], *, examples: int) -> bool:
        """Whether a dimension as long as there are examples, all alike, is the examples'."""
        del examples
        layers = [self._bare[name].layer for name in names if name in self._bare]
        return len(layers) == len(names) and all(isinstance(layer, BareLayer) and layer.leading for layer in layers)

    def strange(self, names: frozenset[str], operation: str) -> None:
        """Parameters entered an operation in which the dry run did not show them."""
        del operation
        self._unforeseen(names)

    def _unforeseen(self, names: frozenset[str]) -> None:
        for statistics in self.statistics:
            if statistics.flaw is None and not names.isdisjoint(statistics.layer.watched):
                statistics.flaw = "unforeseen_use"

    def _counts(self, statistics: LayerStatistics) -> bool:
        """Whether this call's input enters A."""
        name, graphed = statistics.layer.name, torch.is_grad_enabled() or not self.gradients
        if self.returning:
            again = graphed and self._ungraphed[name] > 0
            self._ungraphed[name] -= again
            return again
        self._calls[name] += 1
        statistics.calls = max(statistics.calls, self._calls[name])
        self._ungraphed[name] += not graphed
        return graphed

    def _check_sharing(self, statistics: LayerStatistics, entered: Tensor) -> None:
        """Compare with what the layers that share this one's A were called with.

        Raises:
            SharingBroken: If that was another tensor, the same one since overwritten, or a second call.
        """
        name = statistics.layer.name
        again = name in self._seen
        self._seen[name] = _Entered(weakref.ref(entered), version(entered))
        broken = tuple(
            follower for follower, leader in self._pairs.get(name, ()) if again or self._differ(follower, leader)
        )
        if broken:
            raise SharingBroken(broken)

    def _differ(self, left: str, right: str) -> bool:
        one, other = self._seen.get(left), self._seen.get(right)
        if one is None or other is None:
            return False  # not yet called; ``end`` looks again
        return one.tensor() is not other.tensor() or one.version != other.version

    def _kept(self, layer: TreatedLayer, entered: Tensor) -> Tensor | None:
        """(P,) booleans of the positions that count for this call."""
        kept = None
        count = entered.numel() if isinstance(layer, EmbeddingLayer) else entered.numel() // layer.fan_in
        # a layer after pooling has other positions than the tokens, and all of them count
        if self.positions is not None and count == self.positions.numel() and not isinstance(layer, ConvolutionLayer):
            kept = self.positions.reshape(-1)
        if isinstance(layer, EmbeddingLayer) and layer.module.padding_idx is not None:
            # the padding row gets no gradient, whatever arrives at it
            real = entered.reshape(-1) != layer.module.padding_idx
            kept = real if kept is None else kept & real
        return kept

    def _follow(self, statistics: LayerStatistics, use: Use, output: Tensor, rows: Rows | None = None) -> Tensor | None:
        """Hand on the gradient of ``output``, its examples leading; returns what stands in its place, if anything."""
        if not torch.is_grad_enabled():
            return None
        name = statistics.layer.name
        if self.head is not None and use.role is self.head.role and not self.returning:
            self.head.put_out(use, output)
            if use.role is statistics.layer:
                # whose own gradient nothing needs
                return None
        meeting = self._meetings.get(name)
        if meeting is None or not statistics.layer.weight:
            # a bias's gradient needs no input
            use = use.without_input()

        def enter(gradient: Tensor) -> None:
            if rows is not None:
                gradient = rows.example_first(gradient, use.examples)
            statistics.add_gradient_(use, gradient)
            if meeting is not None:
                meeting.arrive(use, gradient, self._calls[name])

        def arrived(gradient: Tensor) -> None:
            self.receive(gradient, enter)

        if output.requires_grad:
            output.register_hook(arrived)  # type: ignore[no-untyped-call]
            return None
        leaf = output.detach().requires_grad_()
        leaf.register_hook(arrived)  # type: ignore[no-untyped-call]
        # a copy, since the next operation may work in place and a leaf forbids that
        return leaf.clone()
