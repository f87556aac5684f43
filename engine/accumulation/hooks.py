"""Hooks: watch a model's treated layers and hand every call, and its gradient, to their statistics.

No weight gradient is computed, unless the model takes some itself (``engine.model.state.own_gradients``):
``preserve_state`` has set every parameter to need none, and an output that then needs none either is
made a leaf that does, so that gradients with respect to *outputs* flow and nothing else. They are
bitwise the same and cost about half the backward pass.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from engine.accumulation.example_gradients import Meeting
from engine.accumulation.hooked_model import CallCounts, hooked
from engine.accumulation.layer_statistics import LayerStatistics
from engine.accumulation.loss_head import LossHead
from engine.accumulation.output_gradients import (
    Direction,
    InputArrival,
    RowObserver,
    arrival,
    note_reached,
    show_gradient,
    unscaled,
)
from engine.layers.convolution import TransposedConvolutionLayer
from engine.layers.elementwise import BareLayer
from engine.layers.layer import TreatedLayer, Use
from engine.layers.linear import FunctionalLinearLayer
from engine.layers.parameter_slice import Place
from engine.model.activation_memory import watch_gradient
from engine.model.mixed_precision import LossScale
from engine.model.outputs import Prediction
from engine.row_layout.attention_masks import KeptPositions, Key, MaskBroken, counted, position_count
from engine.row_layout.layer_calls import CallShapes, entered_by, hidden_by
from engine.row_layout.row_order import Layout, example_first
from engine.row_layout.shared_inputs import Sharing
from engine.row_layout.unbatched_inputs import lacks_examples, spread
from engine.tracing.batch_provenance import routed
from engine.tracing.function_mode import ParameterUseMode
from engine.tracing.parameter_uses import Product, Sink


@dataclass
class Collector(Sink):
    """Attached hooks: each call of a treated layer adds to its statistics."""

    statistics: tuple[LayerStatistics, ...]
    gradients: bool = True
    """Gradients are wanted: a call without a graph does not contribute to the loss."""
    examples: int = 0
    """Examples of the current batch."""
    mask: Tensor | None = None
    """(N, T) booleans of the current batch; None where all positions count."""
    _kept: KeptPositions | None = None
    layout: Layout = field(default_factory=Layout)
    head: LossHead | None = None
    """The layer whose outputs are the loss's logits, where it keeps their probabilities."""
    scale: LossScale | None = None
    """The number that directions are multiplied by, until all their gradients are finite; None where that is one."""
    inputs: InputArrival = field(default_factory=lambda: InputArrival(deferred=frozenset(), required=False))
    """When the inputs of calls enter A."""
    shapes: CallShapes = field(default_factory=CallShapes)
    """Shapes of the calls so far."""
    observers: Mapping[str, Sequence[RowObserver]] = field(default_factory=dict)
    """Those who see the rows of the examples that go through the model now, by layer."""
    _direction: Direction = field(default_factory=Direction)
    """The gradients of the direction that is pulled back."""
    _calls: CallCounts = field(init=False)
    _reached: list[tuple[Key, Tensor]] = field(default_factory=list)
    """Whether a gradient reached positions that the mask dropped, () booleans, of the current batch."""
    _sharing: Sharing = field(default_factory=Sharing)
    _meetings: dict[str, Meeting] = field(default_factory=dict)
    """Meetings of the layers whose inputs and gradients are wanted together."""
    _products: dict[tuple[Place | None, Place | None], LayerStatistics] = field(default_factory=dict)
    """Statistics of the layers that are places in parameters."""
    _bare: dict[str, LayerStatistics] = field(default_factory=dict)
    """Statistics of the layers that are parameters themselves, by parameter."""
    _whole: dict[str, bool] = field(default_factory=dict)
    """Parameters that are layers by themselves, of this pass or not: whether the examples' dimension is in front."""
    _free: AbstractSet[str] = frozenset()
    """Followed parameters that no layer covers."""
    _watching: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _use_mode: ParameterUseMode | None = None
    """Watches the parameters of both; None where there are none."""

    def __post_init__(self) -> None:
        """Look up once which layers share an A, and which parameters are to be followed."""
        self._calls = CallCounts(gradients=self.gradients)
        operations, parameters = self.layout.operations, dict[str, Tensor]()
        self._whole = dict(operations.whole)
        for statistics in self.statistics:
            layer = statistics.layer
            parameters |= layer.watched
            if isinstance(layer, FunctionalLinearLayer):
                self._products[layer.weight_place, layer.bias_place] = statistics
            elif isinstance(layer, BareLayer):
                self._bare[layer.parameter] = statistics
                self._whole[layer.parameter] = layer.leading
        leaders = [(each.layer.name, each.leader) for each in self.statistics]
        pairs = [(name, leader.layer.name) for name, leader in leaders if leader is not None]
        self._sharing = Sharing.of(pairs)
        if parameters:
            parameters = {**operations.parameters, **parameters}
            taken = {each.parameter for key in (*operations.places, *self._products) for each in key if each}
            self._free = parameters.keys() - taken - self._whole.keys()
            self._use_mode = ParameterUseMode(parameters, self)

    def begin(self, examples: int, mask: Tensor | None, inputs: Sequence[Tensor] = ()) -> None:
        """Prepare for one batch of N examples.

        Args:
            mask: Positions that count, shape (N, T), boolean; None where all do.
            inputs: Tensors that enter the model, of any shape, examples first.
        """
        if self._use_mode is not None:
            self._use_mode.begin(inputs, examples, graphed=self.gradients)
        self.examples = examples
        self.shapes.begin(examples, inputs)
        self.mask = None if mask is None or bool(mask.all()) else mask
        self._kept = None if self.mask is None else KeptPositions.of(self.mask)
        self._sharing.begin()
        self._calls.begin()
        self.inputs.begin()
        self._reached.clear()
        # anew: of examples whose pass ran out of memory something may have arrived
        self._meetings = {each.layer.name: Meeting(each.add_met_) for each in self.statistics if each.joint}
        if self.head is not None:
            self.head.begin()

    def forward_done(self) -> None:
        """Note that the forward pass has ended: a call from here on is one that runs again."""
        self._calls.returning = True

    def predicted(self, prediction: Prediction) -> None:
        """Let the probabilities of the loss's terms enter the head's statistics, from a batch's outputs (N, R, C)."""
        head = self.head
        for statistics in self.statistics:
            if head is not None and head.role in statistics.layer.roles and statistics.flaw is None:
                dropped = head.enter_terms_(statistics, prediction)
                if dropped is not None:
                    self._reached.append(((head.role.name, 0), dropped))

    def returned(self) -> bool:
        """Close one backward pass; return False where a gradient has overflowed, and none has entered any sum."""
        use_mode = self._use_mode
        others = [] if use_mode is None or self.scale is None else use_mode.arrived()
        if not self._direction.is_finite(self.scale, others):
            if use_mode is not None:
                use_mode.forget()
            return False
        self.inputs.pulled_back()
        self._direction.enter(self.scale)
        for meeting in self._meetings.values():
            meeting.close()
        for name, start, gradients in () if use_mode is None else use_mode.returned():
            if name in self._bare:
                for each in self._takers(self._bare[name]):
                    each.add_example_gradients_(unscaled(gradients, self.scale), start, self.examples)
            del gradients  # before those of the next examples are made
        return True

    def end(self) -> None:
        """Close one batch.

        Raises:
            MaskBroken: If a gradient reached positions that the mask dropped.
            SharingBroken: If only one of two layers that share A was called.
            UnusedCalls: If a layer has calls with a gradient and calls without, whose inputs had entered A.
        """
        if self._reached and bool(torch.stack([reached for _, reached in self._reached]).any()):
            raise MaskBroken(frozenset(key for key, reached in self._reached if bool(reached)))
        self._sharing.end()
        self.inputs.end()
        self.inputs.require_proven(self.statistics)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the layers while inside."""
        with self._watching:
            self._watching.enter_context(self._watched())
            yield

    @contextlib.contextmanager
    def detached(self) -> Iterator[None]:
        """Watch nothing while inside, and go on watching afterwards; only within ``attached``."""
        self._watching.close()
        try:
            yield
        finally:
            self._watching.enter_context(self._watched())

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        return hooked(self.statistics, self._after, self._use_mode)

    def _after(self, statistics: LayerStatistics, role: TreatedLayer) -> Any:  # noqa: ANN401 - torch's hook signature
        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            entered = entered_by(args, kwargs)
            statistics.flaw = statistics.flaw or hidden_by(entered, output)
            if hidden_by(entered, output):
                return None
            counts, name = self._counts(statistics), statistics.layer.name
            key = self._calls.key(role.name)
            self.shapes.note(name, self._calls.of(name), entered)
            if counts:
                self._sharing.check(name, entered, masked=self.mask is not None and self.layout.masking.covers(key))
            if len(args) + len(kwargs) > 1 and not isinstance(role, TransposedConvolutionLayer):
                statistics.flaw = "several_inputs"
            instead = None
            if name in self.layout.tables and lacks_examples(entered):
                instead = output = spread(output, entered, self.examples)
                entered = spread(entered, entered, self.examples)
            separable = role.name in self.layout.orders.unordered or role.batch_first(entered, self.examples)
            if statistics.flaw is None and not separable:
                statistics.flaw = "batch_not_first"
            if statistics.flaw is not None:
                return instead
            arrange = example_first if self.layout.orders.by_positions(key) else None
            plain = entered.detach() if arrange is None else arrange(entered.detach(), self.examples)
            plain = plain.clone() if name in self.layout.overwritten else plain
            known = self._known(key, role, plain)
            use = counted(role, Use(entered=plain, examples=self.examples, role=role.of_call(plain, output)), known)
            entry = self._enter(statistics, use) if counts else None
            lost = None if known is None else (key, known.dropped)
            followed = self._follow(statistics, use, output, arrange, dropped=lost, entry=entry)
            return instead if followed is None else followed

        return after

    @override
    def multiplied(self, product: Product) -> Tensor:
        statistics = self._products.get((product.weight, product.bias))
        if statistics is None:
            places = (product.weight, product.bias)
            if places not in self.layout.operations.places:
                self._unforeseen(frozenset(place.parameter for place in places if place is not None))
            return product.left
        counts = self._counts(statistics)
        key, name = self._calls.key(statistics.layer.name), statistics.layer.name
        self.shapes.note(name, self._calls.of(name), product.entered, picked=product.rows.labels is not None)
        if counts:
            self._sharing.check(statistics.layer.name, product.entered, masked=self.layout.masking.permits(key))
        statistics.flaw = statistics.flaw or hidden_by(product.entered, product.left)
        if statistics.flaw is not None:
            return product.left
        rows, plain = product.rows, product.entered.detach()
        arranged = rows.example_first(plain.clone() if name in self.layout.overwritten else plain, self.examples)
        known = self._kept if self.layout.masking.permits(key) else None
        use = routed(rows, Use(entered=arranged, examples=self.examples), known)
        entry = self._enter(statistics, use) if counts else None
        dropped = None if use.kept is None else (key, ~use.kept)
        followed = self._follow(statistics, use, product.left, rows.example_first, dropped=dropped, entry=entry)
        return product.left if followed is None else followed

    @override
    def broadcast(self, names: frozenset[str]) -> bool:
        # the gradients of unforeseen parameters are not wanted, nor of those that this pass does not collect
        if not names <= self._whole.keys() | self._free:
            self._unforeseen(names)
            return False
        own = names & self._bare.keys()
        for name in own:
            self._counts(self._bare[name])
        return self.gradients and bool(own)

    @override
    def contributed(self, names: frozenset[str], numbers: int) -> bool:
        del numbers
        return self.broadcast(names)

    @override
    def factorises(self, weight: Place | None, bias: Place | None) -> bool:
        # not where a parameter is a layer by itself and no pass has the product as a layer
        names = {place.parameter for place in (weight, bias) if place is not None}
        return names.isdisjoint(self._whole) or (weight, bias) in self.layout.operations.places

    @override
    def expanded(self, names: frozenset[str], *, examples: int) -> bool:
        # where the probe found the dimension in front for each of them
        del examples
        return all(self._whole.get(name, False) for name in names)

    @override
    def strange(self, names: frozenset[str], operation: str) -> None:
        # the probe did not show it, so their layers are refused
        del operation
        self._unforeseen(names)

    def _unforeseen(self, names: frozenset[str]) -> None:
        for statistics in self.statistics:
            if statistics.flaw is None and not names.isdisjoint(statistics.layer.watched):
                statistics.flaw = "unforeseen_use"

    def _counts(self, statistics: LayerStatistics) -> bool:
        """Whether this call's input enters A."""
        counts = self._calls.count(statistics.layer.name)
        statistics.calls = max(statistics.calls, self._calls.of(statistics.layer.name))
        return counts

    def _takers(self, statistics: LayerStatistics) -> list[LayerStatistics | RowObserver]:
        return [statistics, *self.observers.get(statistics.layer.name, ())]

    def _enter(self, statistics: LayerStatistics, use: Use) -> Callable[[], None] | None:
        """Let the input of a call enter A, or wait; returns what a gradient of the call is to call."""
        takers = self._takers(statistics)
        if not self.gradients or self._is_followed_by_terms(statistics, use):
            for each in takers:
                each.add_input_(use)
            return None
        return self.inputs.enter(statistics, use, takers)

    def _is_followed_by_terms(self, statistics: LayerStatistics, use: Use) -> bool:
        """Whether the call is of the loss's head, whose own gradient nothing needs."""
        head = self.head
        return head is not None and use.role is head.role is statistics.layer and not self._calls.returning

    def _known(self, key: Key, layer: TreatedLayer, entered: Tensor) -> KeptPositions | None:
        """The positions that the mask keeps; None where it is not laid on this call."""
        known = self._kept if self.layout.masking.covers(key) else None
        return known if known is not None and position_count(layer, entered) == known.kept.numel() else None

    def _follow(
        self,
        statistics: LayerStatistics,
        use: Use,
        output: Tensor,
        arrange: Callable[[Tensor, int], Tensor] | None = None,
        *,
        dropped: tuple[Key, Tensor] | None = None,
        entry: Callable[[], None] | None = None,
    ) -> Tensor | None:
        """Hand on the gradient of ``output`` when it arrives; return the tensor that takes its place, if any does.

        ``arrange`` puts the examples of so many first; ``dropped`` are the call's key and the positions (P,) that the
        mask drops; ``entry`` is called when the gradient arrives.
        """
        if not torch.is_grad_enabled():
            return None
        name = statistics.layer.name
        observed = [each.follow(use) for each in self.observers.get(name, ())]
        if self.head is not None and use.role is self.head.role and not self._calls.returning:
            self.head.put_out(use, output)
            if self._is_followed_by_terms(statistics, use):
                show_gradient(output, observed, self.scale)
                return None
        meeting = self._meetings.get(name)
        if meeting is None or not statistics.layer.weight:
            # a bias's gradient needs no input
            use = use.without_input()
        look = partial(note_reached, self._reached, dropped, use.role or statistics.layer)
        enter = arrival(statistics, use, meeting, arrange, calls=lambda: self._calls.of(name), looks=(look, *observed))

        def arrived(gradient: Tensor) -> None:
            # what the forward pass takes itself is not a gradient of the loss
            if self._calls.returning:
                if entry is not None:
                    entry()
                self._direction.receive(gradient, enter, self.scale)

        return watch_gradient(output, arrived)
