"""Kept activations: the bytes that autograd packs between the two passes, by shapes alone.

    kept(N) = fixed + N · each

Every storage counts once, whatever packs it, and parameters and buffers not at all: the output of a ReLU that the next
convolution takes is one storage. A module on the meta device is run with two and with three images; normalisation in
training mode refuses a single number a channel, which one image may be.
"""

from collections.abc import Sequence

import torch
from torch import nn

from engine.model.activation_memory import Saved, trace_saved_bytes

_TRACED = (2, 3)
"""Numbers of images that show the line."""


def kept_activations(module: nn.Module, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Saved:
    """Trace what autograd keeps of a module's forward pass until its backward pass.

    Args:
        module: A module on the meta device, in the mode that it is trained in.
        shape: Shape of one image, without the batch, e.g. (C, H, W).
        dtype: The images' dtype.

    Returns:
        Bytes at any number of images, and bytes that each image adds; ``.of(N)`` is the whole.
    """

    def run(images: int) -> object:
        return module(torch.empty(images, *shape, dtype=dtype, device="meta"))

    return trace_saved_bytes(run, _TRACED, module, {})[0]
