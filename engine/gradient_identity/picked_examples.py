"""Picked examples: a batch of some of the examples of another."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.model.batches import Batch, map_tensors


def pick_examples(batch: Batch, places: Sequence[int]) -> Batch:
    """Pick examples of a batch.

    Args:
        batch: The batch.
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
