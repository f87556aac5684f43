"""Length buckets: examples of like length go through the model together, without the columns that only pad.

A batch of texts is as long as its longest, and often more than half of it is padding, which costs
a forward and a backward pass and enters nothing. Grouped by length and cut to the longest of each
group, the same examples bring the same sums, in another order.

That holds where the padding decides nothing. So it is tried out before the first pass: every
layer's positions must be proven to be the mask's, or one per example, and the outputs of a padded example must
stay what they are when its padding is cut off.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from catalog.requests.inputs import Task
from engine.errors import EngineError
from engine.model.batches import Batch, map_tensors
from engine.model.outputs import Prediction
from engine.row_layout.attention_masks import Masking, number_calls, position_count
from engine.row_layout.layer_calls import Call
from engine.row_layout.unbatched_inputs import close

_SHORTER = 0.75
"""An example joins a group if it is at least this share of the group's longest."""
_POSITIONS = 512
"""Or if the group has fewer positions than this: smaller products are no faster."""


def group_by_length(batch: Batch, task: Task) -> Iterator[Batch]:
    """Group the examples of a batch by length, and cut each group to its longest.

    Args:
        batch: Examples with an attention mask.
        task: Its ignored targets may be cut off, those that count are not.

    Yields:
        Batches that hold each example once, the longest first; the batch itself where its padding is not all at the
        end.
    """
    lengths = _lengths(batch, task)
    if lengths is None:
        yield batch
        return
    for rows in _groups(lengths):
        yield _cut(batch, rows, lengths[rows[0]])


def is_padding_irrelevant(
    batch: Batch, task: Task, calls: list[Call], examples: int, masking: Masking, run: Callable[[Batch], Prediction]
) -> bool:
    """Tell whether the model gives a padded example the same outputs without its padding.

    Args:
        batch: Examples with an attention mask, of which the shortest is tried.
        task: Decides which outputs count.
        calls: Calls of a run of examples as long as the batch; those on which the mask is not laid must have one
            position per example.
        examples: Examples of that run.
        masking: The calls on which the mask is laid.
        run: Runs the model on a batch.

    Returns:
        False too where no example is padded, since nothing can be tried out then, and for the model's own loss.
    """
    lengths = _lengths(batch, task)
    if lengths is None or task.likelihood == "model" or batch.mask is None:
        return False
    width = batch.mask.shape[1]
    shortest = min(range(batch.size), key=lengths.__getitem__)
    if lengths[shortest] == width:
        return False
    for key, call in number_calls(calls):
        count = position_count(call.layer, call.entered)
        if count != examples and not (masking.covers(key) and count == examples * width):
            return False
    try:
        padded, plain = (run(_cut(batch, [shortest], length)) for length in (width, lengths[shortest]))
    except EngineError:
        # outputs of a length of their own do not fit targets that were cut
        return False
    left, right = padded.outputs[padded.valid], plain.outputs[plain.valid]
    if padded.outputs.shape[-1] != plain.outputs.shape[-1] or left.shape != right.shape or not left.numel():
        return False
    return close(left, right)


def _lengths(batch: Batch, task: Task) -> list[int] | None:
    """Positions of each example up to its padding; None where the mask has holes or leads, or is shared.

    A target that counts, though the mask leaves its position out, is not cut off.
    """
    mask = batch.mask
    if mask is None or mask.shape[0] != batch.size or not bool((mask[:, 1:] <= mask[:, :-1]).all()):
        return None
    # the shortest sequences that a language model takes are of two tokens
    least = min(2, mask.shape[1])
    lengths = mask.sum(1).clamp_min(least)
    targets = batch.targets
    # those of a causal language model end with the mask
    if task.type != "causal_lm" and isinstance(targets, Tensor) and targets.shape[:2] == mask.shape:
        ends = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        answered = targets if targets.ndim == 2 else targets.flatten(2).ne(task.ignore_index).any(2).long()
        ignored = task.ignore_index if targets.ndim == 2 else 0
        lengths = torch.maximum(lengths, torch.where(answered != ignored, ends, 0).amax(1))
    return [int(length) for length in lengths.tolist()]


def _groups(lengths: list[int]) -> Iterator[list[int]]:
    """Yield places in ``lengths``, longest first, cut where the next is much shorter."""
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    group: list[int] = []
    for place in order:
        if group:
            longest = lengths[group[0]]
            if lengths[place] < _SHORTER * longest and len(group) * longest >= _POSITIONS:
                yield group
                group = []
        group.append(place)
    yield group


def _cut(batch: Batch, rows: list[int], length: int) -> Batch:
    mask = batch.mask
    width = 0 if mask is None else mask.shape[1]
    places = torch.tensor(rows, device=batch.index.device)

    def picked(tensor: Tensor) -> Tensor:
        own = tensor[places]
        # what is as long as the mask goes along it
        return own[:, :length] if own.ndim > 1 and own.shape[1] == width else own

    return Batch(
        inputs=map_tensors(batch.inputs, picked), targets=map_tensors(batch.targets, picked), index=batch.index[places]
    )
