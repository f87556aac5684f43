"""An exact checksum of a tensor's numbers."""

import torch
from torch import Tensor


def bit_sum(tensor: Tensor) -> int:
    """Sum a tensor's bytes, read as 64-bit integers: an exact checksum, which differs for other numbers.

    Args:
        tensor: A tensor of any shape, dtype and device.

    Returns:
        The sum of its 64-bit words modulo 2⁶⁴, plus that of the bytes left over; 0 for what is not stored densely.
    """
    if tensor.layout != torch.strided:
        return 0
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    # torch reads only what lies on a multiple of its size as a wider type
    aligned = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    return int(aligned.view(torch.int64).sum()) + int(flat[whole:].sum(dtype=torch.int64))
