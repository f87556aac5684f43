"""An exact checksum of a tensor's numbers, in their order."""

import torch
from torch import Tensor

_WIDTH = 63
"""Words in a row; an odd number, so that a row whose numbers all change their signs has another sum."""
_SPREAD = 0x1E3779B97F4A7C15
"""An odd number whose multiples have no pattern among their bits."""


def bit_sum(tensor: Tensor) -> int:
    """Compute an exact checksum of a tensor's bytes, read as rows of 64-bit integers.

    Sums of rows and of columns are mixed with their places and summed. One number that changes changes one sum of each
    kind; a pattern of changes that leaves all of them as they were is not told apart.

    Args:
        tensor: A tensor of any shape, dtype and device.

    Returns:
        64 bits with their sign; 0 for an empty tensor, and for what is not stored densely.
    """
    if tensor.layout != torch.strided or not tensor.numel():
        return 0
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    # torch reads only what lies on a multiple of its size as a wider type
    aligned = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    words = aligned.view(torch.int64)
    square = words[: words.numel() // _WIDTH * _WIDTH].view(-1, _WIDTH)
    sums = torch.cat([square.sum(0), square.sum(1), words[square.numel() :], flat[whole:].to(torch.int64)])
    placed = sums + torch.arange(1, 1 + len(sums), device=sums.device) * _SPREAD
    # not linear, so that changes of two sums do not cancel
    return int((placed >> 29).bitwise_xor_(placed).mul_(placed).sum())
