"""Two-dimensional convolution: its input patches are the positions (im2col).

``y[n, :, t] = W · patch(n, t) + b`` with W flattened over (channel, row, column), the order of
``torch.nn.functional.unfold``. Padding is applied explicitly beforehand, so that every padding
mode, and `same`, gives the patches the module itself sees.

References:
    Grosse & Martens (2016), A Kronecker-factored approximate Fisher matrix for convolution layers
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from engine.curvature.layers.layer import TreatedLayer


@dataclass(eq=False)
class ConvolutionLayer(TreatedLayer):
    """``nn.Conv2d`` with one group."""

    module: nn.Conv2d

    @property
    def fan_in(self) -> int:
        """Numbers in one patch."""
        rows, columns = self.module.kernel_size
        return self.module.in_channels * rows * columns

    @property
    def fan_out(self) -> int:
        """Output channels."""
        return self.module.out_channels

    def activation_rows(self, entered: Tensor) -> Tensor:
        """Patches of every output position.

        Memory:
            P · C·kh·kw numbers.
        """
        module = self.module
        padded = entered
        widths = module._reversed_padding_repeated_twice  # noqa: SLF001 - what the module's own forward pads with
        if any(widths):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            padded = functional.pad(entered, widths, mode=mode)
        patches = functional.unfold(padded, module.kernel_size, dilation=module.dilation, stride=module.stride)
        return patches.transpose(1, 2).reshape(-1, self.fan_in)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Output channels of every position."""
        return gradient.flatten(2).transpose(1, 2).reshape(-1, self.fan_out)

    def batch_first(self, entered: Tensor, examples: int) -> bool:
        """Images are (N, C, H, W)."""
        return entered.ndim == 4 and entered.shape[0] == examples


def treats_convolution(module: nn.Conv2d) -> str | None:
    """None where ``module`` is treated, else why not."""
    if type(module).forward is not nn.Conv2d.forward:
        return "overridden_forward"
    if module.groups != 1:
        return "grouped_convolution"
    return None
