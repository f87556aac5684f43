"""Convolutions in one to three dimensions, transposed ones too: their input patches are the positions.

``y[n, :, t] = W · patch(n, t) + b`` with W as (out, in · kernel), channels before kernel axes.
Padding is applied explicitly beforehand, so that every padding mode, and `same`, gives the patches
that the module itself sees. A needs their second moment only, which ``patches`` finds without
writing them all out.

A transposed convolution is the convolution of its input, spread out with ``stride − 1`` zeros
between neighbours, with the kernel reversed; its weight is stored (in, out, kernel), the
convention's transpose.

Groups split the channels into convolutions that never meet: each has its own A and G.

References:
    Grosse & Martens (2016), A Kronecker-factored approximate Fisher matrix for convolution layers
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from engine.layers.layer import TreatedLayer
from engine.layers.patch_moments import Geometry, Patches

_FORWARDS = {cls.forward for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}
_COMPUTES = {cls._conv_forward for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}
"""The functions that those call."""
_TRANSPOSED_FORWARDS = {cls.forward for cls in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)}


@dataclass(eq=False)
class ConvolutionLayer(TreatedLayer):
    """``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d``."""

    module: nn.modules.conv._ConvNd

    @override
    @cached_property
    def groups(self) -> int:
        # groups of channels that never meet; a depthwise convolution has one a channel
        return self.module.groups

    @override
    @cached_property
    def fan_in(self) -> int:
        return self.module.in_channels // self.groups * math.prod(self.module.kernel_size)

    @override
    @cached_property
    def fan_out(self) -> int:
        return self.module.out_channels // self.groups

    def geometry(self, shape: Sequence[int]) -> Geometry:
        """Return the windows of an input.

        Args:
            shape: Shape of the module's input, (N, C, *sizes).

        Returns:
            Their geometry over the padded image; a kernel of one place without padding sees only what its stride reads.
        """
        module, axes = self.module, range(len(self.module.kernel_size))
        skipped = self._skipped()
        widths = module._reversed_padding_repeated_twice  # noqa: SLF001 - what the module's own forward pads with
        ends = [(widths[-2 - 2 * axis], widths[-1 - 2 * axis]) for axis in axes]
        return Geometry(
            examples=shape[0],
            channels=shape[1],
            groups=self.groups,
            extents=tuple(-(-shape[2 + axis] // skipped[axis]) + sum(ends[axis]) for axis in axes),
            kernel=tuple(module.kernel_size),
            stride=tuple(module.stride[axis] // skipped[axis] for axis in axes),
            dilation=tuple(module.dilation),
            margins=tuple(ends if module.padding_mode == "zeros" else [(0, 0)] * len(ends)),
        )

    def patches(self, entered: Tensor, dtype: torch.dtype) -> Patches:
        """Return the windows of one call, held as the padded input.

        Args:
            entered: The module's input, shape (N, C, *sizes).
            dtype: Precision that sums over the windows are taken in.

        Returns:
            The windows over an image of shape (N, *extents, C).
        """
        shape, mode = self.geometry(entered.shape), self.module.padding_mode
        inner = entered[(slice(None), slice(None), *(slice(None, None, step) for step in self._skipped()))]
        widths = self.module._reversed_padding_repeated_twice  # noqa: SLF001 - likewise
        if mode != "zeros" and any(widths):
            inner = functional.pad(inner, widths, mode=mode)
        return Patches(image=_placed(inner, shape, [before for before, _ in shape.margins], dtype), shape=shape)

    def _skipped(self) -> list[int]:
        """Return the step of each axis at which the input is read: a kernel of one place sees nothing between."""
        module = self.module
        ends = module._reversed_padding_repeated_twice  # noqa: SLF001 - likewise
        alone = zip(module.kernel_size, module.stride, reversed(ends[::2]), reversed(ends[1::2]), strict=True)
        return [stride if kernel == 1 and not before + after else 1 for kernel, stride, before, after in alone]

    def in_parameter_order_(self, total: Tensor) -> Tensor:
        """Bring sums over ``patches`` from kernel-first to the order of the weight's columns, channels before kernel.

        A transposed convolution's kernel is also turned around, as it is stored.

        Args:
            total: Sums, shape (…, n, n), contiguous, changed in place; the column of ones stays last.

        Returns:
            ``total``.

        Memory:
            2²⁰ numbers, or one row of every matrix.
        """
        width = self.fan_in if self.weight else 0
        kernel = math.prod(self.module.kernel_size)
        if kernel == 1:
            return total
        order = torch.arange(width, device=total.device).view(kernel, -1)
        order = (order.flip(0) if self.module.transposed else order).T.reshape(-1)
        matrices = total.view(-1, *total.shape[-2:])
        size = matrices.shape[-1]
        step = max(1, 2**20 // (matrices.shape[0] * size))
        for start in range(0, size, step):
            rows = matrices[:, start : start + step, :width]
            rows.copy_(rows[..., order])
        for start in range(0, size, step):
            columns = matrices[:, :width, start : start + step]
            columns.copy_(columns[:, order])
        return total

    @override
    def activation_rows(self, entered: Tensor) -> Tensor:
        module = self.module
        padded = entered
        widths = module._reversed_padding_repeated_twice  # noqa: SLF001 - what the module's own forward pads with
        if any(widths):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            padded = functional.pad(entered, widths, mode=mode)
        return _patches(padded, module.kernel_size, module.stride, module.dilation).reshape(
            -1, self.groups * self.fan_in
        )

    @override
    def gradient_rows(self, gradient: Tensor) -> Tensor:
        last = gradient.movedim(1, -1)
        if last.is_contiguous():
            return last.view(-1, last.shape[-1])
        # whole images are copied in longer runs than single channels
        return gradient.transpose(0, 1).reshape(gradient.shape[1], -1).T

    @override
    def batch_first(self, entered: Tensor, examples: int) -> bool:
        # tell whether an input has a dimension for the examples, and it comes first
        return entered.ndim == len(self.module.kernel_size) + 2 and entered.shape[0] == examples


@dataclass(eq=False)
class TransposedConvolutionLayer(ConvolutionLayer):
    """``nn.ConvTranspose1d``, ``nn.ConvTranspose2d``, ``nn.ConvTranspose3d``; a call may fix its ``output_size``."""

    added: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Places that the output has at the end of each axis beyond what the input fills; None for the module's own."""

    @property
    def output_padding(self) -> tuple[int, ...]:
        """Places that the output has at the end of each axis beyond what the input fills."""
        return tuple(self.module.output_padding) if self.added is None else self.added

    @override
    def of_call(self, entered: Tensor, output: Tensor) -> Self:
        known = zip(self.output_padding, output.shape[2:], self.geometry(entered.shape).windows, strict=True)
        added = tuple(padding + size - window for padding, size, window in known)
        return self if added == self.output_padding else replace(self, added=added)

    @override
    def geometry(self, shape: Sequence[int]) -> Geometry:
        # return the windows over an input that is spread out
        module, axes = self.module, range(len(self.module.kernel_size))
        starts, ends = self._overhangs()
        return Geometry(
            examples=shape[0],
            channels=shape[1],
            groups=self.groups,
            extents=tuple((shape[2 + axis] - 1) * module.stride[axis] + 1 + starts[axis] + ends[axis] for axis in axes),
            kernel=tuple(module.kernel_size),
            stride=(1,) * len(axes),
            dilation=tuple(module.dilation),
            margins=tuple((max(starts[axis], 0), max(ends[axis], 0)) for axis in axes),
        )

    @override
    def patches(self, entered: Tensor, dtype: torch.dtype) -> Patches:
        # return the windows of one call, held as the input spread out and padded
        shape = self.geometry(entered.shape)
        return Patches(image=_placed(entered, shape, self._overhangs()[0], dtype, self.module.stride), shape=shape)

    @override
    def as_stored(self, weight: Tensor) -> Tensor:
        # exchange the channels, since the weight is stored (groups · d_in, d_out, kernel)
        groups, out, _ = weight.shape
        return weight.view(groups, out, -1, math.prod(self.module.kernel_size)).transpose(1, 2)

    def _overhangs(self) -> tuple[list[int], list[int]]:
        """Return the zeros at both ends of each axis; negative where the module cuts more than the kernel overhangs."""
        module, axes = self.module, range(len(self.module.kernel_size))
        starts = [module.dilation[axis] * (module.kernel_size[axis] - 1) - int(module.padding[axis]) for axis in axes]
        return starts, [starts[axis] + self.output_padding[axis] for axis in axes]

    @override
    def activation_rows(self, entered: Tensor) -> Tensor:
        # write out the patch of every output position, in the order of the stored kernel
        module = self.module
        axes = range(len(module.kernel_size))
        starts, ends = self._overhangs()
        spread = entered.new_zeros(
            *entered.shape[:2], *((entered.shape[2 + axis] - 1) * module.stride[axis] + 1 for axis in axes)
        )
        spread[(slice(None), slice(None), *(slice(None, None, step) for step in module.stride))] = entered
        widths: list[int] = []
        for axis in reversed(axes):
            widths += [starts[axis], ends[axis]]
        patches = _patches(functional.pad(spread, widths), module.kernel_size, [1] * len(axes), module.dilation)
        return patches.flip([-1 - axis for axis in axes]).reshape(-1, self.groups * self.fan_in)


def _placed(
    entered: Tensor, shape: Geometry, starts: Sequence[int], dtype: torch.dtype, steps: Sequence[int] | None = None
) -> Tensor:  # (N, *extents, C)
    """Write ``entered`` into an image of zeros, from ``starts`` on, ``steps`` apart; what lies outside is cut."""
    image = entered.new_zeros((shape.examples, *shape.extents, shape.channels), dtype=dtype)
    into, taken = [slice(None)], [slice(None)]
    for axis, start in enumerate(starts):
        step = 1 if steps is None else steps[axis]
        first = max(0, -(start // step))
        begin = start + first * step
        count = min(entered.shape[2 + axis] - first, -(-(shape.extents[axis] - begin) // step))
        into.append(slice(begin, begin + (count - 1) * step + 1, step))
        taken.append(slice(first, first + count))
    image[tuple(into)].copy_(entered.movedim(1, -1)[tuple(taken)])
    return image


def _patches(
    padded: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:  # (N, *positions, C, *kernel), a view
    axes = range(len(kernel))
    extents = [(padded.shape[2 + axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1 for axis in axes]
    steps = padded.stride()
    return padded.as_strided(
        (padded.shape[0], *extents, padded.shape[1], *kernel),
        (
            steps[0],
            *(steps[2 + axis] * stride[axis] for axis in axes),
            steps[1],
            *(steps[2 + axis] * dilation[axis] for axis in axes),
        ),
        padded.storage_offset(),
    )


def treats_convolution(module: nn.modules.conv._ConvNd) -> str | None:
    """Tell why a convolution cannot be treated."""
    if module.transposed:
        return None if type(module).forward in _TRANSPOSED_FORWARDS else "overridden_forward"
    plain = type(module).forward in _FORWARDS and getattr(type(module), "_conv_forward", None) in _COMPUTES
    return None if plain and "_conv_forward" not in vars(module) else "overridden_forward"
