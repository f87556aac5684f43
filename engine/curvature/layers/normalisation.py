"""Scale and shift after a normalisation: LayerNorm and BatchNorm (in evaluation mode).

``y = w ∘ x̂ + b``: the gradient of one example is (Σ_t x̂_t ∘ g_t, Σ_t g_t), 2d numbers, whose
second moment is kept exactly.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.curvature.layers.layer import BlockLayer


@dataclass(eq=False)
class LayerNormLayer(BlockLayer):
    """``nn.LayerNorm`` over the last dimensions."""

    module: nn.LayerNorm

    @property
    def fan_in(self) -> int:
        """Numbers normalised together."""
        return math.prod(self.module.normalized_shape)

    @property
    def fan_out(self) -> int:
        """The same: the map is elementwise."""
        return self.fan_in

    def normalised(self, entered: Tensor) -> Tensor:
        """x̂ without the affine part."""
        plain = functional.layer_norm(entered, self.module.normalized_shape, eps=self.module.eps)
        return plain.reshape(-1, self.fan_in)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Gradients of every position."""
        return gradient.reshape(-1, self.fan_in)

    def batch_first(self, entered: Tensor, examples: int) -> bool:
        """Leading dimension is the example, or positions lie flat."""
        leading = entered.ndim - len(self.module.normalized_shape)
        if leading == 1:
            return entered.shape[0] % examples == 0
        return leading > 1 and entered.shape[0] == examples


@dataclass(eq=False)
class BatchNormLayer(BlockLayer):
    """``nn.BatchNorm1d/2d/3d`` with running statistics; channels are dimension 1."""

    module: nn.BatchNorm2d

    @property
    def fan_in(self) -> int:
        """Channels."""
        return self.module.num_features

    @property
    def fan_out(self) -> int:
        """Channels."""
        return self.module.num_features

    def _rows(self, values: Tensor) -> Tensor:
        return values.movedim(1, -1).reshape(-1, self.fan_in)

    def normalised(self, entered: Tensor) -> Tensor:
        """x̂ by the running statistics."""
        mean, variance = self.module.running_mean, self.module.running_var
        if mean is None or variance is None:  # treats_batch_norm has refused it
            raise ValueError(f"layer `{self.name}` keeps no running statistics")
        rows = self._rows(entered)
        return (rows - mean) * torch.rsqrt(variance + self.module.eps)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Gradients of every position's channels."""
        return self._rows(gradient)

    def batch_first(self, entered: Tensor, examples: int) -> bool:
        """Inputs are (N, C, …)."""
        return entered.shape[0] == examples


def treats_layer_norm(module: nn.LayerNorm) -> str | None:
    """None where ``module`` is treated, else why not."""
    return None if type(module).forward is nn.LayerNorm.forward else "overridden_forward"


def treats_batch_norm(module: nn.Module) -> str | None:
    """None where ``module`` is treated, else why not."""
    if not isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        return "overridden_forward"
    if module.running_mean is None or module.training:
        # without frozen statistics one example's output depends on the others: there is no per-example gradient
        return "batch_statistics"
    return None
