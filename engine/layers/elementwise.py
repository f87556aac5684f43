"""Elementwise parameters: tensors that are added, multiplied or broadcast, without any matrix product.

A class token, a table of positions, a scale per channel: the gradient of one example is a tensor
like the parameter itself. Its exact second moment would be as wide as the parameter squared; the
exact *diagonal* of it is kept. So is that of parameters from which a weight is made (a norm and its
directions, two factors, a scale) or that are used in several ways at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from engine.layers.layer import Form, TreatedLayer


@dataclass(eq=False)
class BareLayer(TreatedLayer):
    """One parameter, whose gradient is made example by example: A is the 1×1 matrix 1, G a vector."""

    form: ClassVar[Form] = "diagonal_block"
    why: ClassVar[str] = "no product to factorise: the exact diagonal of the block is kept"

    parameter: str
    """Qualified name."""
    count: int
    """Numbers it holds."""
    leading: bool
    """Whether it gets a dimension for the examples before it meets any data."""
    tensors: Mapping[str, Tensor]
    """The parameter, by its name."""
    held: int | None = None
    """Numbers of an example that wait for its gradient, where operations are run again for it; None where none are."""

    @override
    @property
    def explanation(self) -> str:
        return self.why if self.held is None else self._made

    _made: ClassVar[str] = (
        "no one product describes its uses: the exact diagonal of the block is kept, from each example's gradient"
    )

    @override
    @property
    def roles(self) -> tuple[TreatedLayer, ...]:
        return ()

    @override
    @property
    def watched(self) -> Mapping[str, Tensor]:
        return self.tensors

    @override
    @property
    def fan_in(self) -> int:
        return 1

    @override
    @property
    def fan_out(self) -> int:
        return self.count

    @override
    @cached_property
    def in_dim(self) -> int:
        return 1

    @override
    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.parameter,)

    @override
    def activation_rows(self, entered: Tensor) -> Tensor:
        return entered.new_ones(entered.shape[0], 1)

    @override
    def gradient_rows(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(gradient.shape[0], self.count)
