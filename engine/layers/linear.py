"""Linear layers: ``nn.Linear`` and the ``Conv1D`` of Hugging Face's GPT-2, which holds Wᵀ.

Functional linear layers: a parameter, or a slice of one, that a model multiplies by without a module.

``nn.MultiheadAttention`` keeps the projections of queries, keys and values in one parameter, a
mixture of experts keeps all its experts in one; each slice that enters a product of its own is a
layer of its own, named after the parameter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from typing_extensions import override

from engine.layers.layer import TreatedLayer
from engine.layers.parameter_slice import Place, label_of


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


@dataclass(eq=False)
class FunctionalLinearLayer(LinearLayer):
    """``y = W a + b`` where W and b are places in parameters.

    An expert sees the tokens routed to it, so its A divides by those; its G divides by all loss
    terms like every other: the block of the *mean* loss sums over the routed tokens only, and what
    is missing from the sum is missing from A's count and from G's sum alike.
    """

    into: int
    """Features of ``a``."""
    out: int
    """Features of ``g``."""
    weight_place: Place | None
    """W (out, in); None where it is not trainable."""
    bias_place: Place | None
    """b (out,); None where there is none, or it is not trainable."""
    tensors: Mapping[str, Tensor]
    """The parameters, by name."""
    routed: bool = False
    """One of several alike in one parameter, of which the data choose."""

    @override
    @property
    def roles(self) -> tuple[TreatedLayer, ...]:
        return ()

    @override
    @property
    def reason_uncalled(self) -> str:
        # experts are called by the tokens routed to them
        return "never_routed" if self.routed else "no_gradient"

    @override
    @property
    def watched(self) -> Mapping[str, Tensor]:
        # the parameters, of any shape, that its weight and bias are places in, by name
        return self.tensors

    @override
    @property
    def fan_in(self) -> int:
        return self.into

    @override
    @property
    def fan_out(self) -> int:
        return self.out

    @override
    @property
    def parameters(self) -> tuple[str, ...]:
        # qualified names of the parameters, or of the parts of them, that it covers, weight first
        places = (self.weight_place, self.bias_place)
        return tuple(label_of(place, self.tensors[place.parameter]) for place in places if place is not None)

    @override
    def batch_first(self, entered: Tensor, examples: int) -> bool:
        # rows are separable by example: the provenance of what enters shows it, not its shape
        del entered, examples
        return True
