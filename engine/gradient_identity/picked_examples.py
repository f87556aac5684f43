"""Picked examples: a batch of some of the examples of another."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.model.batches import Batch, map_tensors, tensors


def pick_examples(batch: Batch, places: Sequence[int]) -> Batch:
    """Pick examples of a batch.

    Args:
        places: Places of the examples, in the order wanted; one may come more than once.

    Returns:
        A batch of copies of those examples.
    """
    index = torch.tensor(places, device=batch.index.device)

    def pick(tensor: Tensor) -> Tensor:
        return tensor[index.to(tensor.device)]

    return Batch(
        inputs=map_tensors(batch.inputs, pick), targets=map_tensors(batch.targets, pick), index=pick(batch.index)
    )


def different_examples(batch: Batch, count: int) -> list[int]:
    """Choose examples whose inputs differ, spread over the batch: a model may treat its parts in different ways.

    Args:
        count: Number of examples wanted.

    Returns:
        Ascending places of up to ``count`` examples; equal ones are among them where too few differ.
    """
    chosen: list[int] = []
    parts = tensors(batch.inputs)
    for place in _spread(batch.size):
        if len(chosen) == count:
            return sorted(chosen)
        if not any(all(torch.equal(each[place], each[other]) for each in parts) for other in chosen):
            chosen.append(place)
    rest = [place for place in range(batch.size) if place not in chosen]
    return sorted(chosen + rest[: min(count, batch.size) - len(chosen)])


def _spread(count: int) -> Iterator[int]:
    """Yield the places 0 to ``count`` − 1: the first, the last, and then whatever halves the widest gaps."""
    yield from range(min(1, count))
    yield from range(count - 1, max(0, count - 2), -1)
    gaps = deque([(0, count - 1)])
    while gaps:
        low, high = gaps.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            yield middle
            gaps += [(low, middle), (middle, high)]
