"""Linear layers: ``nn.Linear`` and the ``Conv1D`` of Hugging Face's GPT-2, which holds Wᵀ."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from typing_extensions import override

from engine.layers.layer import TreatedLayer


@dataclass(eq=False)
class LinearLayer(TreatedLayer):
    """``y = W a + b`` on the last dimension; every leading dimension is a position."""

    @override
    @cached_property
    def fan_in(self) -> int:
        return int(self.module.in_features)  # type: ignore[arg-type]

    @override
    @cached_property
    def fan_out(self) -> int:
        return int(self.module.out_features)  # type: ignore[arg-type]

    @override
    def activation_rows(self, entered: Tensor) -> Tensor:
        # a width of zero leaves -1 open
        return entered.reshape(entered.shape[:-1].numel(), entered.shape[-1])

    @override
    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(-1, gradient.shape[-1])


@dataclass(eq=False)
class TransposedLinearLayer(LinearLayer):
    """``y = a W + b`` with W stored (d_in, d_out): the convention holds for its transpose."""

    @override
    @property
    def fan_in(self) -> int:
        return int(self.module.weight.shape[0])  # type: ignore[index]

    @override
    @property
    def fan_out(self) -> int:
        return int(self.module.weight.shape[1])  # type: ignore[index]

    @override
    def as_stored(self, weight: Tensor) -> Tensor:
        # transpose, since the weight is stored (d_in, d_out)
        return weight[0].T


def treats_linear(module: nn.Module) -> str | None:
    """Tell why a linear layer cannot be treated."""
    # a subclass that overrides forward (an adapter, say) computes something else
    return None if type(module).forward is nn.Linear.forward else "overridden_forward"


def is_transposed_linear(module: nn.Module) -> bool:
    """Tell whether a module is Hugging Face's ``Conv1D``, by its name, so that transformers is not imported."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.")
