"""Kept activations: the bytes that autograd packs between the two passes, by shapes alone.

    kept(N) = fixed + N · each

Every storage counts once, whatever packs it, and parameters and buffers not at all: the output of a ReLU that the next
convolution takes is one storage. A module on the meta device is run with two and with three images; normalisation in
training mode refuses a single number a channel, which one image may be.

Padded channels: what a CPU's convolutions take beside their tensors where channels are no multiple of 16.

oneDNN computes in blocks of 16 channels in float32 and narrower: inputs and outputs are copied to blocks, and those of
a few channels are padded. One channel out of 105 images of 224×224 takes 321 MiB in place of 20. Copies of whole blocks
are left out, since activations that are alive at the peak of a step are larger; and so is the padding of an image,
which the first convolution reads as it is.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

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


_BLOCK = 16
_NUMBER_BYTES = 4


def padded_bytes(model: nn.Module, shape: tuple[int, ...], images: int) -> int:
    """Return the most bytes that one convolution of a model holds in padded blocks.

    Args:
        model: A network on the meta device.
        shape: Shape of one image, (C, H, W).
        images: Images that pass at once.

    Returns:
        Bytes; 0 where all convolutions have multiples of 16 channels.
    """
    held: list[int] = []

    def note(_: nn.Module, args: tuple[Tensor, ...], left: Tensor) -> None:
        read = (args[0],) if held else ()
        held.append(sum(_blocks(tensor) for tensor in (*read, left)))

    hooks = [each.register_forward_hook(note) for each in model.modules() if isinstance(each, nn.Conv2d)]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.empty(1, *shape, dtype=next(model.parameters()).dtype, device="meta"))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return images * max(held, default=0)


def _blocks(tensor: Tensor) -> int:
    channels, *sides = tensor.shape[1:]
    if channels % _BLOCK == 0:
        return 0
    return -(-channels // _BLOCK) * _BLOCK * math.prod(sides) * _NUMBER_BYTES
