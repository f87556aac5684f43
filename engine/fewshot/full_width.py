"""Full width: tensors in float32 or wider, computed with autocast off.

Sums of squares reach 1.7e7 in a penalty, and the largest number of float16 is 65504; so penalties, cosines, distances
and losses are computed at full width, whatever the model computes in.
"""

import contextlib

import torch
from torch import Tensor


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor of 16 bits in float32, and any other as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a device computes in the precision of its tensors."""
    if device.type == "meta":
        # torch has no such cast there
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
