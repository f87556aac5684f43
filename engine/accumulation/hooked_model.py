"""Hooked model: the hooks on modules and the watch over parameters, attached together and removed together."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.accumulation.layer_statistics import LayerStatistics
from engine.layers.layer import TreatedLayer
from engine.row_layout.attention_masks import RECOMPUTED, Key
from engine.row_layout.layer_calls import called
from engine.tracing.function_mode import ParameterUseMode
from engine.tracing.shared_parameters import StandIn, install_stand_ins


@dataclass
class CallCounts:
    """The calls of one forward pass, and of what runs again while the gradients return.

    A call counts once, though activation checkpointing runs a layer again during the backward
    pass. A call without a graph does not count, unless that is how the checkpoint runs it first:
    then the second run counts.
    """

    gradients: bool
    """Gradients are wanted: a call without a graph does not contribute to the loss."""
    returning: bool = False
    """The backward pass has begun."""
    _calls: Counter[str] = field(default_factory=Counter)
    """Calls of each layer in the forward pass."""
    _ungraphed: Counter[str] = field(default_factory=Counter)
    """Those of them that left no graph."""
    _numbers: Counter[str] = field(default_factory=Counter)
    """Calls of each part of a layer in the forward pass."""

    def begin(self) -> None:
        """Prepare for one forward pass."""
        self.returning = False
        for record in (self._calls, self._ungraphed, self._numbers):
            record.clear()

    def of(self, name: str) -> int:
        """Return how often a layer was called in the forward pass so far."""
        return self._calls[name]

    def count(self, name: str) -> bool:
        """Note one call of a layer."""
        graphed = torch.is_grad_enabled() or not self.gradients
        if self.returning:
            again = graphed and self._ungraphed[name] > 0
            self._ungraphed[name] -= again
            return again
        self._calls[name] += 1
        self._ungraphed[name] += not graphed
        return graphed

    def key(self, part: str) -> Key:
        """Number the call under way."""
        if self.returning:
            return part, RECOMPUTED
        self._numbers[part] += 1
        return part, self._numbers[part] - 1


@contextlib.contextmanager
def hooked(
    statistics: Sequence[LayerStatistics],
    after: Callable[[LayerStatistics, TreatedLayer], Any],
    use_mode: ParameterUseMode | None,
) -> Iterator[None]:
    """Watch layers while inside."""
    # before the caller's own hooks, which may put something else in the output's place
    handles = [
        module.register_forward_hook(after(each, role), with_kwargs=True, prepend=True)
        for each in statistics
        for role, module in called((each.layer,))
    ]
    by_name = {each.layer.name: each for each in statistics}

    def arrived(stand_in: StandIn, leaf: Tensor) -> None:
        leaf.grad = None
        by_name[stand_in.layer].flaw = by_name[stand_in.layer].flaw or "unforeseen_use"

    try:
        with install_stand_ins([each.layer for each in statistics]) as stand_ins:
            # removed again: a leaf and its hook hold each other, and with them the statistics
            handles += [each.when_reached(partial(arrived, each)) for each in stand_ins]
            with use_mode.watching() if use_mode else contextlib.nullcontext():
                yield
            for stand_in in stand_ins:
                if stand_in.replaced:
                    arrived(stand_in, stand_in.leaf)
    finally:
        for handle in handles:
            handle.remove()
