"""The observer of rows: it sees what the hooks of a pass hand to a layer's sums, and changes nothing of it."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.layers.layer import Use


class RowObserver(Protocol):
    """Sees the rows of one layer as they are summed; ``Collector.observers`` holds those of a batch."""

    def add_input_(self, use: Use) -> None:
        """See the input of one call enter A.

        Args:
            use: The call with its input, examples first, and the positions that count. The model may write to the
                input later.
        """

    def follow(self, use: Use) -> Callable[[Tensor], None]:
        """See one call whose output's gradient is followed.

        Args:
            use: The call with its input, examples first, and the positions that count.

        Returns:
            A function of the gradient, a tensor of the output's shape, examples first, not scaled; it is called once
            for each direction.
        """

    def add_example_gradients_(self, gradients: Tensor, start: int, examples: int) -> None:
        """See gradients of examples with respect to a bare parameter.

        Args:
            gradients: Those of the examples from ``start`` on, shape (n, numbers).
            start: The first of them.
            examples: N of the batch.
        """
