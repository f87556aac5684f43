"""Normalisation layers' scale and shift: LayerNorm, RMSNorm, GroupNorm, InstanceNorm, and BatchNorm in evaluation.

``y = w ∘ x̂ + b``: the gradient of one example is (Σ_t x̂_t ∘ g_t, Σ_t g_t), 2d numbers, whose
second moment is kept exactly.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from typing_extensions import override

from engine.layers.layer import BlockLayer


class LastDimensions(BlockLayer):
    """A norm over the last dimensions of its input."""

    @property
    @abstractmethod
    def dims(self) -> int:
        """Their number."""

    @override
    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(-1, self.fan_in)

    @override
    def batch_first(self, entered: Tensor, examples: int) -> bool:
        # whether rows of an input are separable by example
        leading = entered.ndim - self.dims
        if leading == 1:
            return entered.shape[0] % examples == 0
        return leading > 1 and entered.shape[0] == examples


class Channels(BlockLayer):
    """A norm of the channels, which are dimension 1 of its input."""

    @override
    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return _channels_last(gradient)

    @override
    def batch_first(self, entered: Tensor, examples: int) -> bool:
        return entered.shape[0] == examples


@dataclass(eq=False)
class LayerNormLayer(LastDimensions):
    """``nn.LayerNorm`` over the last dimensions."""

    module: nn.LayerNorm

    @override
    @property
    def fan_in(self) -> int:
        return math.prod(self.module.normalized_shape)

    @override
    def normalised(self, entered: Tensor) -> Tensor:
        # normalise over the last dimensions, without the affine part
        plain = functional.layer_norm(entered, self.module.normalized_shape, eps=self.module.eps)
        return plain.reshape(-1, self.fan_in)

    @override
    @property
    def dims(self) -> int:
        return len(self.module.normalized_shape)


@dataclass(eq=False)
class RMSNormLayer(LastDimensions):
    """``nn.RMSNorm`` over the last dimensions, and the RMSNorm of Hugging Face's models over the last one."""

    module: nn.Module

    @override
    @property
    def fan_in(self) -> int:
        weight = self.module.weight
        return weight.numel() if isinstance(weight, Tensor) else 0

    @override
    def normalised(self, entered: Tensor) -> Tensor:
        # divide by the root mean square, ``x̂ = x / √(mean x² + ε)``
        return _root_mean_square(entered.reshape(-1, self.fan_in), _epsilon(self.module, entered.dtype))

    @override
    @property
    def dims(self) -> int:
        return self.module.weight.ndim if isinstance(self.module.weight, Tensor) else 1


@dataclass(eq=False)
class GroupNormLayer(Channels):
    """``nn.GroupNorm``, and ``nn.InstanceNorm1d/2d/3d`` (a group a channel); channels are dimension 1."""

    module: nn.GroupNorm | nn.InstanceNorm1d

    @override
    @property
    def fan_in(self) -> int:
        return self.module.num_channels if isinstance(self.module, nn.GroupNorm) else self.module.num_features

    @override
    def normalised(self, entered: Tensor) -> Tensor:
        # normalise each example's groups of channels, without the affine part
        groups = self.module.num_groups if isinstance(self.module, nn.GroupNorm) else self.fan_in
        return _channels_last(functional.group_norm(entered, groups, eps=self.module.eps))


@dataclass(eq=False)
class BatchNormLayer(Channels):
    """``nn.BatchNorm1d/2d/3d`` with running statistics; channels are dimension 1."""

    module: nn.BatchNorm2d

    @override
    @property
    def fan_in(self) -> int:
        return self.module.num_features

    @override
    def normalised(self, entered: Tensor) -> Tensor:
        # normalise by the running statistics, without the affine part
        mean, variance = self.module.running_mean, self.module.running_var
        if mean is None or variance is None:  # treats_batch_norm has refused it
            raise ValueError(f"layer `{self.name}` keeps no running statistics")
        rows = _channels_last(entered)
        return (rows - mean) * torch.rsqrt(variance + self.module.eps)


def _channels_last(values: Tensor) -> Tensor:
    """Read (N, C, …) as rows (P, C)."""
    return values.movedim(1, -1).reshape(-1, values.shape[1])


_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "norm_epsilon")
"""Names that libraries give the epsilon."""
_SCALES = (1e-8, 1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4)
"""Scales of inputs, small ones among them, on which an epsilon or a smallest root mean square shows."""


def _epsilon(module: nn.Module, dtype: torch.dtype) -> float:
    epsilon = next(
        (value for name in _EPSILONS if isinstance(value := getattr(module, name, None), (int, float))), None
    )
    return torch.finfo(dtype).eps if epsilon is None else float(epsilon)


def _root_mean_square(rows: Tensor, epsilon: float) -> Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)


def is_rms_norm(module: nn.Module) -> bool:
    """Tell whether a module calls itself an RMSNorm."""
    return isinstance(module, nn.RMSNorm) or type(module).__name__.endswith("RMSNorm")


def treats_rms_norm(module: nn.Module) -> str | None:
    """Tell why an RMSNorm cannot be treated.

    Libraries write their own, some with ``1 + w`` for the weight, some with more in it: how the output moves with the
    weight on samples of all magnitudes decides, not the name.
    """
    own = module._parameters  # noqa: SLF001 - those of the module itself
    parameter = own.get("weight")
    if parameter is None or len(own) > 1:
        return "unsupported_layer"
    shape, count = parameter.shape, parameter.numel()
    weight, step = (torch.linspace(start, 2, count, dtype=torch.float64).view(shape) for start in (0.5, 1))
    samples = torch.linspace(-2, 3, 2 * count, dtype=torch.float64).view(2, *shape)
    # some compute in float32 whatever they are given, and two nearly equal outputs were subtracted
    tolerance = 64 * torch.finfo(torch.float32).eps
    for scale in _SCALES:
        sample = samples * scale
        try:
            with torch.no_grad(), torch.device("cpu"):
                moved = functional_call(module, {"weight": weight + step}, (sample,))
                difference = (moved - functional_call(module, {"weight": weight}, (sample,))).double()
        except Exception:  # noqa: BLE001 - it wants other inputs, so it is something else
            return "unsupported_layer"
        expected = _root_mean_square(sample.flatten(1), _epsilon(module, sample.dtype)).view_as(sample) * step
        if difference.shape != expected.shape:
            return "unsupported_layer"
        if float((difference - expected).abs().max()) > tolerance * float(expected.abs().max()):
            return "unsupported_layer"
    return None


def treats_group_norm(module: nn.Module) -> str | None:
    """Tell why a group or instance norm cannot be treated."""
    if isinstance(module, nn.GroupNorm):
        return None if type(module).forward is nn.GroupNorm.forward else "overridden_forward"
    if type(module).forward is not nn.InstanceNorm2d.forward:
        return "overridden_forward"
    known = isinstance(module, (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d))
    # with running statistics it normalises otherwise in evaluation
    return None if known and getattr(module, "running_mean", None) is None else "unsupported_layer"


def treats_layer_norm(module: nn.LayerNorm) -> str | None:
    """Tell why a layer norm cannot be treated."""
    return None if type(module).forward is nn.LayerNorm.forward else "overridden_forward"


def treats_batch_norm(module: nn.Module) -> str | None:
    """Tell why a batch norm cannot be treated."""
    if getattr(module, "running_mean", None) is None or module.training:
        # without frozen statistics one example's output depends on the others: there is no per-example gradient
        return "batch_statistics"
    known = isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
    # a subclass that overrides forward (an activation behind, say) computes something else
    return None if known and type(module).forward is nn.BatchNorm2d.forward else "overridden_forward"
