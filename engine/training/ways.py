"""Ways to the gradient of an undivided batch: chunks of images and checkpointing.

::

    chunk   checkpointing   passes of the backbone            relative cost
    None    no              forward, backward                 1
    None    yes             forward, each block again         4/3
    c       no              features of all, then c by c      4/3
    c       yes             the same, each block again        5/3

Every chunk adds a little, since small ones use a device less well. All of these ways give the same gradient: chunks are
listed only where each image's features depend on that image alone, which batch normalisation over the whole batch
excludes.

Kept activations: the bytes that autograd packs between the two passes, by shapes alone.

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
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.model.activation_memory import Saved, trace_saved_bytes

_TRACED = (2, 3)
"""Numbers of images that show the line."""


def kept_activations(module: nn.Module, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Saved:
    """Trace what autograd keeps of a module's forward pass until its backward pass.

    The module is on the meta device, in the mode that it is trained in; ``shape`` is that of one image, without the
    batch, e.g. (C, H, W). The result has the bytes at any number of images, and the bytes that each image adds;
    ``.of(N)`` is the whole.
    """

    def run(images: int) -> object:
        return module(torch.empty(images, *shape, dtype=dtype, device="meta"))

    return trace_saved_bytes(run, _TRACED, module, {})[0]


_BLOCK = 16
_NUMBER_BYTES = 4


def padded_bytes(model: nn.Module, shape: tuple[int, ...], images: int) -> int:
    """Return the most bytes that one convolution of a model holds in padded blocks, of so many images at once.

    ``shape`` is that of one image, (C, H, W). The model is on the meta device. The result is 0 where all convolutions
    have multiples of 16 channels.
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


_ONE_MORE_FORWARD = 1 / 3
"""A backward pass costs two forward passes, so that one forward pass more is a third of a step."""
_EACH_SLICE = 0.01
"""Share of a step that each slice adds."""
_COVARIANCES = 4
"""Matrices of d × d that a dense penalty holds at once: Cov, its square off the diagonal, and the gradients of both."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compute the gradient of a step."""

    chunk: int | None = None
    """Images that pass through the backbone at once, in two passes; None for all of them in one."""
    checkpointing: bool = False
    """The inside of each block is computed again in the backward pass."""
    compute_dtype: torch.dtype = torch.float32
    """The dtype that forward passes compute in; of 16 bits, under autocast."""

    def slices(self, images: int) -> int:
        """Return the number of slices that so many images are cut into."""
        return 1 if self.chunk is None else -(-images // self.chunk)

    def relative_cost(self, images: int) -> float:
        """Return the cost of a step of so many images, relative to the undivided step of the same precision."""
        forwards = (self.chunk is not None) + self.checkpointing
        return 1 + _ONE_MORE_FORWARD * forwards + _EACH_SLICE * (self.slices(images) - 1)

    @property
    def described(self) -> str:
        """The way in words."""
        passes = "undivided" if self.chunk is None else f"two passes in chunks of {self.chunk} images"
        again = ", checkpointing by blocks" if self.checkpointing else ""
        narrow = "" if self.compute_dtype.itemsize > 2 else f", {str(self.compute_dtype).removeprefix('torch.')}"
        return f"{passes}{again}{narrow}"


def exact_ways(
    images: int,
    *,
    coupled: bool,
    has_chain: bool,
    least_slices: int = 1,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Way, ...]:
    """List the ways with the gradient of the undivided batch of so many images, fastest first.

    Chunks are N, N/2, N/3, N/4, N/6, N/8, N/12, … down to 1, rounded up. Images are never sliced where features of one
    image depend on the others (``coupled``), as under batch normalisation over the whole batch; else into
    ``least_slices`` at least. ``has_chain`` says whether the backbone is a chain of blocks, which checkpointing needs.
    """
    least = 1 if coupled else min(least_slices, images)
    sliced = [] if coupled else [chunk for chunk in _chunks(images) if -(-images // chunk) >= least]
    chunks = [*([None] if least == 1 else []), *sliced]
    found = [
        Way(chunk=chunk, checkpointing=checkpointing, compute_dtype=compute_dtype)
        for chunk in chunks
        for checkpointing in ((False, True) if has_chain else (False,))
    ]
    return tuple(sorted(found, key=lambda way: way.relative_cost(images)))


def _chunks(images: int) -> list[int]:
    """Sizes below ``images`` in descending order."""
    sizes = set()
    for power in range(images.bit_length() + 1):
        for slices in (2**power, 3 * 2**power):
            sizes.add(max(1, -(-images // slices)))
    return sorted(sizes - {images}, reverse=True)


def dense_covariance_bytes(rows: int, d: int, itemsize: int = 4) -> int:
    """Return the bytes that a covariance penalty on n rows of d numbers with a dense matrix would add.

        4 · d² · itemsize, beside the centred rows n · d · itemsize

    9.38 GiB where d is 25088 and there are 25 rows. The Gram form takes n² numbers in place of d².
    """
    return itemsize * (_COVARIANCES * d * d + rows * d)
