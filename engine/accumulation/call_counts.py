"""Calls: how often each layer is called in one forward pass, and which calls an activation checkpoint repeats."""

from collections import Counter
from dataclasses import dataclass, field

import torch

from engine.row_layout.attention_masks import RECOMPUTED, Key


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
