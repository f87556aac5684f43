"""Uses of parameters in a forward pass: the products they enter, and the interface that receives them."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.layers.parameter_slice import Place
from engine.tracing.batch_provenance import Rows


@dataclass(frozen=True, kw_only=True)
class Product:
    """One product of data with a trainable matrix: ``left = entered Wᵀ + b``."""

    weight: Place | None
    bias: Place | None
    entered: Tensor
    rows: Rows
    left: Tensor


class Sink(Protocol):
    """A receiver of what the watched parameters do."""

    def factorises(self, weight: Place | None, bias: Place | None) -> bool:
        """Decide whether products with a matrix and its bias are a layer of A and G.

        Args:
            weight: Place of the matrix; None where it is not watched.
            bias: Place of its bias; None where there is none, or it is not watched.

        Returns:
            False to have the parameters taken as a whole.
        """

    def multiplied(self, product: Product) -> Tensor:
        """Receive a product that a matrix, or its bias, entered.

        Args:
            product: The product.

        Returns:
            What stands for its result from now on, of the result's shape (…, out).
        """

    def broadcast(self, names: frozenset[str]) -> bool:
        """Receive parameters that were broadcast over the examples.

        Args:
            names: Their names.

        Returns:
            Whether their gradients are wanted.
        """

    def contributed(self, names: frozenset[str], numbers: int) -> bool:
        """Receive parameters that entered an operation whose examples never meet.

        Args:
            names: Their names.
            numbers: Numbers of each example that are held until its gradient is there.

        Returns:
            Whether their gradients are wanted.
        """

    def expanded(self, names: frozenset[str], *, examples: int) -> bool:
        """Receive parameters with one dimension as long as there are examples, along which all is alike.

        Args:
            names: Their names.
            examples: Length of the dimension.

        Returns:
            Whether it is the dimension of the examples.
        """

    def strange(self, names: frozenset[str], operation: str) -> None:
        """Receive parameters that entered an operation that is not understood.

        Args:
            names: Their names.
            operation: The operation's name; empty where none was seen.
        """
