"""Hooks: watch a model's treated layers and hand every call, and its gradient, to their statistics.

No weight gradient is ever computed: ``untouched`` has set every parameter to need none, and an
output that then needs none either is made a leaf that does, so that gradients with respect to
*outputs* flow and nothing else. They are bitwise the same and cost about half the backward pass.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.curvature.broadcast import disturbed, lacks_examples, spread
from engine.curvature.joint import Meeting
from engine.curvature.layers.convolution import ConvolutionLayer
from engine.curvature.layers.embedding import EmbeddingLayer
from engine.curvature.layers.layer import TreatedLayer, Use
from engine.curvature.layers.linear import LinearLayer
from engine.curvature.statistics import LayerStatistics
from engine.errors import Unwinding


class SharingBroken(Unwinding):
    """Layers that shared their input with another in the dry run no longer do."""

    def __init__(self, followers: tuple[str, ...]) -> None:
        super().__init__(", ".join(followers))
        self.followers = followers


@dataclass
class Call:
    """One call of a treated layer, seen in the dry run."""

    layer: TreatedLayer
    entered: Tensor
    output: Tensor
    version: int
    """Writes to ``entered`` before this call."""


@contextlib.contextmanager
def watched(
    layers: tuple[TreatedLayer, ...],
    examples: int = 1,
    tables: frozenset[str] = frozenset(),
    disturb: str | None = None,
) -> Iterator[list[Call]]:
    """List every call of ``layers``, in order; holds the tensors until the list is dropped.

    The ``tables`` are spread over the ``examples``, and the last example's copy of ``disturb`` is disturbed.
    """
    calls: list[Call] = []

    def watch(layer: TreatedLayer) -> Any:  # noqa: ANN401 - torch's hook signature
        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:  # noqa: ANN401
            entered = _entered(args, kwargs)
            version, instead = _version(entered), None
            if layer.name in tables and lacks_examples(entered):
                instead = spread(output, entered, examples)
                entered = spread(entered, entered, examples)
                if layer.name == disturb:
                    instead = disturbed(instead)
            calls.append(Call(layer, entered, output if instead is None else instead, version))
            return instead

        return after

    handles = [
        module.register_forward_hook(watch(role), with_kwargs=True, prepend=True) for role, module in _called(layers)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _called(layers: Iterable[TreatedLayer]) -> Iterator[tuple[TreatedLayer, nn.Module]]:
    """Every module that is called for one of ``layers``, with the part that it plays."""
    for layer in layers:
        for role in layer.roles:
            for module in (role.module, *role.also.values()):
                yield role, module


def _entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    entered = args[0] if args else next(iter(kwargs.values()))
    if not isinstance(entered, Tensor):
        raise TypeError(f"a treated layer was called with {type(entered).__name__} instead of a tensor")
    return entered


def _version(tensor: Tensor) -> int:
    """Writes to ``tensor`` so far; an inference tensor does not count them."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - autograd's own guard, with no other name


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
    returning: bool = False
    """The backward pass has begun."""
    _seen: dict[str, _Entered] = field(default_factory=dict)
    _calls: Counter[str] = field(default_factory=Counter)
    _ungraphed: Counter[str] = field(default_factory=Counter)
    """Calls of the forward pass that left no graph."""
    _pairs: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """(follower, leader) of every pair that a layer belongs to."""
    _meetings: dict[str, Meeting] = field(default_factory=dict)
    """Of the layers whose inputs and gradients are wanted together."""

    def __post_init__(self) -> None:
        """Look up who shares with whom, once."""
        for statistics in self.statistics:
            if statistics.joint:
                self._meetings[statistics.layer.name] = Meeting(statistics.add_met_)
        for follower in self.statistics:
            if follower.leader is not None:
                pair = follower.layer.name, follower.leader.layer.name
                for name in pair:
                    self._pairs.setdefault(name, []).append(pair)

    def begin(self, examples: int, positions: Tensor | None) -> None:
        """Prepare for one batch."""
        self.examples = examples
        self.positions = None if positions is None or bool(positions.all()) else positions
        self.returning = False
        for record in (self._seen, self._calls, self._ungraphed):
            record.clear()

    def returned(self) -> None:
        """Close one backward pass."""
        for meeting in self._meetings.values():
            meeting.close()

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
            for role, module in _called((statistics.layer,))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after(self, statistics: LayerStatistics, role: TreatedLayer) -> Any:  # noqa: ANN401 - torch's hook signature
        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            entered = _entered(args, kwargs)
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
        self._seen[name] = _Entered(weakref.ref(entered), _version(entered))
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

    def _follow(self, statistics: LayerStatistics, use: Use, output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        name = statistics.layer.name
        meeting = self._meetings.get(name)
        if meeting is None or not statistics.layer.weight:
            # a bias's gradient needs no input
            use = use.without_input()

        def arrived(gradient: Tensor) -> None:
            statistics.add_gradient_(use, gradient)
            if meeting is not None:
                meeting.arrive(use, gradient, self._calls[name])

        if output.requires_grad:
            output.register_hook(arrived)  # type: ignore[no-untyped-call]
            return None
        leaf = output.detach().requires_grad_()
        leaf.register_hook(arrived)  # type: ignore[no-untyped-call]
        # a copy, since the next operation may work in place and a leaf forbids that
        return leaf.clone()


def followers(calls: list[Call], layers: tuple[TreatedLayer, ...]) -> dict[str, str]:
    """Layers that are fed by the very tensor that another one is fed by: follower → leader.

    Only linear layers with the same column of ones share; identity of the tensor decides, unless
    it was written to in between, and never equality of its values. The leader is the first of
    ``layers``, whichever is called first.
    """
    count = Counter(call.layer.name for call in calls)
    own = {call.layer.name: call for call in calls if count[call.layer.name] == 1}
    leaders: dict[tuple[int, int, bool, bool], str] = {}
    shared: dict[str, str] = {}
    for layer in layers:
        if not isinstance(layer, LinearLayer) or layer.name not in own:
            continue
        call = own[layer.name]
        leader = leaders.setdefault((id(call.entered), call.version, layer.weight, layer.bias), layer.name)
        if leader != layer.name:
            shared[layer.name] = leader
    return shared


def unattributed(fewer: list[Call], more: list[Call], examples: tuple[int, int]) -> frozenset[str]:
    """Layers whose positions do not belong to one example each.

    ``fewer`` and ``more`` are the calls for one example, repeated as often as ``examples`` says. A
    layer that is called once for the whole batch (a table of positions that is then broadcast),
    or has the examples elsewhere than first, sees other sizes than in proportion to them.
    """
    mixed = {
        call.layer.name
        for calls, repeated in zip((fewer, more), examples, strict=True)
        for call in calls
        if not call.layer.batch_first(call.entered, repeated)
    }
    left, right = (_sizes(calls) for calls in (fewer, more))
    return frozenset(mixed | {name for name in left | right if left[name] * examples[1] != right[name] * examples[0]})


def shared_tables(fewer: list[Call], more: list[Call]) -> tuple[str, ...]:
    """Embeddings that were called alike for fewer and for more examples, each time without a dimension for them."""
    sizes: dict[str, list[list[int]]] = {}
    refused: set[str] = set()
    for place, calls in enumerate((fewer, more)):
        for call in calls:
            sizes.setdefault(call.layer.name, [[], []])[place].append(call.entered.numel())
            if not isinstance(call.layer, EmbeddingLayer) or not lacks_examples(call.entered):
                refused.add(call.layer.name)
    return tuple(name for name, (left, right) in sizes.items() if name not in refused and left == right)


def _sizes(calls: list[Call]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for call in calls:
        sizes[call.layer.name] += call.entered.numel()
    return sizes
