"""An exact checksum of a tensor's numbers, in their order."""

import torch
from torch import Tensor

_WIDTH = 64
"""Words of a row: rows and columns are weighed by their places, which takes no product of every word."""


def bit_sum(tensor: Tensor) -> int:
    """Sum a tensor's bytes, read as 64-bit integers: an exact checksum, which differs for other numbers.

    Words count by their places too, since a model may turn its numbers round.

    Args:
        tensor: A tensor of any shape, dtype and device.

    Returns:
        The sum of its 64-bit words and of the bytes left over, modulo 2⁶⁴ and weighed by row and by column; 0 for what
        is not stored densely.
    """
    if tensor.layout != torch.strided:
        return 0
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    # torch reads only what lies on a multiple of its size as a wider type
    aligned = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    words = aligned.view(torch.int64)
    square = words[: words.numel() // _WIDTH * _WIDTH].view(-1, _WIDTH)
    rest = torch.cat([words[square.numel() :], flat[whole:].to(torch.int64)])
    return sum(_weighed(each, odd) for each, odd in ((square.sum(1), 1), (square.sum(0), 5), (rest, 9)))


def _weighed(words: Tensor, first: int) -> int:
    """Sum words (n,), each times an odd number, so that no bit of it is lost."""
    return int((words * torch.arange(first, first + 4 * len(words), 4, device=words.device)).sum())
