"""The schedule of self-checks: how many examples each one runs, and its cost."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.batches import Batch, map_tensors, tensors
from engine.workspace import Workspace


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


FIRST_EXAMPLES = 4
"""Different examples of the first batch that are held against themselves alone."""
_MANY = 16
"""Examples of a batch, of which the first ones are few."""
_LONG = 128
"""Numbers of an example from which on it takes longer than what surrounds it."""


def first_examples(batch: Batch) -> int:
    """Choose how many examples of the first batch are held against themselves alone.

    Args:
        batch: The first batch. Where it has few examples, each long one alone takes a large part of the batch's time.

    Returns:
        Four, or as many as there are; half of that of few long ones.
    """
    most = min(FIRST_EXAMPLES, batch.size)
    numbers = max(each[:1].numel() for each in tensors(batch.inputs))
    return most if batch.size >= _MANY or numbers < _LONG else -(-most // 2)


@dataclass(frozen=True, kw_only=True)
class CheckWork:
    """The work of the checks of one collection, in passes there and back."""

    examples: float
    """Examples that go there and back, weight gradients counted."""
    passes: int
    """Passes, of few examples each."""


def check_work(workspace: Workspace, batches: int) -> CheckWork:
    """Count the work of the checks of one collection.

    The first batch goes through the model once more, and some of its examples alone twice, once with the
    gradients of the weights; of a later batch one example does so.

    Args:
        workspace: The job, whose ``self_check`` says which batches are checked.
        batches: Batches of the data, whose shapes are taken to be alike.

    Returns:
        Examples and passes of all checks; zero where nothing is checked.
    """
    collection = workspace.options.collection
    if collection.self_check == "off":
        return CheckWork(examples=0.0, passes=0)
    # there and back, and there and back once more with the gradients of the weights
    alone = 1 + 4 / 3
    later = (batches - 1).bit_length() if collection.self_check == "growing" else 0
    checked = min(FIRST_EXAMPLES, collection.batch_size) + later
    return CheckWork(examples=collection.batch_size + checked * alone, passes=1 + 2 * checked)
