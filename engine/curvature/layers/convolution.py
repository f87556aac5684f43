"""Convolutions in one to three dimensions, transposed ones too: their input patches are the positions.

``y[n, :, t] = W · patch(n, t) + b`` with W as (out, in · kernel), channels before kernel axes. The
patches are one strided view of the padded input and one copy of it. Padding is applied explicitly
beforehand, so that every padding mode, and `same`, gives the patches that the module itself sees.

A transposed convolution is the convolution of its input, spread out with ``stride − 1`` zeros
between neighbours, with the kernel reversed; its weight is stored (in, out, kernel), the
convention's transpose.

Groups split the channels into convolutions that never meet: each has its own A and G.

References:
    Grosse & Martens (2016), A Kronecker-factored approximate Fisher matrix for convolution layers
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from engine.curvature.layers.layer import TreatedLayer

_FORWARDS = {cls.forward for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}
_TRANSPOSED_FORWARDS = {cls.forward for cls in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)}


@dataclass(eq=False)
class ConvolutionLayer(TreatedLayer):
    """``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d``."""

    module: nn.modules.conv._ConvNd

    @property
    def groups(self) -> int:
        """Groups of channels that never meet; a depthwise convolution has one a channel."""
        return self.module.groups

    @property
    def fan_in(self) -> int:
        """Numbers in one group's patch."""
        return self.module.in_channels // self.groups * math.prod(self.module.kernel_size)

    @property
    def fan_out(self) -> int:
        """Output channels of one group."""
        return self.module.out_channels // self.groups

    def activation_rows(self, entered: Tensor) -> Tensor:
        """Patches of every output position.

        Memory:
            P · C·k numbers, k the kernel's volume.
        """
        module = self.module
        padded = entered
        widths = module._reversed_padding_repeated_twice  # noqa: SLF001 - what the module's own forward pads with
        if any(widths):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            padded = functional.pad(entered, widths, mode=mode)
        return _patches(padded, module.kernel_size, module.stride, module.dilation).reshape(
            -1, self.groups * self.fan_in
        )

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Output channels of every position."""
        return gradient.flatten(2).transpose(1, 2).reshape(-1, gradient.shape[1])

    def batch_first(self, entered: Tensor, examples: int) -> bool:
        """Inputs are (N, C, …)."""
        return entered.ndim == len(self.module.kernel_size) + 2 and entered.shape[0] == examples


@dataclass(eq=False)
class TransposedConvolutionLayer(ConvolutionLayer):
    """``nn.ConvTranspose1d``, ``nn.ConvTranspose2d``, ``nn.ConvTranspose3d``."""

    def activation_rows(self, entered: Tensor) -> Tensor:
        """Patches of every output position, in the order of the stored kernel.

        Memory:
            P · C·k numbers, and the spread-out input.
        """
        module = self.module
        axes = range(len(module.kernel_size))
        spread = entered.new_zeros(
            *entered.shape[:2], *((entered.shape[2 + axis] - 1) * module.stride[axis] + 1 for axis in axes)
        )
        spread[(slice(None), slice(None), *(slice(None, None, step) for step in module.stride))] = entered
        widths: list[int] = []
        for axis in reversed(axes):
            # negative where the module cuts more than the kernel overhangs: then the pad cuts
            overhang = module.dilation[axis] * (module.kernel_size[axis] - 1) - int(module.padding[axis])
            widths += [overhang, overhang + module.output_padding[axis]]
        patches = _patches(functional.pad(spread, widths), module.kernel_size, [1] * len(axes), module.dilation)
        return patches.flip([-1 - axis for axis in axes]).reshape(-1, self.groups * self.fan_in)


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
    """None where ``module`` is treated, else why not."""
    known = _TRANSPOSED_FORWARDS if module.transposed else _FORWARDS
    return None if type(module).forward in known else "overridden_forward"
