"""Elementwise parameters: tensors that are added, multiplied or broadcast, without any matrix product.

A class token, a table of positions, a scale per channel: the gradient of one example is a tensor
like the parameter itself. Its exact second moment would be as wide as the parameter squared; the
exact *diagonal* of it is kept. So is that of parameters from which a weight is made (a norm and its
directions, two factors, a scale) or that are used in several ways at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

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

    @property
    def explanation(self) -> str:
        """Why only its diagonal is kept."""
        return self.why if self.held is None else self._made

    _made: ClassVar[str] = (
        "no one product describes its uses: the exact diagonal of the block is kept, from each example's gradient"
    )

    @property
    def roles(self) -> tuple[TreatedLayer, ...]:
        """No module's call shows it."""
        return ()

    @property
    def watched(self) -> Mapping[str, Tensor]:
        """The one."""
        return self.tensors

    @property
    def fan_in(self) -> int:
        """A is the 1×1 matrix 1."""
        return 1

    @property
    def fan_out(self) -> int:
        """Numbers of the parameter."""
        return self.count

    @property
    def in_dim(self) -> int:
        """A is the 1×1 matrix 1."""
        return 1

    @property
    def parameters(self) -> tuple[str, ...]:
        """The one."""
        return (self.parameter,)

    def activation_rows(self, entered: Tensor) -> Tensor:
        """Return a one for each example.

        Args:
            entered: A tensor with the examples first, shape (N, …).

        Returns:
            Ones, shape (N, 1).
        """
        return entered.new_ones(entered.shape[0], 1)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Flatten the gradient of each example.

        Args:
            gradient: Gradients with respect to the parameter, shape (N, *parameter's shape).

        Returns:
            One row per example, shape (N, count).
        """
        return gradient.reshape(gradient.shape[0], self.count)
