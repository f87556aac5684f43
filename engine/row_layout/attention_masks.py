"""Masks: the calls whose positions an attention mask is about, proven by trial before a mask is laid on them.

A mask that fits by its size alone may be another's: a decoder can have as many positions as its
encoder, and an image as many patches as its caption has tokens. So two examples go through the
model with their last positions masked, and again with other content in those positions. A call has
the mask's positions if its input differs in masked rows and in no other. Where the content does not
reach it (a table of positions), or reaches other rows too (a model that joins neighbours), it must
lose a row with each position that is cut off.

Which rows a mask then drops is looked at in every batch: a dropped row whose gradient is not zero
shows that the mask is not the call's, and from then on all positions of the call count.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import EngineError, Unwinding
from engine.layers.convolution import ConvolutionLayer
from engine.layers.embedding import EmbeddingLayer
from engine.layers.layer import TreatedLayer, Use
from engine.model.batches import Batch, map_tensors
from engine.row_layout.layer_calls import Call

Key = tuple[str, int]
"""One call of a forward pass: the called part of a layer by name, and how often it was called before."""
RECOMPUTED = -1
"""In place of that count where activation checkpointing runs a call again."""
_CONTENT = ("input_ids", "inputs_embeds", "input_values", "input_features")
"""Names that models give the content of their positions; where no input has one, it is the first that fits."""
Run = Callable[[Batch], tuple[list[Call], list[Tensor]]]
"""Calls of one forward pass, and the tensors that the model returned."""


class MaskBroken(Unwinding):
    """Gradients reached positions that the mask dropped: it is not the mask of these calls."""

    def __init__(self, calls: frozenset[Key]) -> None:
        super().__init__(", ".join(sorted({name for name, _ in calls})))
        self.calls = calls


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Calls on which a batch's mask is laid."""

    proven: frozenset[Key] = frozenset()
    """Calls that have the mask's positions."""
    refused: frozenset[Key] = frozenset()
    """Calls of which a batch has shown that the mask is not theirs."""

    def covers(self, key: Key) -> bool:
        """Tell whether the mask is laid on a call.

        Args:
            key: The call; one that activation checkpointing runs again has no number of its own.

        Returns:
            True where the call has the mask's positions and no batch has shown otherwise.
        """
        name, number = key
        if number != RECOMPUTED:
            return key in self.proven and key not in self.refused
        # the order of calls that run again is not that of the forward pass
        return any(name == own for own, _ in self.proven) and self.permits(key)

    def permits(self, key: Key) -> bool:
        """Tell whether the mask has not been refused for a call.

        Args:
            key: The call, proven or not.

        Returns:
            False where a batch has shown that the mask is not this call's.
        """
        if key[1] == RECOMPUTED:
            return all(key[0] != name for name, _ in self.refused)
        return key not in self.refused

    def without(self, refused: Iterable[Key]) -> "Masking":
        """Refuse the mask for more calls.

        Args:
            refused: Calls of which a batch has shown that the mask is not theirs.

        Returns:
            A copy that refuses them too.
        """
        return replace(self, refused=self.refused | frozenset(refused))


def number_calls(calls: Iterable[Call]) -> Iterator[tuple[Key, Call]]:
    """Number the calls of one forward pass."""
    before: Counter[str] = Counter()
    for call in calls:
        yield (call.layer.name, before[call.layer.name]), call
        before[call.layer.name] += 1


def position_count(layer: TreatedLayer, entered: Tensor) -> int:
    """Count the positions of a call's input.

    Args:
        layer: The called layer.
        entered: Its input: ids of any shape for an embedding, else (…, d) with d the layer's fan-in.

    Returns:
        P, the rows that the input is read as.
    """
    return entered.numel() if isinstance(layer, EmbeddingLayer) else entered.numel() // max(layer.fan_in, 1)


@dataclass(frozen=True)
class KeptPositions:
    """The positions of a batch that its mask keeps, found once for all calls."""

    mask: Tensor
    """(N, T) booleans."""
    kept: Tensor
    """(P,) the same in one row."""
    dropped: Tensor
    """(P,) the others."""
    places: Tensor
    """(n,) where those that are kept stand."""
    lengths: tuple[int, ...]
    """Positions of each example."""

    @classmethod
    def of(cls, mask: Tensor) -> "KeptPositions":
        """Find the positions of a mask (N, T), boolean; this waits for the device."""
        kept = mask.reshape(-1)
        lengths = tuple(int(length) for length in mask.reshape(mask.shape[0], -1).sum(1).tolist())
        return cls(mask=mask, kept=kept, dropped=~kept, places=kept.nonzero()[:, 0], lengths=lengths)

    def laid_on(self, use: Use) -> Use:
        """Mark the positions that count for a call whose positions are those of the mask, in the same order."""
        return replace(use, kept=self.kept, places=self.places, lengths=self.lengths)


def counted(layer: TreatedLayer, use: Use, known: KeptPositions | None) -> Use:
    """Mark the positions that count for a call.

    Args:
        layer: The called layer; an embedding's padding id does not count, since its row gets no gradient.
        use: The call with its input, P positions of any shape.
        known: The positions of the mask; None where no mask is laid on the call.
    """
    if isinstance(layer, EmbeddingLayer) and layer.module.padding_idx is not None:
        # the padding row gets no gradient, whatever arrives at it
        real = use.input.reshape(-1) != layer.module.padding_idx
        return replace(use, kept=real if known is None else known.kept & real)
    return use if known is None else known.laid_on(use)


def try_masks(batch: Batch, run: Run, *, gradients: bool) -> Masking:
    """Find the calls that have the positions of a batch's mask.

    Args:
        batch: Examples with an attention mask, of which the two longest are tried.
        run: Runs the model on a batch.
        gradients: Gradients will be looked at in every batch. Without them no call has the mask's positions where
            masked content reaches other outputs.

    Returns:
        The calls that the mask is laid on; none where the batch has no mask or the trial fails.

    Memory:
        The inputs of all calls for two examples, twice.
    """
    mask = batch.mask
    if mask is None or mask.shape[0] != batch.size or mask.shape[1] < 2:
        return Masking()
    trial, tail = _with_tail(batch, mask)
    try:
        calls, returned = run(trial)
    except EngineError:
        return Masking()
    changed = _with_other_content(trial, tail)
    same, proven, undecided = dict(number_calls(calls)), set(), set()
    others = None if changed is None else _attempt(changed, run)
    changed_calls = {} if others is None else dict(number_calls(others[0]))
    for key, call in same.items():
        if isinstance(call.layer, ConvolutionLayer) or position_count(call.layer, call.entered) != tail.numel():
            continue
        other = changed_calls.get(key)
        moved = None if other is None else _moved(call, other)
        inside = tail.reshape(-1)
        if moved is not None and bool(moved.any()) and not bool((moved & ~inside).any()):
            proven.add(key)
        else:
            undecided.add(key)
    if others is not None and not gradients and _reaches(returned, others[1], tail):
        return Masking()
    if undecided:
        proven |= _losing(trial, run, undecided)
    return Masking(proven=frozenset(proven))


def _with_tail(batch: Batch, mask: Tensor) -> tuple[Batch, Tensor]:
    """Return the two longest examples with a masked tail of unequal lengths, and that tail (n, T)."""
    lengths = mask.sum(1)
    longest = torch.argsort(lengths, descending=True, stable=True)[:2]
    width = mask.shape[1]
    tails = torch.tensor([max(1, width // 4), max(1, width // 2)], device=mask.device)[: longest.numel(), None]
    tail = torch.arange(width, device=mask.device) >= width - tails

    def picked(tensor: Tensor) -> Tensor:
        return tensor[longest]

    own = Batch(
        inputs=map_tensors(batch.inputs, picked), targets=map_tensors(batch.targets, picked), index=batch.index[longest]
    )
    inputs = dict(own.inputs)
    inputs["attention_mask"] = inputs["attention_mask"].masked_fill(tail, 0)
    return replace(own, inputs=inputs), tail


def _along(batch: Batch, shape: torch.Size) -> list[str]:
    """Name the inputs of the mask's positions: the content, then the ids that go with it, of segments say."""
    names = [
        name
        for name, value in batch.inputs.items()
        if isinstance(value, Tensor)
        and value.shape[:2] == shape
        and value.dtype != torch.bool
        # a decoder's inputs have a mask of their own, whatever their length
        and "mask" not in name
        and not name.startswith(("decoder", "label"))
    ]
    # images may have as many patches as there are tokens
    content = [name for name in (*_CONTENT, *names) if name in names][:1]
    return content + [
        name
        for name in names
        if name not in content and batch.inputs[name].shape == shape and not batch.inputs[name].is_floating_point()
    ]


def _with_other_content(batch: Batch, tail: Tensor) -> Batch | None:
    """Put other ids or numbers where ``tail`` is; None where there are no others to take."""
    inputs: dict[str, object] = dict(batch.inputs)
    for name in _along(batch, tail.shape):
        value = inputs[name]
        if not isinstance(value, Tensor):
            continue
        if value.is_floating_point():
            inside = tail.view(*tail.shape, *[1] * (value.ndim - 2))
            inputs[name] = torch.where(inside, 1 - value, value)
            continue
        choice: Tensor = torch.unique(value)
        if choice.numel() > 1 and value.ndim == tail.ndim:
            # ids that the data holds, so that every table has them
            other = choice[(torch.searchsorted(choice, value) + 1) % choice.numel()]
            inputs[name] = torch.where(tail, other, value)
    unchanged = all(inputs[name] is batch.inputs[name] for name in inputs)
    return None if unchanged else replace(batch, inputs=inputs)


def _attempt(batch: Batch, run: Run) -> tuple[list[Call], list[Tensor]] | None:
    try:
        return run(batch)
    except EngineError:
        return None


def _moved(one: Call, other: Call) -> Tensor | None:
    """Find the rows of two inputs of one call that differ by more than rounding, (P,); None for other shapes."""
    left, right = one.entered, other.entered
    if left.shape != right.shape:
        return None
    if isinstance(one.layer, EmbeddingLayer):
        return (left != right).reshape(-1)
    rows, others = (one.layer.activation_rows(side).reshape(-1, one.layer.fan_in) for side in (left, right))
    return _differ(rows, others)


def _differ(rows: Tensor, others: Tensor) -> Tensor:
    """Find the rows (P, d) that differ by more than rounding, or are not numbers, (P,)."""
    if not rows.is_floating_point():
        return (rows != others).any(1)
    tolerance = math.sqrt(torch.finfo(rows.dtype).eps)
    # written so that NaN differs
    return ~((rows - others).abs().amax(1) <= tolerance * rows.abs().max())


def _reaches(returned: list[Tensor], others: list[Tensor], tail: Tensor) -> bool:
    """Tell whether other content in masked positions changes anything but the outputs of these positions."""
    for one, other in zip(returned, others, strict=False):
        if one.shape != other.shape or not one.is_floating_point() or not one.numel():
            continue
        if one.shape[:2] == tail.shape:
            differs = _differ(one.reshape(tail.numel(), -1), other.reshape(tail.numel(), -1)) & ~tail.reshape(-1)
        else:
            differs = _differ(one.reshape(1, -1), other.reshape(1, -1))
        if bool(differs.any()):
            return True
    return False


def _losing(batch: Batch, run: Run, keys: set[Key]) -> set[Key]:
    """Find those of ``keys`` that lose a position of each example when the inputs along the mask lose one."""
    mask = batch.mask
    if mask is None:
        return set()
    width = mask.shape[1] - 1
    # not the last, which may be the token that a model looks for
    left = torch.arange(width, device=mask.device)
    left[width // 3 :] += 1
    names = {*_along(batch, mask.shape), "attention_mask"}
    shorter = {name: value[:, left] if name in names else value for name, value in batch.inputs.items()}
    cut = replace(batch, inputs=shorter)
    attempt = _attempt(cut, run)
    if attempt is None and isinstance(batch.targets, Tensor) and batch.targets.shape[:2] == mask.shape:
        # labels that belong to these positions rather than to a decoder's
        attempt = _attempt(replace(cut, targets=batch.targets[:, left]), run)
    if attempt is None:
        return set()
    return {
        key
        for key, call in number_calls(attempt[0])
        if key in keys and position_count(call.layer, call.entered) == batch.size * width
    }
