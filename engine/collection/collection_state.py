"""What the passes over the data have left so far, and how far the one under way is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.accumulation.layer_statistics import LayerStatistics
from engine.factors.kronecker_factors import Factors
from engine.factors.spilled_factors import Waiting
from engine.gradient_identity.self_check import SelfCheck
from engine.memory.plan import Chosen
from engine.model.batches import Batch, tensors
from engine.model.mixed_precision import FIRST_SCALE, LossScale
from engine.row_layout.attention_masks import Key

_MASK = 2**63 - 1


@dataclass(kw_only=True)
class Snapshot:
    """What the first examples alone have left; plain values, so that a checkpoint can name it."""

    eighths: int
    """Of the data."""
    examples: int
    """Examples that entered."""
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """Where each layer's factors stand."""
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Rows that had entered its A and its G."""


@dataclass(kw_only=True)
class Gathered:
    """What the passes over the data have left so far."""

    statistics: dict[str, LayerStatistics]
    """Of every treated layer; without sums once they are laid aside."""
    factors: dict[str, Callable[[], Factors]]
    """Of every covered layer."""
    shared: dict[str, str]
    """Follower → leader of the layers that share one A."""
    unmasked: frozenset[Key] = frozenset()
    """Calls that the mask is not laid on after all."""
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """Where those factors stand that are laid aside."""
    nested: dict[int, Snapshot] = field(default_factory=dict)
    """Smaller sample sizes, by eighths."""
    nondeterministic: set[str] = field(default_factory=set)
    """Operations without a deterministic form that were heard of."""
    examples: int = 0
    updates: int = 0
    passes: int = 0
    loss_scale: float = FIRST_SCALE
    overwritten: frozenset[str] = frozenset()
    """Layers whose input the model writes to afterwards."""
    self_check: SelfCheck | None = None
    """What has been proved of the layers; None where nothing is checked."""
    chosen: Chosen = field(default_factory=Chosen)
    """What the passes are made by: the plan's choice, or a lower rung where memory ran out."""

    def snapshot(self, eighths: int, examples: int) -> Snapshot:
        """Return the snapshot of one sample size, which the first pass that reaches it makes.

        Args:
            eighths: The size, in eighths of the data.
            examples: Examples that have entered the sums by then.

        Returns:
            The snapshot, which the passes that follow add their layers to.
        """
        return self.nested.setdefault(eighths, Snapshot(eighths=eighths, examples=examples))

    def settled(self) -> dict[str, Any]:
        """What the finished passes have left, for ``restore``."""
        kept = {name: dict(getattr(self, name)) for name in ("statistics", "factors", "waiting")}
        counts = {name: getattr(self, name) for name in ("examples", "updates", "passes", "loss_scale")}
        checked = {} if self.self_check is None else {"checked": self.self_check.state()}
        return {**kept, **counts, **checked}

    def restore(self, before: dict[str, Any]) -> None:
        """Let go of what a pass that did not come to its end has left; that layers share no A stays known."""
        for name, value in before.items():
            if name != "checked":
                setattr(self, name, value)
            elif self.self_check is not None:
                self.self_check.restore(value)


@dataclass(kw_only=True)
class Cursor:
    """How far one pass over the data is."""

    number: int
    """The pass, from 0."""
    batches: int = 0
    read: int = 0
    """Examples of those batches."""
    examples: int = 0
    """Examples that entered the statistics."""
    updates: int = 0
    terms: int = 0
    """Loss terms of those examples."""
    loss_scale: float = FIRST_SCALE
    """What `fp16` multiplies directions by."""
    steady: int = 0
    """Directions since that last changed."""
    data: int = 0
    """A checksum over the batches so far, where one is wanted."""

    def note(self, scale: LossScale | None) -> None:
        """Remember what directions are multiplied by."""
        if scale is not None:
            self.loss_scale, self.steady = scale.value, scale.steady

    def take(self, batch: Batch, *, checked: bool) -> None:
        """Count one batch, whether or not it enters the statistics."""
        self.batches += 1
        self.read += batch.size
        if checked:
            for tensor in (batch.index, *tensors(batch.inputs), *tensors(batch.targets)):
                self.data = (self.data * 31 + bit_sum(tensor)) & _MASK


def bit_sum(tensor: Tensor) -> int:
    """The sum of a tensor's bytes read as 64-bit integers: exact, and another one for other numbers.

    0 for what is not stored densely.
    """
    if tensor.layout != torch.strided:
        return 0
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    # torch reads only what lies on a multiple of its size as a wider type
    aligned = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    return int(aligned.view(torch.int64).sum()) + int(flat[whole:].sum(dtype=torch.int64))
